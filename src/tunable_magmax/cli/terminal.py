"""What commands show on a terminal: tables of plain text, progress on stderr, and warnings as plain lines.

All text goes through `show` and `tell`, which make visible what would otherwise control the terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from tunable_magmax.errors import StorageError
from tunable_magmax.files import Progress

if TYPE_CHECKING:
    from tunable_magmax.training.loop import Tick

NARROWEST = 20
PIPED_WIDTH = 120

# Control characters but tab and line end, marks that turn the direction of text, and halves of characters.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns a text without characters that control a terminal: they are shown as JSON escapes them.

    >>> print(visible("\\x1b[31mred"))
    \\u001b[31mred
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def unprintable(error: OSError) -> str:
    """Returns what to say where nothing can be written to stdout."""
    return f"the result cannot be printed ({error.strerror}): give stdout a place to go"


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
    """Opens stdout and stderr if the program was started without: a file would get their numbers, and what is printed.

    Whatever is then printed on stdout fails, as it should.
    """
    for descriptor, mode in ((1, os.O_RDONLY), (2, os.O_WRONLY)):
        if (sys.stdout, sys.stderr)[descriptor - 1] is not None:
            continue
        nowhere = os.open(os.devnull, mode)
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        if descriptor == 1:
            sys.stdout = stream
        else:
            sys.stderr = stream


def _encodable(text: str, encoding: str | None) -> str:
    """Returns a text that a terminal of this encoding can show."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Returns lines with the columns of `rows` aligned: the first to the left, the others to the right.

    >>> table([["layer", "elements"], ["head", "7,680"]])
    ['  layer  elements', '  head      7,680']
    """
    rows = [[visible(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])).rstrip() for row in rows
    ]


def wrapped_table(rows: Sequence[Sequence[str]], fixed: int, width: int) -> list[str]:
    """Splits a wide table into several narrower ones, one below the other, each with the first `fixed` columns.

    >>> wrapped_table([["", "task 1", "task 2"], ["a", "10", "20"]], fixed=1, width=14)
    ['     task 1', '  a      10', '', '     task 2', '  a      20']
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines: list[str] = []
    start = fixed
    while start < len(widths):
        stop, used = start + 1, sum(widths[:fixed]) + widths[start]
        while stop < len(widths) and used + widths[stop] <= width:
            used += widths[stop]
            stop += 1
        lines += [*([""] if lines else []), *table([[*row[:fixed], *row[start:stop]] for row in rows])]
        start = stop
    return lines


def widen_narrow_screens() -> None:
    """Sees to it that a screen has at least a few columns: libraries do not end laying out text for none or two."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)
    if screen_width() < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)


def screen_width() -> int:
    """Returns the columns that the variable COLUMNS says, or those of the terminal, or a number where there is none."""
    return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns


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
def progress_bars(quiet: bool) -> Iterator[Progress | None]:
    """Yields a callback progress(phase, done, total) that shows how far each phase is; None if nothing is wanted."""
    with _display(quiet) as display:
        yield None if display is None else _phases(display)


@contextmanager
def training_bars(quiet: bool) -> Iterator[tuple[Progress | None, Callable[[Tick], None] | None]]:
    """Yields such a callback, and one for training that also shows loss and speed; None if nothing is wanted."""
    with _display(quiet) as display:
        if display is None:
            yield None, None
            return

        def watch(tick: Tick) -> None:
            what = f"task {tick.task + 1} of {tick.tasks}, epoch {tick.epoch}"
            # Tasks of a sequence are about equally long, so the bar counts in shares of tasks.
            done = int(1000 * (tick.task + tick.step / tick.steps))
            note = f"loss {tick.loss:.3f}, {tick.samples_per_second:,.0f} samples/s"
            display("training", what, done, 1000 * tick.tasks, note)

        yield _phases(display), watch


Display: TypeAlias = Callable[[str, str, int, int, str], None]
"""Called as display(bar, what, done, total, note): the bar is the same while what it is about changes."""


def _phases(display: Display) -> Progress:
    return lambda phase, done, total: display(phase, PHASES.get(phase, phase), done, total, "")


@contextmanager
def _display(quiet: bool) -> Iterator[Display | None]:
    """Yields what shows progress on stderr: bars on a terminal, lines in a file or pipe; None if nothing is wanted."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield progress_lines()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        what, note = (TextColumn(form, markup=False) for form in ("{task.description:>10}", "{task.fields[note]}"))
        columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), note)
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            yield drawn_bars(bars)


def drawn_bars(bars: Any) -> Display:
    """Returns what draws each bar as a task of rich's `Progress`."""
    tasks: dict[str, Any] = {}

    def display(bar: str, what: str, done: int, total: int, note: str) -> None:
        if bar not in tasks:
            tasks[bar] = bars.add_task(what, total=total, note=note)
        bars.update(tasks[bar], description=what, completed=done, total=total, note=note)

    return display


def progress_lines(clock: Callable[[], float] = time.monotonic) -> Display:
    """Returns what prints a plain line now and then: each is at least `PATIENCE` seconds, and a tenth, after the last.

    So a command of two minutes leaves about ten lines in a log, and one of a day less than a hundred.
    """
    began = last = clock()

    def display(bar: str, what: str, done: int, total: int, note: str) -> None:
        nonlocal last
        now = clock()
        if now - last < max(PATIENCE, (now - began) / 10):
            return
        last = now
        share = f"{done / total:.0%} " if total else ""
        tell(f"{what}: {share}after {now - began:.0f} s{note and f', {note}'}\n")

    return display


_given: ContextVar[set[str] | None] = ContextVar("given", default=None)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Makes `warn` leave out what it has said before in the same command."""
    token = _given.set(set())
    try:
        yield
    finally:
        _given.reset(token)


def warn(text: str) -> None:
    """Prints a warning in one line on stderr, unless the command has given it already."""
    given = _given.get()
    if given is None or text not in given:
        tell(f"warning: {text}\n")
    if given is not None:
        given.add(text)


def note(text: str) -> None:
    """Prints a note in one line on stderr."""
    tell(f"note: {text}\n")


@contextmanager
def plain_warnings() -> Iterator[list[str]]:
    """Prints each warning for the user once, as soon as it comes, in one line; yields the list of them."""
    texts: list[str] = []

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning) and str(message) not in texts:
            texts.append(str(message))
            warn(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("always", UserWarning)
        yield texts
