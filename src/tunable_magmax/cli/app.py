"""The `tmx` program: its commands, and how errors reach the user."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from tunable_magmax.cli.convert import convert
from tunable_magmax.cli.demo import demo
from tunable_magmax.cli.eval import eval as measure
from tunable_magmax.cli.inspect import inspect
from tunable_magmax.cli.merge import merge
from tunable_magmax.cli.plan import plan
from tunable_magmax.cli.prefer import prefer
from tunable_magmax.cli.profile import profile
from tunable_magmax.cli.reproduce import reproduce
from tunable_magmax.cli.sweep import sweep
from tunable_magmax.cli.train import train
from tunable_magmax.cli.verify import verify
from tunable_magmax.errors import TmxError
from tunable_magmax.version import __version__


def _said(default: Any) -> Any:
    """A default worth showing: a flag's is clear, and None is explained in the help text."""
    return None if default is None or isinstance(default, bool) else default


app = App(
    name="tmx",
    help="Merge the checkpoints of a continually trained model into the one model that a given deployment needs.",
    version=__version__,
    help_epilogue="Exit codes: 0 done, 2 bad input or usage, 1 anything else. --debug shows tracebacks.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), show_default=_said),
)
COMMANDS: tuple[Callable[..., Any], ...] = (
    merge,
    plan,
    sweep,
    prefer,
    profile,
    train,
    measure,
    reproduce,
    inspect,
    verify,
    convert,
    demo,
)
for _place, _command in enumerate(COMMANDS):
    app.command(_command, sort_key=_place)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with its code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug, as_json = "--debug" in tokens, "--json" in tokens
    tokens = [token for token in tokens if token != "--debug"]

    def fail(kind: str, message: str, code: int) -> int:
        sys.stderr.write(f"error: {message.strip()}\n")
        if as_json:
            with suppress(BrokenPipeError):
                sys.stdout.write(json.dumps({"error": {"kind": kind, "message": message.strip()}}, indent=1) + "\n")
                sys.stdout.flush()
                return code
            hush()
        return code

    def hush() -> None:
        """The reader has left; nothing more to say."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    try:
        sys.exit(app(tokens, exit_on_error=False, print_error=False, result_action="return_int_as_exit_code_else_zero"))
    except CycloptsError as error:
        command = next((f"{c.__name__} " for c in COMMANDS if tokens[:1] == [c.__name__]), "")
        sys.exit(fail("UsageError", f"{error} See tmx {command}--help.", 2))
    except TmxError as error:
        if debug:
            traceback.print_exc()
        sys.exit(fail(type(error).__name__, str(error), error.exit_code))
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
