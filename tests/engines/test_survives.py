"""Kills, full disks and vanishing inputs: no output or the whole right one, and a rerun ends with the right bytes."""

import hashlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import forking
from sequences import digests, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

SHAPES = {f"layer.{k}.weight": (40 + 7 * k, 31) for k in range(4)} | {"layer.0.bias": (65,), "layer.3.frozen": (500,)}
SHARD = 10_000
LAST = 60


class Victim:
    """A process that merges in forked children, and what their merges must give."""

    def __init__(self, folder: Path, ask: Callable[..., dict[str, Any]]) -> None:
        self.ask = ask
        self.base, self.tasks = save_sequence(folder / "in", *sequence(3, SHAPES))
        self.folder = folder
        self._outputs: dict[str, Path] = {}

    def merge(self, out: Path, options: dict[str, Any], **how: Any) -> dict[str, Any]:
        paths = {"base": str(self.base), "tasks": [str(path) for path in self.tasks], "out": str(out)}
        answer = self.ask(**paths, options={"shard_size": SHARD, "threads": 1, **options}, **how)
        assert "crashed" not in answer
        assert answer.get("killed", signal.SIGKILL) == signal.SIGKILL
        return answer

    def output(self, options: dict[str, Any], suffix: str = "") -> Path:
        """The merge when nothing happens."""
        key = f"{options}{suffix}"
        if key not in self._outputs:
            self._outputs[key] = self.folder / "plain" / f"{len(self._outputs)}" / f"out{suffix}"
            merge_checkpoints(self.base, self.tasks, self._outputs[key], shard_size=SHARD, **options)
        return self._outputs[key]


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("victim")
    with forking("engines.victim", "-W", "error", cwd=folder) as ask:
        yield Victim(folder, ask)


def state(out: Path, *complete: dict[str, str]) -> int | None:
    """Which of the complete outputs is there, None for none; anything else fails.

    The report beside one file may be missing for a moment, but is never another one's.
    """
    if not out.exists():
        return None
    if out.is_file() and not out.with_name(f"{out.stem}.report.json").exists():
        assert out.with_name(f"{out.name}.partial").is_dir()
        return [each[out.suffix] for each in complete].index(hashlib.sha256(out.read_bytes()).hexdigest())
    found = digests(out)
    assert found in complete, sorted(found)
    return complete.index(found)


MODES = {
    "directory": ("out", {}),
    "one file": ("out.safetensors", {}),
    "overwrite": ("out", {"overwrite": True}),
    "overwrite one file": ("out.safetensors", {"overwrite": True}),
}


def prepare(victim: Victim, folder: Path, mode: str) -> tuple[Path, dict[str, Any], list[dict[str, str]]]:
    """The output's path (an old output is there if it is to be replaced), options, and what may be found there."""
    folder.mkdir()
    name, options = MODES[mode]
    out = folder / name
    complete = [digests(victim.output({"seed": 1}, out.suffix))]
    if options.get("overwrite"):
        shutil.copytree(victim.output({"seed": 2}, out.suffix).parent, folder, dirs_exist_ok=True)
        complete.append(digests(out))
        assert complete[0] != complete[1]
    return out, {"seed": 1, **options}, complete


def found_after_a_kill(out: Path, options: dict[str, Any], complete: list[dict[str, str]]) -> int | None:
    found = state(out, *complete)
    # An old output is there at every moment, if the system can swap directories.
    assert found is not None or not options.get("overwrite") or sys.platform != "linux"
    return found


def finish(victim: Victim, out: Path, options: dict[str, Any], complete: list[dict[str, str]]) -> None:
    """One more run, undisturbed: the right bytes, and nothing left over."""
    answer = victim.merge(out, options)
    assert answer.get("done") or ("already exists" in answer["message"] and not options.get("overwrite"))
    assert state(out, *complete) == 0
    assert not {path.name for path in out.parent.iterdir()} - {out.name, f"{out.name}.log", "out.report.json"}
    shutil.rmtree(out.parent)


@pytest.mark.parametrize(("early", "late"), [(53, 5), pytest.param(1, 1, marks=pytest.mark.stress)])
@pytest.mark.parametrize("mode", MODES)
def test_killed_before_or_after_a_system_call_that_changes_the_disk(victim, tmp_path, mode, early, late) -> None:
    """At every so many of the steps: of the last ones, in which the output appears, and of those before."""
    states = set()
    out, options, _ = prepare(victim, tmp_path / "undisturbed", mode)
    steps = victim.merge(out, options)["steps"]
    for step in [*range(1, steps - LAST, early), *range(steps - LAST, steps + 1, late)]:
        out, options, complete = prepare(victim, tmp_path / str(step), mode)
        assert "killed" in victim.merge(out, options, deadly=step)
        states.add(found_after_a_kill(out, options, complete))
        if victim.merge(out, options, deadly=step // 2).get("killed"):  # the same command again, killed in its turn
            found_after_a_kill(out, options, complete)
        finish(victim, out, options, complete)
    assert states == {0, 1 if options.get("overwrite") else None}


@pytest.mark.parametrize("limit", [0, 600, 5000])
def test_files_that_may_not_grow(victim, tmp_path, limit) -> None:
    out = tmp_path / "out"
    answer = victim.merge(out, {"seed": 1}, largest_file=limit)
    assert answer["error"] == "StorageError"
    assert "File too large" in answer["message"]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out.log"])
    assert victim.merge(out, {"seed": 1})["done"]
    assert digests(out) == digests(victim.output({"seed": 1}))


def test_an_interrupted_merge_begins_anew_and_says_so(victim, tmp_path) -> None:
    def merge(out: Path, **options: Any) -> dict[str, str]:
        merge_checkpoints(victim.base, victim.tasks, out, shard_size=SHARD, threads=1, **options)
        return digests(out)

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "merge" and done > total // 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        merge(out, progress=interrupt)
    assert not list(tmp_path.iterdir())
    left = tmp_path / "out.partial" / "output"
    left.mkdir(parents=True)  # as a killed process leaves it
    (left.parent / "tmx.lock").touch()
    (left / "model-00001-of-00004.safetensors").write_bytes(b"half")
    notes: list[str] = []
    assert merge(out, notify=notes.append) == merge(tmp_path / "other")
    assert any("begins anew" in note and str(out) in note for note in notes)
    assert not left.parent.exists()
