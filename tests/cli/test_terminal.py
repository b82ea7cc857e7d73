"""What reaches the terminal, and how the program ends when nobody can read it or a signal stops it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tunable_magmax
from tunable_magmax.cli import terminal
from tunable_magmax.cli.app import stop_message

TMX = [sys.executable, "-c", "from tunable_magmax.cli.app import main; main()"]
HOSTILE = {"a\x1b[31mred\x07": 4, "b\u202eevil": 4, "[bold]c\nerror: all is lost": 3, "d\x9b2J\x7f": 2}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with base and task whose tensors have names that would control a terminal."""
    for place, name in enumerate(("base", "task")):
        save_file({key: torch.full((n,), float(place)) for key, n in HOSTILE.items()}, tmp_path / f"{name}.safetensors")
    return tmp_path


def harmless(text: str) -> bool:
    return re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text) is None


def test_names_cannot_control_the_terminal(hostile: Path, tmx) -> None:
    base, task = hostile / "base.safetensors", hostile / "task.safetensors"
    save_file({"a\x1b[31mred\x07": torch.zeros(5)}, hostile / "other.safetensors")
    shown = tmx("inspect", base)
    assert shown.code == 0
    assert "  a\\u001b[31mred\\u0007 " in shown.out
    assert "  [bold]c\\nerror: all is lost " in shown.out
    merged = tmx("merge", "--base", base, "--task", task, "-o", hostile / "out.safetensors")
    others = [
        tmx("inspect", hostile / "out.safetensors", "--tensors"),
        tmx("merge", "--base", base, "--task", task, "--dry-run"),
        tmx("merge", "--base", base, "--task", hostile / "other.safetensors", "-o", hostile / "no"),
        tmx("merge", "--base", base, "--task", hostile / "other.safetensors", "--dry-run"),
        tmx("inspect", "--verify", hostile / "out.safetensors"),
        tmx("merge", hostile / "no\x1b[2Jsuch"),
    ]
    assert [merged.code, *(result.code for result in others)] == [0, 0, 0, 2, 2, 0, 2]
    for result in (shown, merged, *others):
        assert harmless(result.out)
        assert harmless(result.err)


def test_where_stderr_is_no_terminal_long_work_is_told_in_a_few_lines(capsys, monkeypatch) -> None:
    now = 0.0
    display = terminal.progress_lines(clock=lambda: now)
    for now in range(100 + 1):  # the clock reads it
        display("train", now, 200)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "training: 5% after 10 s"
    assert len(said) == 10
    now = 100_000.0
    display("merge", 0, 0)
    assert capsys.readouterr().err == "merging: after 100000 s\n"
    now += 9_000
    display("merge", 1, 1)
    assert not capsys.readouterr().err
    with terminal.working() as progress:
        progress("merge", 1, 2)  # too early to be told
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    with terminal.on_screen(terminal.Screen(quiet=True)), terminal.working() as progress:
        assert progress is None
    with terminal.working() as progress:
        progress("merge", 1, 2)
    assert capsys.readouterr() == ("", "merging: 50% after 0 s\n")


def test_a_terminal_of_another_encoding(tmp_path: Path) -> None:
    save_file({"é雪": torch.ones(2)}, tmp_path / "base.safetensors")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*TMX, "inspect", tmp_path / "base.safetensors"], capture_output=True, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert b"\\xe9\\u96ea" in done.stdout


@pytest.mark.parametrize("options", ["", "--json"])
def test_stdout_that_takes_nothing(hostile: Path, options: str) -> None:
    command = f'exec "$@" {options} > /dev/full'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *TMX, "inspect", hostile / "base.safetensors"], stderr=subprocess.PIPE
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


def test_files_do_not_take_the_place_of_a_closed_stdout(hostile: Path) -> None:
    """Else what is printed would go into the model."""
    out = hostile / "out.safetensors"
    command = [*TMX, "convert", hostile / "task.safetensors", "-o", out]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command])
    assert done.returncode == 0
    assert load_file(out).keys() == HOSTILE.keys()


def test_all_text_goes_through_one_place() -> None:
    for file in Path(tunable_magmax.__file__).parent.rglob("*.py"):
        if file.name != "terminal.py":
            code = re.sub(r'""".*?"""', "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            assert not re.search(r"\bprint\(|sys\.(stdout|stderr)\.write", code), file


WAITING = """
import time
from tunable_magmax.cli import app

@app.app.command
def wait():
    try:
        print("waiting", flush=True)
        time.sleep(60)
    finally:
        print("cleaning up", flush=True)
        time.sleep({cleaning})

app.main(["wait"])
"""


@pytest.mark.parametrize(
    ("number", "again"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGINT, True)],
)
def test_signals_stop_the_program_and_a_second_one_ends_it(number: signal.Signals, again: bool) -> None:
    script = WAITING.format(cleaning=60 if again else 0)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests in the background or under nohup ignore some
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.stdout.readline() == "cleaning up\n"
        if again:
            process.send_signal(number)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    cause = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert said == ("" if again else f"error: {cause}; nothing was kept, the same command begins anew\n")


@pytest.mark.parametrize(("command", "kept"), [("train", True), ("init", True), ("tailor", False), ("merge", False)])
def test_a_stop_says_what_the_command_keeps(command: str, kept: bool) -> None:
    assert stop_message(KeyboardInterrupt(), command)[0].startswith("interrupted; finished work is kept") == kept


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup."""
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + WAITING.format(cleaning=0)
    script = script.replace("time.sleep(60)", "signal.raise_signal(signal.SIGHUP)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "waiting\ncleaning up\n", "")


def test_memory_that_the_system_refuses(hostile: Path, tmx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunable_magmax.workflows.inspect.inspect_checkpoint", lambda path: np.empty(1 << 50))
    refused = tmx("inspect", hostile / "base.safetensors", "--json")
    assert refused.code == 1
    assert refused.err.startswith("error: the system refused memory (8.00 PiB more were wanted)")
    assert "--memory" in json.loads(refused.out)["error"]["message"]


def test_a_name_that_is_too_long_is_said_plainly(sequence, tmx, tmp_path):
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / ("x" * 250), "--json")
    assert result.code == 1
    assert "File name too long: choose a shorter name and run it again" in result.err
    assert json.loads(result.out)["error"]["kind"] == "StorageError"
    assert "should not happen" not in result.err


def test_a_folder_that_is_gone_is_said_plainly(tmx, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = tmx("inspect", tmp_path)
    assert (result.code, "is gone: change to another" in result.err) == (2, True)
