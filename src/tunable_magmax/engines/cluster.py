"""A Ray cluster as a place to merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tunable_magmax.engines.cluster_merge import merge_by
from tunable_magmax.engines.crew import Crew, Room, find_room
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.parts import divide
from tunable_magmax.engines.place import Errand
from tunable_magmax.engines.ray_session import ray_session
from tunable_magmax.errors import ClusterError
from tunable_magmax.files import Progress
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import kernels_for, plan_memory, working_threads


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connected Ray cluster as a place to merge."""

    ray: Any
    room: Room

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        """Refuse a bound on a worker's memory that no worker could keep. What they may put on disk is not known yet."""
        kernels = kernels_for(torch.device("cpu"))
        plan_memory(inputs.layout, options, kernels, working_threads(kernels, self.room.cpus), memory)
        return 0

    def merge(self, errand: Errand) -> MergeReport:
        """Do the merge and write its weights; `memory` bounds each worker."""
        shares = divide(errand.inputs.layout, errand.options.out_dtype, self.room.workers)
        room = replace(self.room, workers=len(shares))
        try:
            with Crew(self.ray, room, _watching(errand.progress)) as crew:
                return merge_by(crew, shares, errand, room.cpus)
        except ClusterError as error:
            raise ClusterError(
                f"{error}. Finished shards are kept in {errand.output.partial}: run the same command again to continue"
            ) from None


@contextmanager
def join_cluster(address: str | None, workers: int | None, threads: int | None) -> Iterator[Cluster]:
    """Join the cluster at an address, or one on this machine, and find room for workers there."""
    with ray_session(address, workers) as ray:
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        yield Cluster(ray, find_room(nodes, workers, threads))


def _watching(progress: Progress | None) -> Callable[[Mapping[str, tuple[int, int]]], None] | None:
    """What workers have done, as bars that only go forward: a new worker begins anew, which nobody needs to see."""
    if progress is None:
        return None
    furthest: dict[str, int] = {}

    def watch(phases: Mapping[str, tuple[int, int]]) -> None:
        for phase, (done, total) in phases.items():
            furthest[phase] = max(done, furthest.get(phase, 0))
            progress(phase, furthest[phase], total)

    return watch
