"""What commands show: results on stdout, progress, warnings and notes on stderr; tables and bars are rich's.

All text goes through `show` and `tell`, which make visible what would otherwise control the terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tunable_magmax.errors import StorageError
from tunable_magmax.files import Progress

PIPED_WIDTH = 120
TEXT_WIDTH = 80

# Control characters but tab and line end, marks that turn the direction of text, and halves of characters.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns a text without characters that control a terminal: they are shown as JSON escapes them.

    >>> print(visible("\\x1b[31mred"))
    \\u001b[31mred
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def show(text: str) -> None:
    """Prints on stdout what a command was asked for. A full disk or a closed stdout is a `StorageError`."""
    try:
        sys.stdout.write(_encodable(visible(text), sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hush()
        raise StorageError(unprintable(error)) from None


def unprintable(error: OSError) -> str:
    """Returns what to say where nothing can be written to stdout."""
    return f"the result cannot be printed ({error.strerror}): give stdout a place to go"


def tell(text: str) -> None:
    """Prints on stderr; where that is closed or full, nobody is told."""
    with suppress(OSError):
        sys.stderr.write(_encodable(visible(text), sys.stderr.encoding))
        sys.stderr.flush()


def hush() -> None:
    """Drops further output: nobody reads stdout any more, and Python would complain when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Gives stdout and stderr a place if the program was started without: else a file would get their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _encodable(text: str, encoding: str | None) -> str:
    """Returns a text that a terminal of this encoding can show."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -- one command ------------------------------------------------------------------------------------------------------


@dataclass
class Screen:
    """How one command was asked to print: --quiet, --json; and the warnings that it gave."""

    quiet: bool = False
    json: bool = False
    warnings: list[str] = field(default_factory=list)


_screen: ContextVar[Screen] = ContextVar("screen", default=Screen())  # noqa: B039


@contextmanager
def on_screen(screen: Screen) -> Iterator[None]:
    """Makes the functions below print as this command was asked to."""
    token = _screen.set(screen)
    try:
        yield
    finally:
        _screen.reset(token)


def is_quiet() -> bool:
    """Returns whether --quiet was given."""
    return _screen.get().quiet


def given_warnings() -> list[str]:
    """Returns the warnings that the command gave."""
    return _screen.get().warnings


def show_result(record: Mapping[str, Any] | str, lines: Iterable[str]) -> None:
    """Prints the result of a command: the record as JSON with --json, nothing with --quiet, else the lines."""
    screen = _screen.get()
    if screen.json:
        text = record if isinstance(record, str) else json.dumps(record, indent=1, ensure_ascii=False)
        show(f"{text.rstrip()}\n")
    elif not screen.quiet:
        show("".join(f"{line}\n" for line in lines))


def warn(text: str) -> None:
    """Prints a warning in one line on stderr, unless the command has given it already."""
    given = _screen.get().warnings
    if text not in given:
        given.append(text)
        tell(f"warning: {text}\n")


def note(text: str) -> None:
    """Prints a note in one line on stderr, unless --quiet was given."""
    if not is_quiet():
        tell(f"note: {text}\n")


@contextmanager
def working() -> Iterator[Progress | None]:
    """Shows progress on stderr, and warnings for the user as they come, each once, in a line.

    What libraries print on stdout goes to stderr, as stdout is for the result.
    """

    def shown(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            warn(str(message))

    with _display() as display, warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.showwarning = shown
        warnings.simplefilter("always", UserWarning)
        yield display


# -- texts and tables -------------------------------------------------------------------------------------------------


def screen_width() -> int:
    """Returns the columns that the variable COLUMNS says, or those of the terminal, or a number where there is none."""
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Returns the lines of a text for screens of 80 columns, all but the first indented.

    >>> wrapped("site prior: cat 40.0%, dog 30.0%, and 60 more classes of which the tasks held samples", 2)
    ['site prior: cat 40.0%, dog 30.0%, and 60 more classes of which the tasks held', '  samples']
    """
    return textwrap.wrap(
        text,
        min(TEXT_WIDTH, screen_width()),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def table(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None, fixed: int = 1) -> list[str]:
    """Returns the lines of a table: the first column to the left, the others to the right.

    Where it is wider than the screen, the columns after the first `fixed` go on in further tables below.

    >>> table([["head", "7,680"]], ["layer", "elements"])
    ['  layer  elements', '  head      7,680']
    """
    cells = [[visible(cell).replace("\n", "\\n") for cell in row] for row in [*([header] if header else []), *rows]]
    if not cells:
        return []
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    lines: list[str] = []
    start = min(fixed, len(widths))
    while True:
        stop = start + 1
        while stop < len(widths) and sum(widths[:fixed]) + sum(widths[start : stop + 1]) <= screen_width():
            stop += 1
        lines += [*([""] if lines else []), *_drawn([[*row[:fixed], *row[start:stop]] for row in cells])]
        start = stop
        if start >= len(widths):
            return lines


def _drawn(cells: Sequence[Sequence[str]]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    for column in range(len(cells[0])):
        grid.add_column(justify="right" if column else "left", no_wrap=True)
    for row in cells:
        grid.add_row(*map(Text, row))
    console = Console(width=1 << 16, color_system=None)
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().splitlines()]


# -- progress ---------------------------------------------------------------------------------------------------------

PHASES = {
    "train": "training",
    "survey": "reading",
    "measure": "measuring",
    "merge": "merging",
    "digest": "hashing",
    "convert": "writing",
}
PATIENCE = 10.0
"""Seconds for which nothing is said where stderr is no terminal: short commands leave no lines in a log."""


@contextmanager
def _display() -> Iterator[Progress | None]:
    """Yields what shows progress on stderr: bars on a terminal, lines in a file or pipe; None if nothing is wanted."""
    screen = _screen.get()
    if screen.quiet or screen.json:
        yield None
    elif not sys.stderr.isatty():
        yield progress_lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        what = TextColumn("{task.description:>10}", markup=False)
        columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            yield drawn_bars(bars)


def drawn_bars(bars: Any) -> Progress:
    """Returns what draws each phase as a task of rich's `Progress`."""
    tasks: dict[str, Any] = {}

    def display(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bars.add_task(PHASES.get(phase, phase), total=total)
        bars.update(tasks[phase], completed=done, total=total)

    return display


def progress_lines(clock: Callable[[], float] = time.monotonic) -> Progress:
    """Returns what prints a plain line now and then: each is at least `PATIENCE` seconds, and a tenth, after the last.

    So a command of two minutes leaves about ten lines in a log, and one of a day less than a hundred.
    """
    began = last = clock()

    def display(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if now - last < max(PATIENCE, (now - began) / 10):
            return
        last = now
        share = f"{done / total:.0%} " if total else ""
        tell(f"{PHASES.get(phase, phase)}: {share}after {now - began:.0f} s\n")

    return display
