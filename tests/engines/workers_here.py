"""Workers in this process, called one after the other: all of a cluster but Ray, for many cases in little time."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.cluster import merge_by
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import Job
from tunable_magmax.engines.worker import Worker, divide
from tunable_magmax.engines.workers import Call
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.report import MergeReport


class Dying:
    """`Workers` of which the n-th call's worker dies, before it answers, as often as `lives` says."""

    def __init__(self, workers: int, dies: Callable[[int, Call], bool] = lambda number, call: False) -> None:
        self.workers = [Worker() for _ in range(workers)]
        self.kept: list[list[Call]] = [[] for _ in range(workers)]
        self.dies, self.calls, self.deaths, self.travelled = dies, 0, 0, 0

    def each(self, calls: deque[Call]) -> Iterator[tuple[Call, Any]]:
        while calls:
            call = calls.popleft()
            self.calls += 1
            if self.dies(self.calls, call):
                self._told(call)  # done, but nobody hears of it
                self._replace(call.worker)
            answer = self._told(call)
            if call.lasting:
                self.kept[call.worker].append(call)
            yield call, answer

    def _told(self, call: Call) -> Any:
        # Through bytes, as between machines: nothing may be shared.
        sent = pickle.dumps(call.arguments)
        received = pickle.dumps(getattr(self.workers[call.worker], call.name)(*pickle.loads(sent)))
        self.travelled += (len(sent) + len(received)) * (
            call.name in ("plane_steps", "assign_groups", "count_magnitudes", "scan_equal", "measure")
        )
        return pickle.loads(received)

    def _replace(self, worker: int) -> None:
        self.deaths += 1
        self.workers[worker].close()
        self.workers[worker] = Worker()
        for call in self.kept[worker]:
            self._told(call)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def merge_by_workers_here(
    paths: tuple[Path, list[Path]],
    out: Path,
    workers: int,
    *,
    shard_size: int | None = None,
    memory: int = 1 << 30,
    dies: Callable[[int, Call], bool] = lambda number, call: False,
    **given: Any,
) -> tuple[MergeReport, Dying]:
    """The weights of a merge by workers of this process."""
    options = read_options(len(paths[1]), **given)
    with Inputs(*paths, options) as inputs, Output(out) as output:
        shares = divide(inputs.layout, options.out_dtype, workers)
        started = Dying(len(shares), dies)
        try:
            report = merge_by(started, shares, Job(inputs, options, output, shard_size, memory, None), 1)
        finally:
            started.close()
        output.commit()
    return report, started
