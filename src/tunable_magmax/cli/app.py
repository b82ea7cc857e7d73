"""The `tmx` program: its commands, and how errors reach the user.

How a command is made, with `merge` as the example:

1. Its options are one frozen dataclass of workflows/options.py, `MergeOptions`: a field with a default and a docstring
   for each option, and groups that commands share (`Output`, `Place`, `Reading`, ...) as nested fields. `parsed` makes
   it readable from the command line: by its field's type, or `TYPES` and `NAMES` below. Nothing heavy is imported:
   `tmx --help` reads it.
2. The workflow, in workflows/merge.py, is a function of what the command is about, the options, `progress` and
   `notify`: `merge(source, options, progress, notify)`. It returns a typed record. With `options.dry_run`, the command
   calls the function that checks everything and returns facts as a dict.
3. The command, cli/merge.py, is a function of the same name: positional arguments, then `options: MergeOptions =
   parsed(MergeOptions)`. It calls the workflow inside `working()`, which shows progress and warnings, and ends with
   `show_result(record, lines)`. --json, --quiet and --debug belong to the program, and no command declares them.
4. In Python, `from_flat(MergeOptions, **keywords)` makes the options of a method's keywords.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, Token, convert
from cyclopts.help import DefaultFormatter, HelpPanel

from tunable_magmax.cli.terminal import Screen, hush, on_screen, open_closed_streams, show, tell, unprintable
from tunable_magmax.engines.settings import Output, Place
from tunable_magmax.errors import InputError, StorageError, TmxError
from tunable_magmax.files import remedy
from tunable_magmax.merging.options import MethodOptions, Options, WeightedOptions
from tunable_magmax.version import __version__
from tunable_magmax.workflows.options import Checkpoints, Embedding, Reading, SiteSources

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

GO_ON = ("init", "train", "reproduce", "demo")
"""Commands that keep what they have done when they are stopped."""
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


def _converted(kind: Any, tokens: Sequence[Any]) -> Any:
    """Reads an option as its type says. Cyclopts alone would round 2.5 where a whole number is wanted."""
    for token in tokens if kind in (int, int | None) else ():
        if "." in token.value:
            raise ValueError(f"{token.value} is not a whole number.")
    return convert(kind, tokens)


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
    default_parameter=Parameter(negative=(), show_default=_shown_default, converter=_converted),
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
        end = "" if str(error).endswith((".", "?")) else "."
        return fail("UsageError", f"{error}{end} See tmx {command + ' ' if command else ''}--help.", 2)
    except TmxError as error:
        message = "; ".join([str(error), *getattr(error, "__notes__", ())])
        return fail(type(error).__name__, message, error.exit_code, getattr(error, "problems", ()))
    except KeyboardInterrupt as error:
        return fail("Interrupted", *stop_message(error, command))
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


# -- how options are read ---------------------------------------------------------------------------------------------

Kind = TypeVar("Kind")


def read_numbers(text: str) -> list[str] | dict[str, str]:
    """Splits numbers with commas between them, one for each task or by name; they stay text, which is exact.

    >>> read_numbers("3,1,0"), read_numbers("travel=7, hotels, bars=1/3")
    (['3', '1', '0'], {'travel': '7', 'hotels, bars': '1/3'})
    """
    parts = [part.strip() for part in text.split(",")]
    if all(map(_is_number, parts)):
        return parts
    # A name may have commas, too: NAME=, number, NAME=, number, ..., and nothing.
    *parts, rest = re.split(r"(?<==)([^=,]+)(?:,|$)", text)
    pairs = [(name[:-1].strip(), value.strip()) for name, value in zip(parts[::2], parts[1::2], strict=True)]
    if not pairs or rest or not all(name and _is_number(value) for name, value in pairs):
        raise InputError(f"{text!r} should be numbers with commas between them, as 3,1,0 or travel=7,bank=3")
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise InputError(f"{text!r} names a task twice")
    return by_name


def _is_number(word: str) -> bool:
    try:
        return bool([float(part) for part in word.split("/")])
    except ValueError:
        return False


def _numbers(_: Any, tokens: Sequence[Token]) -> list[str] | dict[str, str]:
    return read_numbers(tokens[0].value)


def _path(_: Any, tokens: Sequence[Token]) -> Path:
    return Path(tokens[0].value)


WHAT, HOW = Group("What is merged", sort_key=1), Group("How it is merged", sort_key=2)
SITE, DATA = Group("What is known of the site", sort_key=1), Group("How data are read", sort_key=3)
OUTPUT = Group("Output and resources", sort_key=4)
GROUPS = {
    Checkpoints: WHAT,
    **dict.fromkeys((MethodOptions, WeightedOptions, Options), HOW),
    SiteSources: SITE,
    **dict.fromkeys((Embedding, Reading), DATA),
    **dict.fromkeys((Output, Place), OUTPUT),
}
SIGNED = Parameter(allow_leading_hyphen=True)
"""For numbers: a negative one is refused as such, not as an unknown option."""
NUMBERS = Parameter(converter=_numbers, n_tokens=1, accepts_keys=False, allow_leading_hyphen=True, metavar="N,N,...")
A_FILE = Annotated[Any, Parameter(converter=_path, n_tokens=1, accepts_keys=False, metavar="PATH")]
NO_OPTION = Annotated[Any, Parameter(parse=False)]
TYPES: dict[str, Any] = {
    "method": str | None,
    "scale": Annotated[float | Literal["matched"] | None, SIGNED],
    "seed": int | None,
    "weights": Annotated[Any, NUMBERS],
    "start": Annotated[Any, NUMBERS, Parameter(name="--from")],
    "stop": Annotated[Any, NUMBERS, Parameter(name="--to")],
    "scope": Literal["model", "tensor"] | None,
    "out_dtype": Annotated[Literal["float64", "float32", "float16", "bfloat16"] | None, Parameter(name="--dtype")],
    **dict.fromkeys(("inputs", "labels", "labelled", "data", "preference"), A_FILE),
    **dict.fromkeys(("budget", "compare", "density", "normalize", "fitted_head", "raw"), NO_OPTION),
}
"""What the command line takes for options that take anything in Python, or that it does not have."""
NAMES = {
    "out": Parameter(name=["--out", "-o"]),
    "changes": Parameter(name="--set", negative=()),
    **dict.fromkeys(("scale", "seed", "alpha"), SIGNED),
}
"""Other names of options, and those that take negative numbers."""


@cache
def parsed(kind: type[Kind]) -> Kind:
    """Makes a class of options, and the groups in it, readable from the command line; returns its defaults."""
    for field in fields(kind):  # type: ignore[arg-type]
        if is_dataclass(field.default):
            parsed(type(field.default))  # type: ignore[arg-type]
    for holder in filter(is_dataclass, kind.__mro__):
        for name in holder.__annotations__:
            hint = get_type_hints(holder)[name]
            if name in TYPES and (hint in (Any, str | None) or TYPES[name] is NO_OPTION):
                holder.__annotations__[name] = TYPES[name]
            elif name in NAMES:
                holder.__annotations__[name] = Annotated[hint, NAMES[name]]
    listed = Parameter(name="*", group=GROUPS[kind]) if kind in GROUPS else Parameter(name="*")
    return listed(kind)()


# -- how the program stops --------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(KeyboardInterrupt):
    """A signal asked the program to stop; `number` is that signal's. Work stops as for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP stop the work as Ctrl-C does, and a second signal end the process without a word.

    Signals that are ignored, as by nohup, stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only there may handlers be set
        return
    owner = os.getpid()
    seen: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked process is ended by others, and has nothing to say
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise StoppedError(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, stop)
        yield
    finally:
        if not seen:  # else the next one shall end the process, also while Python itself is ending
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_message(error: KeyboardInterrupt, command: str) -> tuple[str, int]:
    """Returns what to say of a stop, and the exit code that shells know it by: 128 and the number of the signal."""
    number = getattr(error, "number", int(signal.SIGINT))
    cause = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    kept = "finished work is kept, run the same command again to go on"
    begun = kept if command in GO_ON else "nothing was kept, the same command begins anew"
    notes = getattr(error, "__notes__", [begun])
    return "; ".join([cause, *notes]), 128 + number


_REFUSED = ("can't allocate memory", "Cannot allocate memory", "can't start new thread", "failed to map segment")
_WANTED = re.compile(r"(?:[Uu]nable to|tried to) allocate ([\d.]+ \w+)")


def memory_message(error: Exception) -> str | None:
    """Returns what to say where the system refused memory; None of any other error.

    >>> memory_message(RuntimeError("can't allocate memory: you tried to allocate 4000 bytes. Error code 12"))
    'the system refused memory (4000 bytes more were wanted): ...'
    >>> memory_message(RuntimeError("no such layer"))
    """
    text, cause = str(error), error.__cause__ or error.__context__
    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not refused and not any(words in text for words in _REFUSED):
        return memory_message(cause) if isinstance(cause, Exception) else None
    wanted = _WANTED.search(text)
    more = f" ({wanted[1]} more were wanted)" if wanted else ""
    return (
        f"the system refused memory{more}: end other programs or raise the limit (ulimit -v); for commands that merge, "
        "give less than there is as --memory, such as --memory 1GiB"
    )
