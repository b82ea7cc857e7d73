"""Merges on a Ray cluster: the driver decides, workers read, hold the planes and write.

The survey, the auctions, the scale and the report are those of a merge in one process. Here is what makes it act on
ranges of tensors that workers hold: their counts are added up, and decisions are sent to all.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from tunable_magmax.checkpoints.shards import Shard
from tunable_magmax.checkpoints.tensors import BITS, TensorInfo
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import Job, write_weights
from tunable_magmax.engines.ray_session import ray_session
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.engines.worker import Assignment, Share, Slice, Step, divide
from tunable_magmax.engines.workers import Call, RayWorkers, Room, find_room
from tunable_magmax.merging.auction import (
    Auctioneer,
    Group,
    Ownership,
    Selection,
    SpareRows,
    Terms,
    auction,
)
from tunable_magmax.merging.group_planes import LEAST_ROOM, GroupPlanes
from tunable_magmax.merging.kernels import TensorPlace
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.resources import Limits, kernels_for, plan_memory
from tunable_magmax.merging.stream import Merge


class ClusterAuctioneer(Auctioneer):
    """Holds auctions on the planes of several workers; `wide` says of every mergeable tensor whether it is float64."""

    def __init__(
        self, workers: RayWorkers, shares: Sequence[Share], places: Sequence[TensorPlace], wide: Sequence[bool]
    ) -> None:
        self._workers, self.places, self._wide = workers, places, wide
        self._everyone = range(len(shares))
        self._holders: dict[int, list[int]] = {}
        for k, share in enumerate(shares):
            for part in share.parts:
                self._holders.setdefault(part.tensor, []).append(k)
        self._groups: list[ClusterGroupPlanes] = []

    def select(
        self, groups: Sequence[Sequence[int]], spare: SpareRows, choose: Callable[[int, Selection], list[int]]
    ) -> list[list[int]]:
        chosen = []
        for number, members in enumerate(groups):
            tensors = [self.places[k].tensor for k in members]
            everywhere = len(members) == len(self.places)
            holders = self._everyone if everywhere else sorted({k for t in tensors for k in self._holders[t]})
            chosen.append(choose(number, Selection(self._group(tensors, holders), spare)))
        return chosen

    def hold(self, groups: Sequence[Group], terms: Terms) -> list[Ownership]:
        """Leaves groups that are on one worker entirely to that worker, and auctions the others from here, in order."""
        owners: dict[int, Ownership] = {}
        alone: dict[int, list[int]] = {}
        shared: list[tuple[int, list[int]]] = []
        by_tensor = [Group(tuple(self.places[k].tensor for k in group.members), group.budget) for group in groups]
        for number, group in enumerate(by_tensor):
            holders = sorted({k for tensor in group.members for k in self._holders[tensor]})
            if len(holders) == 1:
                alone.setdefault(holders[0], []).append(number)
            else:
                shared.append((number, holders))
        calls = deque(
            Call(k, "auctions", ([by_tensor[n] for n in own], terms), lasting=True) for k, own in alone.items()
        )
        for call, results in self._workers.each(calls):
            owners |= dict(zip(alone[call.worker], results, strict=True))
        for number, holders in shared:
            selection = Selection(self._group(by_tensor[number].members, holders), terms.spare)
            owners[number] = auction(selection, by_tensor[number].budget, terms)
        return [owners[number] for number in range(len(groups))]

    def finish(self) -> None:
        """Sends the steps that no worker has got yet."""
        for group in self._groups:
            group.finish()

    def _group(self, tensors: Sequence[int], holders: Sequence[int]) -> GroupPlanes:
        members = tuple(tensors) if len(tensors) < len(self.places) else None
        group = ClusterGroupPlanes(self._workers, holders, members, any(self._wide[k] for k in tensors))
        self._groups.append(group)
        return cast(GroupPlanes, group)


def _concatenate(answers: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    first, second = zip(*answers, strict=True)
    return np.concatenate(first), np.concatenate(second)


class ClusterGroupPlanes:
    """Planes of a group of tensors on several workers, with the operations of `GroupPlanes`.

    An operation without a result waits, and goes with the next one that has a result.
    """

    room = LEAST_ROOM
    """In all: 2.4 MB that travel, and what each worker has memory for, should they all be its own."""

    ADDS_UP: ClassVar[dict[str, Callable[[list[Any]], Any]]] = {
        "tally": sum,
        "histogram": lambda answers: np.sum(answers, axis=0),
        "narrow": lambda answers: np.sum(answers, axis=0),
        "sift": _concatenate,
        "look": lambda answers: (sum(n for n, _ in answers), np.concatenate([numbers for _, numbers in answers])),
    }
    """How the workers' answers become one, by operation; the others have no result."""

    def __init__(
        self, workers: RayWorkers, holders: Sequence[int], tensors: tuple[int, ...] | None, wide: bool
    ) -> None:
        self._workers, self._holders, self._tensors, self.wide = workers, holders, tensors, wide
        self._waiting: list[Step] = []

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._waiting.append((operation, arguments))
            return self.ADDS_UP[operation](self._send()) if operation in self.ADDS_UP else None

        return call

    def finish(self) -> None:
        """Sends the steps that wait."""
        if self._waiting:
            self._send()

    def _send(self) -> list[Any]:
        steps, self._waiting = self._waiting, []
        calls = deque(Call(k, "auction_steps", (self._tensors, self.wide, steps), lasting=True) for k in self._holders)
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
            inputs.sources(FileVectors(inputs.checkpoints)),
            options,
            kernels_for(torch.device("cpu")),
            Limits(threads=1),
        )
        self._workers, self._shares = workers, shares

    def look(self) -> Survey:
        self.method.assume(self.layout.elements)
        survey = Survey.nothing(len(self.layout.mergeable), self.tasks)
        for share, answer in zip(self._shares, self._ask("look"), strict=True):
            survey.add(answer, [part.tensor for part in share.parts])
        return survey

    def conclude(self, found: Survey) -> None:
        super().conclude(found)
        self._ask("conclude", found.changed, self.elements)

    def _mark(self) -> None:
        """Does nothing: each worker marks its candidates anew if it has to, once it knows what is merged."""

    def choose(self) -> None:
        wide = [tensor.working == "F64" for tensor in self.layout.mergeable]
        auctioneer = ClusterAuctioneer(self._workers, self._shares, self.places, wide)
        self.method.decide(auctioneer)
        auctioneer.finish()
        self._ask("settle", self.method)

    def make_stash(self, places: Sequence[TensorPlace]) -> None:
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
