"""The help texts, and that they come without heavy imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module

import pytest

import tunable_magmax
from tunable_magmax.cli.app import COMMANDS, app

OPTIONS = {
    "tailor": "RUN_DIR --out -o --weights --alpha --equal --labels --inputs --labelled "
    "--preference --method --scale --head --estimator --heads --seed --max-samples --split --text-column "
    "--label-column --device --memory --shard-size --threads --overwrite --dry-run "
    "--quiet -q --json",
    "init": "RUN_DIR --base --task --data --eval-data --head --overwrite --dry-run --quiet -q --json --keep "
    "--text-column --label-column --split --classes --rows --seed --device --force",
    "merge": "SOURCE --out -o --base --task --weights --budget --preference --method --scale --scope --compare --keep "
    "--density --seed --dtype --include --exclude --memory --shard-size --threads --overwrite "
    "--engine --workers --ray-address --dry-run --quiet -q --json",
    "plan": "SOURCE --out -o --base --task --weights --memory --shard-size --json",
    "sweep": "SOURCE --out -o --from --to --steps --grid --preference --base --task --method --scale --scope --compare "
    "--keep --density --seed --dtype --include --exclude --reports-only --memory --shard-size --threads --overwrite "
    "--plot --dry-run --quiet -q --json --data --head --limit --device",
    "prefer": "RUN_DIR --out -o --plot --quiet -q --json --weights --alpha --equal --labels --inputs "
    "--labelled --method --raw --prior --trials --patience --search-scale --seed "
    "--max-samples --split --text-column --label-column --device",
    "head": "MODEL --out -o --overwrite --quiet -q --json --names --data --templates --split --text-column "
    "--label-column --device",
    "train": "CONFIG --out -o --set --device --strict --dry-run --quiet -q --json",
    "eval": "MODEL --checkpoint --confusion --per-class --explain --quiet -q --json --data --head --run --prior "
    "--split --text-column --label-column --limit --draw-seed --strict --level --batch --device --base --task "
    "--weights --budget --preference --method --scale --scope --compare --keep --density --seed --dtype --include "
    "--exclude",
    "compare": "RUN_DIR --preference --data --head --split --text-column --label-column --limit --batch --device "
    "--scales --old-heads --seed --plot --dry-run --quiet -q --json",
    "predict": "MODEL INPUTS --text --out -o --csv --quiet -q --json --head --prior --top --split --text-column "
    "--batch --device --strict",
    "studio": "RUN_DIR --out -o --data --inputs --labels --labelled --preference --samples --port "
    "--no-browser --seed --device --quiet -q --json",
    "reproduce": "CONFIG --out -o --work --set --device --engine --ray-address --dry-run --quiet -q --json",
    "inspect": "PATH --tensors --shares --plot --json",
    "verify": "PATH --base --task --memory --threads --quiet -q --json",
    "convert": "SOURCE --out -o --shard-size --strip-prefix --overwrite --quiet -q --json",
    "push": "MODEL REPO --private --revision --dry-run --json",
    "demo": "--out -o --seed --json",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_names_its_options(tmx, command):
    result = tmx(command, "--help")
    assert result.code == 0
    assert not result.err
    words = result.out.split()
    assert [option for option in OPTIONS[command].split() if option not in words] == []
    assert "--no-" not in result.out.replace("--no-browser", "")
    assert "[default: False]" not in result.out


def test_every_command_is_listed_with_a_summary(tmx):
    result = tmx("--help")
    fresh = subprocess.run([sys.executable, "-m", "tunable_magmax"], capture_output=True, text=True, timeout=60)
    assert result.code == fresh.returncode == 0
    assert fresh.stdout.split() == result.out.split()
    assert list(COMMANDS) == list(OPTIONS)
    for name in COMMANDS:
        command = getattr(import_module(f"tunable_magmax.cli.{name}"), name)
        assert name in result.out
        assert " ".join(command.__doc__.split()[:3]) in result.out
    assert tmx().out == result.out


def test_version(tmx):
    assert tmx("--version").out.strip() == tunable_magmax.__version__


def test_an_unknown_command(tmx):
    result = tmx("mrege")
    assert result.code == 2
    assert "mrege" in result.err
    assert "merge" in result.err


@pytest.mark.parametrize("arguments", [["--help"], ["merge", "--help"], ["verify", "--help"], ["--version"]])
def test_help_needs_no_heavy_imports(arguments):
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


def test_no_command_is_without_a_test():
    assert {name for name in app if not name.startswith("-")} == OPTIONS.keys()


@pytest.mark.parametrize("command", OPTIONS)
def test_errors_are_json_where_json_is_asked_for(tmx, tmp_path, command):
    """On stdout an object, on stderr the same line as ever, and the same exit code."""
    nowhere = {"UsageError": ["--bogus"]}
    if command != "demo":  # which takes nothing that could be missing
        nowhere["InputError"] = [tmp_path / "nowhere.json", "-o", tmp_path / "out"]
        if command in ("init", "inspect", "verify", "eval", "compare"):
            del nowhere["InputError"][1:]
        if command == "push":
            nowhere["InputError"][1:] = ["org/name"]
    for kind, arguments in nowhere.items():
        plain, told = tmx(command, *arguments), tmx(command, *arguments, "--json")
        error = json.loads(told.out)["error"]
        assert error["kind"] == kind
        assert f"error: {error['message']}\n" == told.err == plain.err
        assert told.code == plain.code == 2
        assert plain.out == ""


def test_what_should_not_happen_is_json_too(tmx, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("tunable_magmax.workflows.convert.convert_checkpoint", broken)
    result = tmx("convert", tmp_path, "-o", tmp_path / "out", "--json")
    assert json.loads(result.out)["error"]["kind"] == "ZeroDivisionError"
    assert (result.code, "ZeroDivisionError: oh" in result.err) == (1, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_descriptions_of_options_are_aligned(tmx, command):
    """Lines of docstrings that are broken, or indented, in the source do not show."""
    begins = None
    for line in tmx(command, "--help").out.splitlines():
        if found := re.match(r"│ (?:\*  |   )?[^\s*].*?  +(?=[^\s│])", line):
            begins = found.end()
        elif begins is not None and (found := re.match(r"│ {6,}(?=[^\s│])", line)):
            assert found.end() == begins, line


def test_no_default_is_empty(tmx):
    assert not [command for command in COMMANDS if "[default: ]" in tmx(command, "--help").out]
