"""The `tmx` program: its commands, and how errors reach the user.

How a command is made, with `merge` as the example:

1. Its workflow, workflows/merge.py, declares the options as one frozen dataclass, `MergeOptions`: a field with a
   default and a docstring for each option, and groups that commands share (`Weighting`, `Output`, `Reading`, ... of
   workflows/options.py) as nested fields. A decorator `@Parameter(name="*")` makes fields options without a prefix; a
   `Parameter` in a field's annotation gives another name or a parser (`Out`, `Numbers`, `FileOrValue`). Nothing heavy
   is imported at the top of such a module: `tmx --help` imports all of them.
2. The workflow is a function of what the command is about, the options, `progress` and `notify`: `merge(source,
   options, progress, notify)`. It returns a typed record. With `options.dry_run`, the command calls the function that
   checks everything and returns facts as a dict.
3. The command, cli/merge.py, is a function of the same name: positional arguments, then `options: MergeOptions =
   MergeOptions()`. It calls the workflow inside `working()`, which shows progress and warnings, and ends with
   `show_result(record, lines)`. --json, --quiet and --debug belong to the program, and no command declares them.
4. In Python, `from_flat(MergeOptions, **keywords)` makes the options of a method's keywords; `given(options)` are those
   that a record needs to hold.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.help import DefaultFormatter, HelpPanel

from tunable_magmax.cli.stopping import memory_message, stop_message, stopped_by_signals
from tunable_magmax.cli.terminal import Screen, hush, on_screen, open_closed_streams, show, tell, unprintable
from tunable_magmax.errors import InputError, StorageError, TmxError
from tunable_magmax.files import remedy
from tunable_magmax.version import __version__

THEIR_DISK = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EMFILE, errno.ENFILE),
)
"""What goes wrong with a disk or its rights, wherever it happens, is no fault of the program."""
DOCS = "https://tunable-magmax.github.io/tunable-magmax"
# Each is a function of the same name in a module of that name.
COMMANDS = (
    "tailor",
    "init",
    "merge",
    "sweep",
    "prefer",
    "train",
    "eval",
    "compare",
    "predict",
    "studio",
    "reproduce",
    "inspect",
    "convert",
    "push",
    "demo",
)

# Options of Python as errors name them, which the command line spells in its own way.
_COLUMN = re.compile(r"(?<![\w/.-])(text|label)_column(?![\w/.-])")
FLAGS = {"--debug": "debug", "--json": "json", "--quiet": "quiet", "-q": "quiet"}
"""Options of the program, which every command has."""


def unwrapped(text: str) -> str:
    """Joins the lines of each paragraph, but for examples: those are lines that begin with the program's name.

    >>> unwrapped("A sentence that\\n    goes on.\\n\\ntmx merge a\\ntmx merge b")
    'A sentence that goes on.\\n\\ntmx merge a\\ntmx merge b'
    """
    return "\n\n".join(
        part if part.startswith("tmx ") else re.sub(r"\s*\n\s*", " ", part) for part in text.split("\n\n")
    )


class UnwrappedHelp(DefaultFormatter):
    """The usual layout, with texts wrapped to the width of the terminal alone."""

    def __call__(self, console: Any, options: Any, panel: HelpPanel) -> None:
        """Prints a panel of options."""
        for entry in panel.entries:
            _unwrap(entry.description)
        super().__call__(console, options, panel)

    def render_description(self, console: Any, options: Any, description: Any) -> None:
        """Prints what a command does."""
        _unwrap(description)
        super().render_description(console, options, description)


def _unwrap(text: Any) -> None:
    from rich.text import Text

    plain = getattr(text, "primary_renderable", None)
    if isinstance(plain, Text):
        text.primary_renderable = Text(unwrapped(plain.plain))


def _shown_default(default: Any) -> Any:
    """Returns a default worth showing: that of a flag is clear, and an empty one is explained in the help text."""
    return None if default in (None, "", ()) or isinstance(default, bool) else default


app = App(
    name="tmx",
    help="Merge the checkpoints of a continually trained model into the one model that a given deployment needs.",
    version=__version__,
    help_epilogue=(
        "Every command: --json prints the result, or the error, as JSON; --quiet (-q) neither progress nor a summary; "
        "--debug shows tracebacks.\n"
        "Exit codes: 0 done, 2 bad input or usage, 130 Ctrl-C, 1 anything else.\n"
        f"Docs: {DOCS}"
    ),
    help_format="plaintext",
    help_formatter=UnwrappedHelp(),
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), show_default=_shown_default),
)
for _place, _name in enumerate(COMMANDS):
    app.command(f"tunable_magmax.cli.{_name}:{_name}", sort_key=_place)  # imported when it is used
app.register_install_completion_command(help="Install completion of options and commands for this shell.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    # Before numpy is loaded: the threads of OpenBLAS wait by spinning, which costs small fits several times their work.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    open_closed_streams()
    tokens, flags = split_flags(sys.argv[1:] if arguments is None else arguments)
    with stopped_by_signals(), on_screen(Screen("quiet" in flags, "json" in flags)):
        code = _run(tokens, flags)
    sys.exit(code)


def split_flags(tokens: Sequence[str]) -> tuple[list[str], set[str]]:
    """Returns the tokens of a command, and which options of the program stand among them.

    >>> split_flags(["merge", "run", "-q", "-o", "out"])
    (['merge', 'run', '-o', 'out'], {'quiet'})
    """
    found = {FLAGS[token] for token in tokens if token in FLAGS}
    return [token for token in tokens if token not in FLAGS], found


def _require_folder() -> None:
    try:
        Path.cwd()
    except OSError:  # libraries would end the process without a word of their own
        raise InputError("the folder that this shell is in is gone: change to another with cd") from None


def _run(tokens: Sequence[str], flags: set[str]) -> int:
    command = next((name for name in COMMANDS if tokens[:1] == [name]), "")

    def fail(kind: str, message: str, code: int, problems: Sequence[str] = ()) -> int:
        message, problems = _COLUMN.sub(r"--\1-column", message), [_COLUMN.sub(r"--\1-column", p) for p in problems]
        if "debug" in flags:
            tell(traceback.format_exc())
        tell(f"error: {message.strip()}\n")
        if "json" in flags:
            listed = {"problems": list(problems)} if problems else {}
            record = {"error": {"kind": kind, "message": message.strip(), **listed}}
            try:
                show(json.dumps(record, indent=1) + "\n")
            except (BrokenPipeError, StorageError):
                hush()
        return code

    try:
        _require_folder()
        if not command:
            list(app.subapps)  # imports all commands: the help of the program shows the first lines of theirs
        done = app(tokens, exit_on_error=False, print_error=False, result_action="return_int_as_exit_code_else_zero")
        show("")  # flushes what others printed, such as the help
        return int(done)
    except CycloptsError as error:
        return fail("UsageError", f"{error} See tmx {command + ' ' if command else ''}--help.", 2)
    except TmxError as error:
        return fail(type(error).__name__, str(error), error.exit_code, getattr(error, "problems", ()))
    except KeyboardInterrupt as error:
        return fail("Interrupted", *stop_message(error))
    except BrokenPipeError:
        hush()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EBADF, errno.ENOSPC):
            hush()  # the help, which others print
            return fail("StorageError", unprintable(error), 1)
        if isinstance(error, OSError) and error.filename is not None and error.errno in THEIR_DISK:
            return fail("StorageError", f"{error.filename}: {error.strerror}: {remedy(error)} and run it again", 1)
        kind, refused = type(error).__name__, memory_message(error)
        if refused is not None:
            return fail("MemoryError", refused, 1)
        return fail(kind, f"{kind}: {error}\nThis should not happen; --debug shows where.", 1)
