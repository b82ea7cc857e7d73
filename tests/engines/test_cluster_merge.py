"""A merge by workers is the local merge, to the byte: all but Ray, with workers in this process."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import SMALL, save_sequence, sequence
from test_same_bytes import FEWER, label, weighted

from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines import cluster as cluster_module
from tunable_magmax.engines.cluster import Worker, divide, merge_by
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.outputs import Job
from tunable_magmax.engines.ray_workers import RayWorkers
from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.owners import Call
from tunable_magmax.merging.report import MergeReport

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class WorkersHere(RayWorkers):
    """The same calls, without Ray."""

    def __init__(self, workers: int) -> None:
        self.workers = [Worker() for _ in range(workers)]
        self.travelled = 0

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        answers = []
        for call in calls:
            # Through bytes, as between machines: nothing may be shared.
            sent = pickle.dumps(call.arguments)
            received = pickle.dumps(getattr(self.workers[call.part], call.name)(*pickle.loads(sent)))
            self.travelled += (len(sent) + len(received)) * (call.name != "begin")
            answers.append(pickle.loads(received))
        return answers


def merge_by_workers_here(
    paths: tuple[Path, list[Path]],
    out: Path,
    workers: int,
    *,
    shard_size: int | None = None,
    memory: int = 1 << 30,
    **given: Any,
) -> tuple[MergeReport, WorkersHere]:
    """The weights of a merge by workers of this process."""
    options = read_options(len(paths[1]), **given)
    with Inputs(*paths, options) as inputs, Output(out) as output:
        started = WorkersHere(workers)
        try:
            job = Job(inputs, options, output, shard_size, memory, None)
            report = merge_by(started, divide(inputs.layout, workers), job, 1)
        finally:
            for worker in started.workers:
                worker.close()
        output.commit()
    return report, started


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    return save_sequence(tmp_path_factory.mktemp("files"), *sequence(5, SMALL, "f32+bf16"), form="mixed")


def same(paths, tmp_path: Path, workers: int, options: dict) -> None:
    """Merges here and by workers, and compares weights and reports."""
    here, there = tmp_path / f"local-{workers}", tmp_path / f"workers-{workers}"
    wanted = merge_checkpoints(*paths, here, **options, shard_size=2000)
    found, _ = merge_by_workers_here(paths, there, workers, shard_size=2000, **options)
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in here.glob("model*")
    }
    assert dict(found.files) == {name: sha256 for name, sha256 in wanted.files.items() if name.startswith("model")}
    assert replace(found, files={}).to_json() == replace(wanted, files={}, inputs={}).to_json()


@pytest.mark.parametrize("options", [*FEWER, {"method": "tsv", "scale": 1}], ids=label)
def test_every_option(files, tmp_path, options) -> None:
    same(files, tmp_path, 3, weighted(options, 5))


@pytest.mark.parametrize("types", ["f32", "f32+f64", "f16+bf16"])
@pytest.mark.parametrize("workers", [1, 20])
def test_types_and_numbers_of_workers(tmp_path, types, workers) -> None:
    """There may be more workers than tensors."""
    paths = save_sequence(tmp_path / "in", *sequence(4, SMALL, types))
    same(paths, tmp_path, workers, {"weights": [3, 0.5, 0, 2], "compare": "active"})
    same(paths, tmp_path / "ties", workers, {"method": "ties", "out_dtype": "bfloat16", "exclude": ["a.*"]})


def test_equal_infinities_are_no_change_and_nothing_to_merge_is_a_copy(tmp_path) -> None:
    base, tasks = sequence(3, SMALL)
    for checkpoint in (base, *tasks):
        checkpoint["b.frozen"][[0, 129]] = torch.tensor([float("inf"), float("nan")])
    same(save_sequence(tmp_path / "in", base, tasks), tmp_path, 4, {})
    with pytest.warns(UserWarning, match="copy of the base"):
        same(save_sequence(tmp_path / "copy", base, [base, base]), tmp_path / "copy", 3, {})


def test_only_counts_and_keys_travel(tmp_path) -> None:
    """For the decisions of a merge, a small part of its bit planes and nothing of its values."""
    paths = save_sequence(tmp_path / "in", *sequence(4, {"a": (1_000_000,), "b": (1_000_000,)}))
    _, workers = merge_by_workers_here(paths, tmp_path / "out", 2, weights=[1, 2, 3, 4])
    assert workers.travelled < 4 * 2_000_000 / 8 / 4


def test_values_that_cannot_be_merged_are_counted_over_all_workers(tmp_path) -> None:
    base, tasks = sequence(3, SMALL)
    tasks[1]["a.weight"].view(-1)[[0, 500, 1022]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    base["d.weight"][768] = float("nan")
    tasks[2]["b.frozen"][3] = torch.inf
    paths = save_sequence(tmp_path / "in", base, tasks)
    with pytest.raises(InputError) as here:
        merge_checkpoints(*paths, tmp_path / "local")
    with pytest.raises(InputError) as there:
        merge_by_workers_here(paths, tmp_path / "cluster", 4)
    assert str(here.value) == str(there.value)


def test_a_worker_that_sees_other_files(files, tmp_path, monkeypatch) -> None:
    base, tasks = files
    for seen in ((tmp_path / "x", tasks), (tasks[0], [*tasks[1:], base])):
        monkeypatch.setattr(cluster_module, "Inputs", lambda base, tasks, options, seen=seen: Inputs(*seen, options))
        with pytest.raises(ClusterError, match="file system"):
            merge_by_workers_here(files, tmp_path / "out", 2)
