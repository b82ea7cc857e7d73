"""Kills, full disks and vanishing inputs: no output or the whole right one, and a rerun ends with the right bytes."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forking
from safetensors.torch import save_file
from sequences import StateDict, digests, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.merging import stream
from tunable_magmax.merging.kernels.native import NativeKernels

SHAPES = {f"layer.{k}.weight": (40 + 7 * k, 31) for k in range(7)} | {"layer.0.bias": (65,), "layer.3.frozen": (500,)}
SHARD = 10_000
LAST = 60
KILLS = int(os.environ.get("TMX_KILLS", "1000"))


class Victim:
    """A process that merges in forked children, and what their merges must give."""

    def __init__(self, folder: Path, ask: Callable[..., dict[str, Any]]) -> None:
        self.ask = ask
        self.base, self.tasks = save_sequence(folder / "in", *sequence(3, SHAPES))
        self.folder = folder
        self.kills = 0
        self._outputs: dict[str, Path] = {}

    def merge(self, out: Path, options: dict[str, Any], **how: Any) -> dict[str, Any]:
        paths = {"base": str(self.base), "tasks": [str(path) for path in self.tasks], "out": str(out)}
        answer = self.ask(**paths, options={"shard_size": SHARD, **options}, **how)
        assert "crashed" not in answer
        self.kills += "killed" in answer
        assert answer.get("killed", signal.SIGKILL) == signal.SIGKILL
        return answer

    def output(self, options: dict[str, Any], suffix: str = "") -> Path:
        """The merge when nothing happens."""
        key = f"{options}{suffix}"
        if key not in self._outputs:
            self._outputs[key] = self.folder / "plain" / f"{len(self._outputs)}" / f"out{suffix}"
            merge_checkpoints(self.base, self.tasks, self._outputs[key], shard_size=SHARD, **options)
        return self._outputs[key]

    def wanted(self, options: dict[str, Any], suffix: str = "") -> dict[str, str]:
        return digests(self.output(options, suffix))


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("victim")
    with forking("engines.victim", "-W", "error", cwd=folder) as ask:
        yield Victim(folder, ask)


def state(out: Path, *complete: dict[str, str]) -> int | None:
    """Which of the complete outputs is there, None for none; anything else fails.

    Where one file is replaced, its report may be missing for a moment, but is never the other one's.
    """
    if not out.exists():
        return None
    if len(complete) == 2 and out.is_file() and not out.with_name(f"{out.stem}.report.json").exists():
        assert out.with_name(f"{out.name}.partial").is_dir()
        return [each[out.suffix] for each in complete].index(hashlib.sha256(out.read_bytes()).hexdigest())
    found = digests(out)
    assert found in complete, sorted(found)
    return complete.index(found)


MODES = {
    "directory": ("out", {}),
    "one thread, planes on disk": ("out", {"threads": 1, "spill": True}),
    "one file": ("out.safetensors", {}),
    "overwrite": ("out", {"overwrite": True}),
    "overwrite one file": ("out.safetensors", {"overwrite": True}),
}


def prepare(
    victim: Victim, folder: Path, mode: str
) -> tuple[Path, dict[str, Any], dict[str, Any], list[dict[str, str]]]:
    """The output's path (an old output is there if it is to be replaced), options, how, and what may be found there."""
    name, given = MODES[mode]
    options = {key: value for key, value in given.items() if key != "spill"}
    out = folder / name
    complete = [victim.wanted({"seed": 1}, out.suffix)]
    if options.get("overwrite"):
        shutil.copytree(victim.output({"seed": 2}, out.suffix).parent, folder, dirs_exist_ok=True)
        complete.append(digests(out))
        assert complete[0] != complete[1]
    return out, {"seed": 1, **options}, {"spill": "spill" in given}, complete


def finish(
    victim: Victim, out: Path, options: dict[str, Any], how: dict[str, Any], complete: list[dict[str, str]]
) -> None:
    """One more run, undisturbed: the right bytes, and nothing left over."""
    answer = victim.merge(out, options, **how)
    assert answer.get("done") or ("already exists" in answer["message"] and not options.get("overwrite"))
    assert state(out, *complete) == 0
    left = {path.name for path in out.parent.iterdir()} - {out.name, f"{out.name}.log", "out.report.json"}
    assert not left


def may_be_absent(out: Path, options: dict[str, Any]) -> None:
    """Where an old output is replaced, it is there at every moment, if the system can swap directories."""
    if options.get("overwrite"):
        assert sys.platform != "linux"
        assert out.with_name(f"{out.name}.partial").is_dir()


@pytest.mark.parametrize("mode", MODES)
def test_kill_at_some_steps(victim, tmp_path, mode) -> None:
    """Before and after system calls that change the disk: many where the output appears, fewer before."""
    kill_at_steps(victim, tmp_path, mode, early=29, late=7)


@pytest.mark.stress
@pytest.mark.parametrize("mode", MODES)
def test_kill_at_all_steps(victim, tmp_path, mode) -> None:
    kill_at_steps(victim, tmp_path, mode, early=1, late=1)


def kill_at_steps(victim: Victim, folder: Path, mode: str, early: int, late: int) -> None:
    """At every so many of the steps: of the last ones, in which the output appears, and of those before."""
    states = set()
    (folder / "undisturbed").mkdir()
    out, options, how, _ = prepare(victim, folder / "undisturbed", mode)
    steps = victim.merge(out, options, **how)["steps"]
    for step in [*range(1, steps - LAST, early), *range(steps - LAST, steps + 1, late)]:
        place = folder / str(step)
        place.mkdir()
        out, options, how, complete = prepare(victim, place, mode)
        assert "killed" in victim.merge(out, options, deadly=step, **how)
        found = state(out, *complete)
        states.add(found)
        if found is None:
            may_be_absent(out, options)
        finish(victim, out, options, how, complete)
        shutil.rmtree(place)
    assert 0 in states
    assert (1 if options.get("overwrite") else None) in states


def kill_at_random(victim: Victim, folder: Path, mode: str, kills: int, seed: int) -> None:
    """Kill, rerun, kill, rerun ... until a run gets through; then begin anew, until there were enough kills."""
    dice = random.Random(seed)
    before = victim.kills
    for k in count():
        place = folder / str(k)
        place.mkdir()
        out, options, how, complete = prepare(victim, place, mode)
        undisturbed = victim.merge(folder / "timing" / f"{k}{out.suffix}", {"seed": 3}, pause=0.0005)
        assert undisturbed["done"]
        while True:
            pause = dice.choice([0, 0.0005, 0.002])
            delay = dice.random() * undisturbed["seconds"] * (1.2 if dice.random() < 0.8 else 0.1)
            answer = victim.merge(out, options, delay=delay, pause=pause, **how)
            found = state(out, *complete)
            if found is None:
                may_be_absent(out, options)
            if answer.get("done") or (found == 0 and not options.get("overwrite")):
                break
            if victim.kills - before >= kills:
                break
        finish(victim, out, options, how, complete)
        shutil.rmtree(place)
        shutil.rmtree(folder / "timing")
        if victim.kills - before >= kills:
            return


@pytest.mark.parametrize("mode", MODES)
def test_kill_at_random_moments(victim, tmp_path, mode) -> None:
    kill_at_random(victim, tmp_path, mode, kills=6, seed=1)


@pytest.mark.stress
@pytest.mark.parametrize("mode", MODES)
def test_kill_many_times_at_random_moments(victim, tmp_path, mode) -> None:
    kill_at_random(victim, tmp_path, mode, kills=-(-KILLS // len(MODES)), seed=2)


# -- full disks -------------------------------------------------------------------------------------------------------


def command(victim: Victim, out: Path, *more: str) -> list[str]:
    tasks = [part for path in victim.tasks for part in ("--task", str(path))]
    return [
        "merge",
        "--base",
        str(victim.base),
        *tasks,
        "-o",
        str(out),
        "--shard-size",
        str(SHARD),
        "--seed",
        "1",
        *more,
    ]


def check_failure(answer: dict[str, Any], out: Path, problem: str) -> None:
    """One paragraph on stderr that says what happened, where the work is, and what to do."""
    assert answer["code"] == 1, answer
    message = answer["errors"]
    assert problem in message
    assert f"{out}.partial" in message
    assert "run the same command again" in message
    assert "Traceback" not in message
    assert "should not happen" not in message
    assert not out.exists()


@pytest.mark.parametrize("spill", [False, True])
def test_files_that_may_not_grow(victim, tmp_path, spill) -> None:
    failures = 0
    for limit in (0, 100, 600, 3000, 9000, 9900, 30_000, 10**6):
        out = tmp_path / str(limit)
        answer = victim.ask(command=command(victim, out), largest_file=limit, spill=spill)
        if answer["code"] == 0:
            assert digests(out) == victim.wanted({"seed": 1})
            break
        check_failure(answer, out, "File too large")
        failures += 1
        answer = victim.ask(command=command(victim, out), spill=spill)
        assert answer["code"] == 0, answer
        assert digests(out) == victim.wanted({"seed": 1})
        assert not out.with_name(f"{limit}.partial").exists()
    assert failures >= 5


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = sys.platform == "linux" and shutil.which("mount") is not None
    if mounted:
        tried = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True, text=True
        )
        mounted = tried.returncode == 0
    if not mounted:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


@pytest.mark.parametrize("spill", [False, True])
def test_full_disk(victim, small_disk, spill) -> None:
    out = small_disk / "out"
    failures, kept = 0, set()
    for size in count(16, 12):  # the disk grows a little each time, and each run goes on from the last one's work
        resize(small_disk, f"{size}k")
        answer = victim.ask(command=command(victim, out), spill=spill, fills_later=True)
        if answer["code"] == 0:
            break
        check_failure(answer, out, "No space left on device")
        shards = {path.name: path.stat().st_ino for path in small_disk.glob("out.partial/output/*.safetensors")}
        assert kept <= set(shards.items())
        kept = set(shards.items())
        failures += 1
    assert failures >= 5
    assert len(kept) > 3
    assert digests(out) == victim.wanted({"seed": 1})
    assert {(path.name, path.stat().st_ino) for path in out.glob("*.safetensors")} >= kept
    assert not (small_disk / "out.partial").exists()


def test_no_room_for_the_planes(victim, small_disk) -> None:
    out = small_disk / "out"
    answer = victim.ask(command=command(victim, out), spill=True, fills_later=True)
    check_failure(answer, out, "No space left on device")
    assert sum(path.stat().st_blocks for path in small_disk.rglob("*") if path.is_file()) * 512 < 16 << 10


# -- inputs that go away ----------------------------------------------------------------------------------------------


class Sequence:
    """Files that a test may spoil, and a merge of them that can be stopped half-way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: tuple[StateDict, list[StateDict]] = sequence(3, SHAPES)
        self.base, self.tasks = save_sequence(folder / "in", *self.models)
        self.out = folder / "out"
        self.partial = folder / "out.partial"

    def merge(self, out: Path | None = None, **options: Any) -> dict[str, str]:
        out = out or self.out
        merge_checkpoints(self.base, self.tasks, out, **{"shard_size": SHARD, **options})
        return digests(out)

    def stop(self, share: float = 0.6, **options: Any) -> dict[str, tuple[int, int]]:
        """Interrupt the merge; returns inode and time of the shards that are finished."""

        def interrupt(phase: str, done: int, total: int) -> None:
            if phase == "merge" and done > share * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.merge(**options, progress=interrupt)
        return self.finished()

    def finished(self, folder: Path | None = None) -> dict[str, tuple[int, int]]:
        files = (folder or self.partial / "output").glob("*.safetensors")
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def files(tmp_path) -> Sequence:
    return Sequence(tmp_path)


@pytest.mark.parametrize("source", [0, 2])
def test_input_cut_short_in_mid_merge(files, source) -> None:
    wanted = files.merge(files.folder / "wanted")
    path = [files.base, *files.tasks][source]
    content, status = path.read_bytes(), path.stat()

    def cut(phase: str, done: int, total: int) -> None:
        if phase == "merge" and done > total // 2:
            os.truncate(path, 1000)

    with pytest.raises(StorageError, match=path.name) as caught:
        files.merge(progress=cut, scale=0.4, threads=1)
    assert str(files.partial) in str(caught.value)
    assert not files.out.exists()
    kept = files.finished()
    assert len(kept) > 2
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    files.merge(scale=0.4)
    assert kept.items() <= files.finished(files.out).items()
    assert digests(files.out) == files.merge(files.folder / "other", scale=0.4) != wanted


def test_input_that_cannot_be_read(files, monkeypatch) -> None:
    real = os.preadv

    def failing(*given: Any) -> int:
        if files.partial.exists():  # headers are read before
            raise OSError(5, "Input/output error")
        return real(*given)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        files.merge()
    assert str(files.partial) in str(caught.value)
    assert "run the same command again" in str(caught.value)


def test_bad_values_leave_nothing(files) -> None:
    spoiled = {name: values.clone() for name, values in files.models[1][-1].items()}
    last = max(name for name, values in spoiled.items() if values.is_floating_point())
    spoiled[last].view(-1)[-1] = float("nan")
    save_file(spoiled, files.tasks[-1])
    with pytest.raises(InputError, match=last):
        files.merge()
    assert [path.name for path in files.folder.iterdir()] == ["in"]


def test_result_that_does_not_fit_leaves_nothing(files) -> None:
    """It is found in the last shard, when others are finished."""
    for path, tensors in zip([files.base, *files.tasks], [files.models[0], *files.models[1]], strict=True):
        save_file({**tensors, "z": torch.full((5,), 1000.0 + path.stat().st_ino % 2)}, path)
    save_file({**files.models[1][-1], "z": torch.full((5,), 60_000.0)}, files.tasks[-1])
    with pytest.raises(InputError, match=r"'z'.*float16"):
        files.merge(method="last_task", scale=2, out_dtype="float16")
    assert [path.name for path in files.folder.iterdir()] == ["in"]


def test_one_process_at_a_time(files) -> None:
    messages = []

    def meanwhile(phase: str, done: int, total: int) -> None:
        if not messages:
            with pytest.raises(InputError) as caught:
                files.merge()
            messages.append(str(caught.value))

    wanted = files.merge(files.folder / "wanted")
    assert files.merge(progress=meanwhile) == wanted
    assert "another process" in messages[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("operation", ["tally", "split", "survey", "gather", "step"])
def test_interrupt_inside_a_kernel(files, monkeypatch, operation, threads) -> None:
    """With planes on disk, an error in the middle of the work must not be hidden by the closing of their file."""
    plan = stream.plan_memory
    kernel = getattr(NativeKernels, operation)

    def interrupted(*given: Any, **named: Any) -> Any:
        kernel(*given, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream, "plan_memory", lambda *given, **named: replace(plan(*given, **named), mapped=1))
        patch.setattr(NativeKernels, operation, interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.merge(threads=threads)
    assert not list(files.partial.glob("scratch/*"))
    assert files.merge() == files.merge(files.folder / "other")


def test_progress_reaches_its_end(files) -> None:
    last: dict[str, tuple[int, int]] = {}
    files.merge(progress=lambda phase, done, total: last.update({phase: (done, total)}))
    assert set(last) == {"survey", "measure", "merge"}
    assert all(done == total for done, total in last.values())


def test_log_that_cannot_be_written_does_not_spoil_a_finished_merge(files) -> None:
    wanted = files.merge(files.folder / "wanted")
    files.folder.joinpath("out.log").mkdir()
    assert files.merge() == wanted
