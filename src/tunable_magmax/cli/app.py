"""The `tmx` program: its commands, and how errors reach the user."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from tunable_magmax.cli.terminal import each_warning_once
from tunable_magmax.errors import TmxError
from tunable_magmax.version import __version__

DOCS = "https://tunable-magmax.github.io/tunable-magmax"
# Each is a function of the same name in a module of that name.
COMMANDS = (
    "tailor",
    "init",
    "merge",
    "plan",
    "sweep",
    "prefer",
    "profile",
    "train",
    "eval",
    "compare",
    "predict",
    "studio",
    "reproduce",
    "inspect",
    "verify",
    "convert",
    "push",
    "demo",
)


def _shown_default(default: Any) -> Any:
    """Returns a default worth showing: that of a flag is clear, and None is explained in the help text."""
    return None if default is None or isinstance(default, bool) else default


app = App(
    name="tmx",
    help="Merge the checkpoints of a continually trained model into the one model that a given deployment needs.",
    version=__version__,
    help_epilogue=f"Exit codes: 0 done, 2 bad input or usage, 1 anything else. --debug shows tracebacks.\nDocs: {DOCS}",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), show_default=_shown_default),
)
for _place, _name in enumerate(COMMANDS):
    app.command(f"tunable_magmax.cli.{_name}:{_name}", sort_key=_place)  # imported when it is used
app.register_install_completion_command(help="Install completion of options and commands for this shell.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug, as_json = "--debug" in tokens, "--json" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    command = next((name for name in COMMANDS if tokens[:1] == [name]), "")

    def fail(kind: str, message: str, code: int, problems: Sequence[str] = ()) -> int:
        sys.stderr.write(f"error: {message.strip()}\n")
        if as_json:
            listed = {"problems": list(problems)} if problems else {}
            with suppress(BrokenPipeError):
                record = {"error": {"kind": kind, "message": message.strip(), **listed}}
                sys.stdout.write(json.dumps(record, indent=1) + "\n")
                sys.stdout.flush()
                return code
            hush()
        return code

    def hush() -> None:
        """Drops further output: the reader of stdout has left."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    try:
        if not command:
            list(app.subapps)  # imports all commands: the help of the program shows the first lines of theirs
        with each_warning_once():
            code = app(
                tokens, exit_on_error=False, print_error=False, result_action="return_int_as_exit_code_else_zero"
            )
        sys.exit(code)
    except CycloptsError as error:
        sys.exit(fail("UsageError", f"{error} See tmx {command + ' ' if command else ''}--help.", 2))
    except TmxError as error:
        if debug:
            traceback.print_exc()
        sys.exit(fail(type(error).__name__, str(error), error.exit_code, getattr(error, "problems", ())))
    except KeyboardInterrupt:
        sys.exit(fail("Interrupted", "interrupted; run the same command again to go on", 1))
    except BrokenPipeError:
        hush()
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        kind = type(error).__name__
        sys.exit(fail(kind, f"{kind}: {error}\nThis should not happen; --debug shows where.", 1))
