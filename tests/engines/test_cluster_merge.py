"""A merge by workers is the local merge, to the byte, whoever dies: all but Ray, with workers in this process."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import LARGE, SMALL, TYPES, save_sequence, sequence
from test_same_bytes import CASES, label, weighted
from workers_here import Dying, merge_by_workers_here

from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.engines import local as local_module
from tunable_magmax.engines import worker as worker_module
from tunable_magmax.engines.cluster import merge_by
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.outputs import Job
from tunable_magmax.engines.sources import FileSource
from tunable_magmax.engines.worker import Worker, divide
from tunable_magmax.engines.workers import Call, Room, find_room
from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.merging import merge
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels
from tunable_magmax.merging.layout import Layout, Mergeable
from tunable_magmax.merging.report import MergeReport


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    return save_sequence(tmp_path_factory.mktemp("files"), *sequence(5, SMALL, "f32+bf16"))


def weights_of(out: Path) -> dict[str, bytes]:
    files = [out] if out.is_file() else out.glob("model*")
    return {path.name: path.read_bytes() for path in files}


def same(paths, tmp_path: Path, workers: int, options: dict, shard_size: int | None = 2000) -> None:
    """Merge here and by workers, and compare files and reports."""
    local, wanted = merged_here(paths, tmp_path, options, shard_size)
    found, _ = merge_by_workers_here(
        paths, tmp_path / "cluster" / local.name, workers, shard_size=shard_size, **options
    )
    compare(tmp_path / "cluster" / local.name, found, local, wanted)


def merged_here(paths, tmp_path: Path, options: dict, shard_size: int | None = 2000) -> tuple[Path, MergeReport]:
    out = tmp_path / "local" / ("one.safetensors" if shard_size is None else "some")
    return out, merge_checkpoints(*paths, out, **options, shard_size=shard_size or "5GB")


def compare(cluster: Path, found: MergeReport, local: Path, wanted: MergeReport) -> None:
    assert weights_of(cluster) == weights_of(local)
    kept = {name: digest for name, digest in wanted.files.items() if name.startswith("model")}
    assert replace(found, files={}).to_json() == replace(wanted, files={}, inputs={}).to_json()
    assert list(found.files.items()) == list(kept.items())


@pytest.mark.parametrize("options", CASES, ids=label)
def test_every_option(files, tmp_path, options) -> None:
    same(files, tmp_path, 3, weighted(options, 5))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_types_and_numbers_of_workers(tmp_path, types, workers) -> None:
    paths = save_sequence(tmp_path / "in", *sequence(4, SMALL, types), form="mixed")
    for scope in ("model", "tensor"):
        options = {"weights": [3, 0.5, 0, 2], "scope": scope, "compare": "active"}
        folder = tmp_path / scope
        same(paths, folder, workers, options, None if workers == 2 else 1500)
    same(paths, tmp_path / "dtype", workers, {"method": "ties", "out_dtype": "bfloat16", "exclude": ["a.*"]})


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [1000, 0, 1], "scale": 1},
        {"weights": [1000, 0, 1], "scope": "tensor", "scale": 1},  # half of a tensor would give the last task nothing
        {"method": "average", "weights": [1, 0, 2], "scale": 1},
        {"method": "last_task", "scale": 0.5},
    ],
    ids=label,
)
def test_workers_read_what_one_process_reads(tmp_path, monkeypatch, options) -> None:
    paths = save_sequence(tmp_path / "in", *sequence(3, SMALL))
    original = FileSource.read

    def elements_read(merge: Callable[[], object]) -> Counter[str]:
        read: Counter[str] = Counter()

        def noted(self: FileSource, name: str, start: int, stop: int, scratch: Any) -> Any:
            if self._checkpoint.path != paths[0]:  # threads remember what they have read of the base
                read[str(self._checkpoint.path)] += stop - start
            return original(self, name, start, stop, scratch)

        with monkeypatch.context() as patch:
            patch.setattr(FileSource, "read", noted)
            merge()
        return read

    here = elements_read(lambda: merge_checkpoints(*paths, tmp_path / "local", threads=1, **options))
    assert elements_read(lambda: same(paths, tmp_path / "both", 3, options)) == here + here  # once here, once by three


def test_chunks_and_memory(tmp_path, monkeypatch) -> None:
    paths = save_sequence(tmp_path / "in", *sequence(3, LARGE))
    monkeypatch.setattr(NumbaKernels, "chunk", 1 << 12)
    plan = merge.plan_memory
    spilled = lambda *given, **named: replace(plan(*given, **named), mapped=1, cached_delta=0)  # noqa: E731
    same(paths, tmp_path / "plain", 3, {"weights": [3, 1, 2]}, 300_000)
    monkeypatch.setattr(merge, "plan_memory", spilled)
    same(paths, tmp_path / "spilled", 3, {"weights": [3, 1, 2]}, 300_000)


# -- deaths -----------------------------------------------------------------------------------------------------------

DEADLY = [
    {"weights": [3, 0, 0.5, 2, 1]},
    {"weights": [3, 0, 0.5, 2, 1], "scale": 0.3},
    {"weights": [3, 0, 0.5, 2, 1], "scope": "tensor", "compare": "active"},
    {"method": "ties"},
]


@pytest.mark.parametrize("options", DEADLY, ids=label)
def test_a_death_at_every_call(files, tmp_path, options) -> None:
    local = merged_here(files, tmp_path, options)
    out = tmp_path / "out"
    calls = merge_by_workers_here(files, out, 2, shard_size=2000, **options)[1].calls
    assert calls > 10
    for deadly in range(1, calls + 1):
        shutil.rmtree(out)
        dies = lambda number, call, n=deadly: number == n  # noqa: E731
        found, workers = merge_by_workers_here(files, out, 2, shard_size=2000, dies=dies, **options)
        compare(out, found, *local)
        assert workers.deaths == 1


def test_everybody_dies_all_the_time(files, tmp_path) -> None:
    local = merged_here(files, tmp_path, DEADLY[0])
    dies = lambda number, call: True  # noqa: E731
    found, workers = merge_by_workers_here(files, tmp_path / "out", 3, shard_size=2000, dies=dies, **DEADLY[0])
    compare(tmp_path / "out", found, *local)
    assert workers.deaths == workers.calls


def test_a_successor_does_not_share_its_planes_with_a_worker_that_is_only_out_of_reach(
    files, tmp_path, monkeypatch
) -> None:
    """One that was given up may still be at work: what it writes must not reach its successor's planes."""
    local = merged_here(files, tmp_path, DEADLY[0])
    plan, close = merge.plan_memory, Worker.close
    monkeypatch.setattr(merge, "plan_memory", lambda *given, **named: replace(plan(*given, **named), mapped=1))
    lost: list[Worker] = []
    monkeypatch.setattr(Worker, "close", lambda worker: lost.append(worker))
    scribbled = 0

    def dies(number: int, call: Call) -> bool:
        nonlocal scribbled
        for worker in lost:
            planes = worker._merge._planes
            if planes is not None:
                planes.words[:] = 0x5555555555555555
                scribbled += 1
        return number % 5 == 0

    found, workers = merge_by_workers_here(files, tmp_path / "out", 2, shard_size=2000, dies=dies, **DEADLY[0])
    for worker in lost:
        close(worker)
    compare(tmp_path / "out", found, *local)
    assert workers.deaths
    assert scribbled


def test_only_counts_and_numbers_travel(tmp_path) -> None:
    """For the decisions of a merge, a small part of its bit planes and nothing of its values."""
    paths = save_sequence(tmp_path / "in", *sequence(4, {"a": (3_000_000,)}))
    _, workers = merge_by_workers_here(paths, tmp_path / "out", 2, weights=[1, 2, 3, 4])
    assert workers.travelled < 4 * 3_000_000 / 8 / 4


def test_what_travels_for_ties_is_small(tmp_path) -> None:
    """Three counts of a few kilobytes a task and worker, whatever the number of elements."""
    paths = save_sequence(tmp_path / "in", *sequence(2, {"a": (300_000,)}))
    _, workers = merge_by_workers_here(paths, tmp_path / "out", 2, method="ties", density=0.5)
    assert workers.travelled < 1 << 18


# -- errors -----------------------------------------------------------------------------------------------------------


def test_values_that_cannot_be_merged_are_counted_over_all_workers(tmp_path) -> None:
    base, tasks = sequence(3, SMALL)
    tasks[1]["a.weight"].view(-1)[[0, 500, 1022]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    base["d.weight"][768] = float("nan")
    tasks[2]["b.frozen"][3] = torch.inf
    paths = save_sequence(tmp_path / "in", base, tasks)
    told = []
    for made in (
        lambda: merge_checkpoints(*paths, tmp_path / "local"),
        lambda: merge_by_workers_here(paths, tmp_path / "cluster", 4),
    ):
        with pytest.raises(InputError) as error:
            made()
        told.append(str(error.value))
    assert told[0] == told[1]
    assert "task 2: 'a.weight' has 3 values that are NaN or infinite" in told[0]


def test_equal_infinities_are_no_change(tmp_path) -> None:
    base, tasks = sequence(3, SMALL)
    for checkpoint in (base, *tasks):
        checkpoint["b.frozen"][[0, 129]] = torch.tensor([float("inf"), float("nan")])
    same(save_sequence(tmp_path / "in", base, tasks), tmp_path, 4, {})


def test_nothing_to_merge(tmp_path) -> None:
    base, _ = sequence(1, SMALL)
    paths = save_sequence(tmp_path / "in", base, [base, base])
    with pytest.warns(UserWarning, match="copy of the base"):
        same(paths, tmp_path, 3, {})


def test_a_budget_that_does_not_fit(files, tmp_path) -> None:
    with pytest.raises(InputError, match="the budget sums to 15, but"):
        merge_by_workers_here(files, tmp_path / "out", 2, budget=[1, 2, 3, 4, 5])


def test_a_worker_that_sees_other_files(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker_module, "Inputs", lambda base, tasks, options: Inputs(tmp_path / "x", tasks, options))
    with pytest.raises(ClusterError, match=r"a worker can't read what the driver can: .*x.* file system that all"):
        merge_by_workers_here(files, tmp_path / "out", 2)
    monkeypatch.setattr(
        worker_module, "Inputs", lambda base, tasks, options: Inputs(tasks[0], [*tasks[1:], base], options)
    )
    with pytest.raises(ClusterError, match="other checkpoints than the driver at the same paths"):
        merge_by_workers_here(files, tmp_path / "out", 2)


def test_a_successor_that_cannot_read_costs_no_finished_shard(files, tmp_path, monkeypatch) -> None:
    """The driver's inputs are good, so what is done stays, and the same command goes on."""
    local, _ = merged_here(files, tmp_path, DEADLY[0])
    out = tmp_path / "out"

    class WorkersHere:
        def check(self, *given: object) -> int:
            return 0

        def merge(self, job: Job) -> MergeReport:
            shares = divide(job.inputs.layout, job.options.out_dtype, 2)
            workers = Dying(2, lambda number, call: call.name == "digest" and blind(call))
            return merge_by(workers, shares, job, 1)

    seen: list[Call] = []

    def blind(call: Call) -> bool:
        seen.append(call)
        if len(seen) == 2:
            monkeypatch.setattr(worker_module, "Inputs", lambda base, *rest: Inputs(tmp_path / "gone", *rest))
        return len(seen) == 2

    with monkeypatch.context() as patch:
        patch.setattr(local_module, "_engine", lambda *given: nullcontext(WorkersHere()))
        with pytest.raises(ClusterError, match="a worker can't read what the driver can"):
            merge_checkpoints(*files, out, shard_size=2000, **DEADLY[0])
    kept = {path.name: path.stat().st_ino for path in (tmp_path / "out.partial" / "output").iterdir()}
    assert kept
    merge_checkpoints(*files, out, shard_size=2000, **DEADLY[0])
    assert weights_of(out) == weights_of(local)
    assert all((out / name).stat().st_ino == inode for name, inode in kept.items())


# -- division ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(["F32", "BF16", "F64"])), max_size=8),
    st.lists(st.integers(0, 5000), max_size=3),
    st.integers(1, 9),
)
def test_shares_cover_everything_once_and_are_balanced(tensors, copied, workers) -> None:
    element, mergeable = 0, []
    for k, (size, dtype) in enumerate(tensors):
        mergeable.append(Mergeable(f"m{k}", (TensorInfo(f"m{k}", dtype, (size,)),) * 3, element))
        element += size
    layout = Layout(tuple(mergeable), tuple(TensorInfo(f"c{k}", "I8", (n,)) for k, n in enumerate(copied)), {}, ())
    shares = divide(layout, None, workers)
    assert len(shares) <= workers
    assert sorted(name for share in shares for name in share.copied) == [info.name for info in layout.copied]
    for k, tensor in enumerate(mergeable):
        parts = sorted((p.start, p.stop) for share in shares for p in share.parts if p.tensor == k)
        assert parts[0][0] == 0
        assert parts[-1][1] == tensor.size
        assert all(a[1] == b[0] and a[1] % 64 == 0 for a, b in pairwise(parts))
    assert all(len({part.tensor for part in share.parts}) == len(share.parts) for share in shares)
    costs = [sum(3 * (p.stop - p.start) * mergeable[p.tensor].infos[0].nbytes // max(mergeable[p.tensor].size, 1)
                 for p in share.parts) for share in shares]  # fmt: skip
    whole = sum(3 * tensor.infos[0].nbytes for tensor in mergeable) + sum(copied)
    # A cut is at most 64 elements of three float64 off, and what is copied is not cut.
    assert max(costs, default=0) <= whole / workers + 64 * 3 * 8 + 1


def test_room() -> None:
    assert find_room([0, 8, 8.5], None, None) == Room(2, 8)
    assert find_room([4, 16], 2, None) == Room(2, 8)
    assert find_room([4, 16], 5, 2) == Room(5, 2)
    with pytest.raises(InputError, match="9 workers need a CPU each, but the Ray cluster has 4: give at most"):
        find_room([4], 9, None)
    with pytest.raises(ClusterError, match="no CPUs"):
        find_room([0.5, 0], None, None)


def test_golden_cases_by_two_workers(tmp_path) -> None:
    """The same golden file as for one process."""
    import hashlib

    from test_same_bytes import GOLDEN, golden_cases, integer_sequence

    paths = save_sequence(tmp_path / "in", *integer_sequence())
    found = {}
    for k, (title, options) in enumerate(golden_cases().items()):
        out = tmp_path / f"{k}.safetensors"
        merge_by_workers_here(paths, out, 2, **options, seed=7)
        found[title] = hashlib.sha256(out.read_bytes()).hexdigest()
    assert found == json.loads(GOLDEN.read_text())
