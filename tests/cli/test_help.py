"""The commands, how many options they have, and their help."""

import json
import subprocess
import sys

import pytest

import tunable_magmax
from tunable_magmax.cli.app import COMMANDS, app

MOST_OPTIONS = 141
"""Options of all commands together; a new one replaces another."""
COLUMNS, LINES = 80, 96
"""Two screens."""


def options(command: str) -> list[str]:
    arguments = app[command].assemble_argument_collection()
    return [name for argument in arguments if argument.show for name in argument.names[:1] if name.startswith("--")]


def test_options_are_counted() -> None:
    assert sum(len(options(command)) for command in COMMANDS) <= MOST_OPTIONS
    assert {name for name in app if not name.startswith("-")} == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_two_screens(tmx, monkeypatch, command) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    result = tmx(command, "--help")
    lines = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    words = result.out.split()
    assert [option for option in options(command) if option not in words] == []
    assert not any(odd in result.out for odd in ("[default: ]", "[default: ()]", "[default: False]", "--no-q"))


def test_without_a_command_all_are_listed(tmx) -> None:
    result = tmx("--help")
    assert result.code == 0
    assert [name for name in COMMANDS if name not in result.out.split()] == []
    assert tmx().out == result.out
    assert tmx("--version").out.strip() == tunable_magmax.__version__


@pytest.mark.parametrize("arguments", [["--help"], ["merge", "--help"], ["--version"]])
def test_help_needs_no_heavy_imports(arguments) -> None:
    code = f"""
import sys
from tunable_magmax.cli.app import main
try:
    main({arguments!r})
except SystemExit as stopped:
    assert not stopped.code
heavy = {{"torch", "numpy", "numba", "yaml", "safetensors", "transformers", "matplotlib", "rich.progress"}}
print("heavy:", *sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy:"


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_are_json_where_json_is_asked_for(tmx, command) -> None:
    """On stdout an object, on stderr the same line as ever, and the same exit code."""
    plain, asked = tmx(command, "--bogus"), tmx(command, "--bogus", "--json")
    error = json.loads(asked.out)["error"]
    assert error["kind"] == "UsageError"
    assert f"error: {error['message']}\n" == asked.err == plain.err
    assert (asked.code, plain.code, plain.out) == (2, 2, "")


@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError("oh"), 1), (KeyboardInterrupt(), 130)])
def test_what_ends_a_command_is_json_too(tmx, monkeypatch, tmp_path, error, code) -> None:
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("tunable_magmax.workflows.convert.convert_checkpoint", broken)
    result = tmx("convert", tmp_path, "-o", tmp_path / "out", "--json")
    assert json.loads(result.out)["error"]["kind"] == {1: "ZeroDivisionError", 130: "Interrupted"}[code]
    assert result.code == code
    assert "Traceback" not in result.err
    assert tmx("convert", tmp_path, "-o", tmp_path / "out", "--debug").err.startswith("Traceback")
