"""Workers in this process, called one after the other: all of a cluster but Ray, for many cases in little time."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.cluster import Worker, divide, merge_by
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import Job
from tunable_magmax.engines.ray_workers import RayWorkers
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.owners import Call
from tunable_magmax.merging.report import MergeReport


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
