"""Merges on a Ray cluster: the driver decides, workers read, hold the planes and write.

The survey, the auctions, the scale and the report are those of a merge in one process. Here is what makes it act on
ranges of tensors that workers hold: their counts are added up, and decisions are sent to all.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.checkpoints.shards import Shard
from tunable_magmax.checkpoints.tensors import BITS, TensorInfo
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import Job, write_weights
from tunable_magmax.engines.ray_session import ray_session
from tunable_magmax.engines.sources import file_sources
from tunable_magmax.engines.worker import Assignment, Share, Slice, Step, divide
from tunable_magmax.engines.workers import Call, RayWorkers, Room, find_room
from tunable_magmax.merging.assignment import Ownership, PlaneRows, assign_owners
from tunable_magmax.merging.kernels import Keys, TensorPlace
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.merged_elements import EqualScan, Groups, MergedElements, Quota
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.resources import Limits, kernels_for, plan_memory


class ClusterElements(MergedElements):
    """The merged elements on several workers, each with its share of them."""

    def __init__(self, workers: RayWorkers, shares: Sequence[Share], places: Sequence[TensorPlace], wide: bool) -> None:
        self._workers, self.places, self.wide = workers, places, wide
        self._everyone = list(range(len(shares)))
        self._holders: dict[int, list[int]] = {}
        for k, share in enumerate(shares):
            for part in share.parts:
                self._holders.setdefault(part.tensor, []).append(k)
        self._groups: list[ClusterPlaneGroup] = []

    def assign_groups(self, quotas: Sequence[Quota], rows: PlaneRows, seed: int) -> list[Ownership]:
        """Leaves groups that are on one worker entirely to that worker, and assigns the others from here, in order."""
        owners: dict[int, Ownership] = {}
        alone: dict[int, list[int]] = {}
        by_tensor = [Quota(self._tensors(quota.members), quota.budget) for quota in quotas]
        shared: list[tuple[int, list[int]]] = []
        for number, quota in enumerate(by_tensor):
            holders = sorted({k for tensor in quota.members for k in self._holders[tensor]})
            if len(holders) == 1:
                alone.setdefault(holders[0], []).append(number)
            else:
                shared.append((number, holders))
        calls = deque(
            Call(k, "assign_groups", ([by_tensor[n] for n in own], rows, seed), lasting=True)
            for k, own in alone.items()
        )
        for call, results in self._workers.each(calls):
            owners |= dict(zip(alone[call.worker], results, strict=True))
        for number, holders in shared:
            group = ClusterPlaneGroup(self._workers, holders, by_tensor[number].members)
            owners[number] = assign_owners(group, rows, by_tensor[number].budget, seed)
            group.finish()
        return [owners[number] for number in range(len(quotas))]

    def count_magnitudes(
        self, groups: Groups, tasks: Sequence[int], prefixes: NDArray[np.int64], digit: tuple[int, int]
    ) -> NDArray[np.int64]:
        asked = [self._tensors(group) for group in groups]
        answers = self._ask("count_magnitudes", asked, tasks, prefixes, digit)
        return np.asarray(np.sum(answers, axis=0))

    def scan_equal(self, groups: Groups, scans: Sequence[EqualScan]) -> list[tuple[int, Keys]]:
        answers = self._ask("scan_equal", [self._tensors(group) for group in groups], scans)
        return [_added(parts) for parts in zip(*answers, strict=True)]

    def _tensors(self, members: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.places[k].tensor for k in members)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        calls = deque(Call(k, name, arguments) for k in self._everyone)
        return [answer for _, answer in self._workers.each(calls)]


def _added(scanned: Sequence[tuple[int, Keys]]) -> tuple[int, Keys]:
    return sum(below for below, _ in scanned), np.concatenate([keys for _, keys in scanned])


class ClusterPlaneGroup:
    """A `PlaneGroup` on several workers. What has no result waits, and goes with the next operation that has one."""

    def __init__(self, workers: RayWorkers, holders: Sequence[int], tensors: tuple[int, ...]) -> None:
        self._workers, self._holders, self._tensors = workers, holders, tensors
        self._waiting: list[Step] = []

    def fill(self, row: int) -> None:
        self._waiting.append(("fill", (row,)))

    def count_common(self, row: int, other: int) -> int:
        return sum(self._send("count_common", row, other))

    def intersect(self, row: int, other: int, out: int) -> None:
        self._waiting.append(("intersect", (row, other, out)))

    def subtract(self, row: int, other: int) -> None:
        self._waiting.append(("subtract", (row, other)))

    def unite(self, row: int, other: int) -> None:
        self._waiting.append(("unite", (row, other)))

    def scan_keys(self, row: int, free: int, chosen: int, lottery_state: int, low: int, high: int) -> tuple[int, Keys]:
        return _added(self._send("scan_keys", row, free, chosen, lottery_state, low, high))

    def choose_scanned(self, chosen: int, highest: int) -> None:
        self._waiting.append(("choose_scanned", (chosen, highest)))

    def finish(self) -> None:
        """Sends the operations that wait."""
        if self._waiting:
            name, arguments = self._waiting.pop()
            self._send(name, *arguments)

    def _send(self, name: str, *arguments: Any) -> list[Any]:
        steps, self._waiting = [*self._waiting, (name, arguments)], []
        calls = deque(Call(k, "plane_steps", (self._tensors, steps), lasting=True) for k in self._holders)
        return [answer for _, answer in self._workers.each(calls)]


def merge_by(workers: RayWorkers, shares: Sequence[Share], job: Job, threads: int) -> MergeReport:
    """Merges by workers, each with its share; the files are the same as those of one process, to the byte."""
    inputs, options, output = job.inputs, job.options, job.output
    attempt = uuid.uuid4().hex[:8]
    for stale in output.scratch("planes").parent.glob("*.planes-*"):
        stale.unlink(missing_ok=True)  # a worker of an earlier driver may just be leaving
    base, *tasks = (path.absolute() for path in inputs.paths)
    calls: deque[Call] = deque()
    for k, share in enumerate(shares):
        spill = output.scratch(f"{attempt}.planes-{k}")
        assignment = Assignment(base, tuple(tasks), options, inputs.layout, share, threads, job.memory, spill)
        calls.append(Call(k, "begin", (assignment,), lasting=True))
    deque(workers.each(calls), maxlen=0)
    merge = ClusterMerge(workers, shares, inputs, options)
    merge.survey()
    merge.decide()
    return write_weights(merge, job, lambda shards: merge.write(shards, output, attempt))


class ClusterMerge(Merge):
    """A merge whose walks over the values are done by workers."""

    def __init__(self, workers: RayWorkers, shares: Sequence[Share], inputs: Inputs, options: Options) -> None:
        super().__init__(
            inputs.sources(file_sources(inputs.checkpoints)),
            options,
            kernels_for(torch.device("cpu")),
            Limits(threads=1),
        )
        self._workers, self._shares = workers, shares

    def scan(self, elements: int) -> Survey:
        self.method.set_element_count(elements)
        survey = Survey.nothing(len(self.layout.mergeable), self.tasks)
        for share, answer in zip(self._shares, self._ask("scan"), strict=True):
            survey.add(answer, [part.tensor for part in share.parts])
        return survey

    def apply(self, survey: Survey, elements: int | None = None) -> None:
        super().apply(survey, elements)
        self._ask("apply", survey.changed, self.elements, self._wide)

    @property
    def _wide(self) -> bool:
        return any(self.layout.mergeable[place.tensor].working == "F64" for place in self.places)

    def _mark(self) -> None:
        """Does nothing: each worker marks its candidates anew if it has to, once it knows what is merged."""

    def choose(self) -> None:
        self.method.decide(ClusterElements(self._workers, self._shares, self.places, self._wide))
        self._ask("take_over", self.method)

    def cache_delta(self, places: Sequence[TensorPlace]) -> None:
        """Does nothing: the workers keep what they measure."""

    def measure(self, places: Sequence[TensorPlace]) -> None:
        tensors = [place.tensor for place in places if place.tensor not in self._measured]
        if not tensors:
            return
        # Not repeated by a replacement: it reads again what its predecessor had kept.
        calls = deque(Call(k, "measure", (tensors,)) for k in range(len(self._shares)))
        for _, measured in self._workers.each(calls):
            self.add(measured)
        self._measured.update(tensors)

    def write(self, shards: Sequence[Shard], output: Output, attempt: str) -> dict[str, str]:
        """Has the workers write their ranges of shards, and keeps a shard once complete; returns the sha256 of each."""
        named = {output.begin_shard(shard, attempt): shard for shard in shards}
        todo: list[deque[Call]] = [deque() for _ in self._shares]
        writers = dict.fromkeys(named, 0)
        for path, shard in named.items():
            for k, slices in self._slices(shard).items():
                todo[k].append(Call(k, "write", (path, slices, self.scale)))
                writers[path] += 1
        complete: deque[Path] = deque()
        written: dict[str, str] = {}
        calls = deque(own.popleft() for own in todo if own)
        idle = set(range(len(todo))) - {call.worker for call in calls}
        for call, result in self._workers.each(calls):
            path = call.arguments[0]
            if call.name == "digest":
                output.finish_shard(named[path], path, result)
                written[named[path].name] = result
            else:
                if self.options.scale is not None:  # otherwise it has been measured before
                    self.add(result)
                writers[path] -= 1
                complete.extend([path] if not writers[path] else [])
            idle.add(call.worker)
            for k in sorted(idle):
                if complete or todo[k]:
                    calls.append(Call(k, "digest", (complete.popleft(),)) if complete else todo[k].popleft())
                    idle.discard(k)
        return written

    def _slices(self, shard: Shard) -> dict[int, list[Slice]]:
        """Assigns each part of a shard to a worker."""
        place = {tensor.name: k for k, tensor in enumerate(self.layout.mergeable)}
        slices: dict[int, list[Slice]] = {}
        offset = len(shard.header)
        for info in shard.tensors:
            for k, share in enumerate(self._shares):
                if info.name in share.copied:
                    slices.setdefault(k, []).append(Slice(info, 0, offset))
                for part in share.parts:
                    if part.tensor == place.get(info.name):
                        own = TensorInfo(info.name, info.dtype, (part.stop - part.start,))
                        at = offset + part.start * BITS[info.dtype] // 8
                        slices.setdefault(k, []).append(Slice(own, part.start, at))
            offset += info.nbytes
        return slices

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """Sends a call to all workers that a replacement repeats; returns the answers in their order."""
        calls = deque(Call(k, name, arguments, lasting=True) for k in range(len(self._shares)))
        answers = {call.worker: answer for call, answer in self._workers.each(calls)}
        return [answers[k] for k in range(len(self._shares))]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The engine that merges on a connected Ray cluster."""

    ray: Any
    room: Room

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        """Raises an `InputError` if `memory` is too little for a worker. What they put on disk is not known yet."""
        kernels = kernels_for(torch.device("cpu"))
        plan_memory(inputs.layout, options, kernels, self.room.cpus, memory)
        return 0

    def merge(self, job: Job) -> MergeReport:
        """Merges and writes the weights; the job's memory bounds each worker."""
        shares = divide(job.inputs.layout, job.options.out_dtype, self.room.workers)
        room = replace(self.room, workers=len(shares))
        with RayWorkers(self.ray, room, job.progress) as workers:
            return merge_by(workers, shares, job, room.cpus)


@contextmanager
def join_cluster(address: str | None, workers: int | None, threads: int | None) -> Iterator[Cluster]:
    """Joins the cluster at an address, or one on this machine, and finds room for workers there."""
    with ray_session(address, workers) as ray:
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        yield Cluster(ray, find_room(nodes, workers, threads))
