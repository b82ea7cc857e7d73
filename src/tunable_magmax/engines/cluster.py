"""A Ray cluster as a place to merge."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tunable_magmax.engines.ray_session import ray_session
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.engines.weight_files import Job, write_weights
from tunable_magmax.engines.worker import Assignment, Share, Slice, Step, divide
from tunable_magmax.engines.workers import Call, RayWorkers, Room, Workers, find_room
from tunable_magmax.errors import ClusterError
from tunable_magmax.files import Progress
from tunable_magmax.merging.auction import Lot, Ownership, Selection, SpareRows, TensorPlace, Terms, auction
from tunable_magmax.merging.local_auction import LEAST_ROOM
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.resources import kernels_for, plan_memory, working_threads
from tunable_magmax.merging.stream import Merge

ONLY_TELL = ("tally", "histogram")
"""What leaves the planes as they are: a successor need not do it."""


class ClusterAuctioneer:
    """An `Auctioneer` of several workers; `wide` says of every mergeable tensor whether it is float64."""

    def __init__(
        self, workers: Workers, shares: Sequence[Share], places: Sequence[TensorPlace], wide: Sequence[bool]
    ) -> None:
        self._workers, self.places, self._wide = workers, places, wide
        self._everybody = range(len(shares))
        self._holders: dict[int, list[int]] = {}
        for k, share in enumerate(shares):
            for part in share.parts:
                self._holders.setdefault(part.tensor, []).append(k)
        self._floors: list[ClusterGroupPlanes] = []

    @property
    def elements(self) -> int:
        return sum(place.size for place in self.places)

    def selection(self, spare: SpareRows) -> Selection:
        everything = [place.tensor for place in self.places]
        return Selection(self._floor(everything, self._everybody), spare)

    def auctions(self, lots: Sequence[Lot], terms: Terms) -> list[Ownership]:
        """Lots that are on one worker entirely are left to it; the others are held from here, one after the other."""
        owners: dict[int, Ownership] = {}
        alone: dict[int, list[int]] = {}
        shared: list[tuple[int, list[int]]] = []
        told = [Lot(tuple(self.places[k].tensor for k in lot.members), lot.budget) for lot in lots]
        for place, lot in enumerate(told):
            holders = sorted({k for tensor in lot.members for k in self._holders[tensor]})
            if len(holders) == 1:
                alone.setdefault(holders[0], []).append(place)
            else:
                shared.append((place, holders))
        calls = deque(
            Call.lasting(k, "auctions", [told[place] for place in places], terms) for k, places in alone.items()
        )
        for call, found in self._workers.each(calls):
            owners |= dict(zip(alone[call.worker], found, strict=True))
        for place, holders in shared:
            selection = Selection(self._floor(told[place].members, holders), terms.spare)
            owners[place] = auction(selection, terms.rows, told[place].budget, terms.seed, terms.keep)
        return [owners[place] for place in range(len(lots))]

    def finish(self) -> None:
        """Have everything done that was only noted down."""
        for floor in self._floors:
            floor.finish()

    def _floor(self, tensors: Sequence[int], holders: Sequence[int]) -> ClusterGroupPlanes:
        wide = any(self._wide[k] for k in tensors)
        floor = ClusterGroupPlanes(
            self._workers, holders, tuple(tensors) if len(tensors) < len(self.places) else None, wide
        )
        self._floors.append(floor)
        return floor


class ClusterGroupPlanes:
    """A `GroupPlanes` on several workers. What has no result is noted down and goes with the next question."""

    room = LEAST_ROOM
    """In all: 2.4 MB that travel, and what each worker has memory for, should they all be its own."""

    def __init__(self, workers: Workers, holders: Sequence[int], tensors: tuple[int, ...] | None, wide: bool) -> None:
        self._workers, self._holders, self._tensors, self.wide = workers, holders, tensors, wide
        self._noted: list[Step] = []

    def open(self, free: int) -> None:
        self._noted.append(("open", (free,)))

    def tally(self, row: int, other: int) -> int:
        return sum(self._ask("tally", row, other))

    def claim(self, row: int, free: int, won: int) -> None:
        self._noted.append(("claim", (row, free, won)))

    def retire(self, free: int, won: int) -> None:
        self._noted.append(("retire", (free, won)))

    def unite(self, row: int, more: int) -> None:
        self._noted.append(("unite", (row, more)))

    def histogram(self, task: int, row: int, free: int, shift: int, bits: int, prefix: int) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.sum(self._ask("histogram", task, row, free, shift, bits, prefix), axis=0)
        return counts

    def cut(self, task: int, row: int, free: int, low: int, high: int, won: int, level: int) -> None:
        self._noted.append(("cut", (task, row, free, low, high, won, level)))

    def narrow(
        self, task: int, row: int, free: int, low: int, high: int, won: int, level: int, shift: int, bits: int
    ) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.sum(
            self._ask("narrow", task, row, free, low, high, won, level, shift, bits), axis=0
        )
        return counts

    def sift(
        self, task: int, row: int, free: int, low: int, high: int, won: int, level: int, lottery_state: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        found = self._ask("sift", task, row, free, low, high, won, level, lottery_state)
        return np.concatenate([codes for codes, _ in found]), np.concatenate([numbers for _, numbers in found])

    def award_listed(self, won: int, code: int, highest: int) -> None:
        self._noted.append(("award_listed", (won, code, highest)))

    def look(
        self, row: int, free: int, won: int, lottery_state: int, low: int, high: int
    ) -> tuple[int, NDArray[np.uint64]]:
        found = self._ask("look", row, free, won, lottery_state, low, high)
        return sum(winners for winners, _ in found), np.concatenate([numbers for _, numbers in found])

    def award(self, won: int, highest: int) -> None:
        self._noted.append(("award", (won, highest)))

    def finish(self) -> None:
        """Have everything done that was only noted down."""
        if self._noted:
            self._send(self._noted, self._noted)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        steps = [*self._noted, (name, arguments)]
        return self._send(steps, self._noted if name in ONLY_TELL else steps)

    def _send(self, steps: list[Step], lasting: list[Step]) -> list[Any]:
        self._noted = []
        head = (self._tensors, self.wide)
        replay = (*head, lasting) if lasting else None
        calls = deque(Call(k, "floor", (*head, steps), replay) for k in self._holders)
        return [answer for _, answer in self._workers.each(calls)]


def merge_by(workers: Workers, shares: Sequence[Share], job: Job, threads: int) -> MergeReport:
    """A merge by workers, each with its share: the same files as the local engine's, to the byte."""
    inputs, options, output = job.inputs, job.options, job.output
    attempt = uuid.uuid4().hex[:8]
    for stale in output.scratch("planes").parent.glob("*.planes-*"):
        stale.unlink(missing_ok=True)  # a worker of an earlier driver may just be leaving
    base, *tasks = (path.absolute() for path in inputs.paths)
    calls: deque[Call] = deque()
    for k, share in enumerate(shares):
        spill = output.scratch(f"{attempt}.planes-{k}")
        assignment = Assignment(base, tuple(tasks), options, inputs.layout, share, threads, job.memory, spill)
        calls.append(Call.lasting(k, "begin", assignment))
    deque(workers.each(calls), maxlen=0)
    merge = ClusterMerge(workers, shares, inputs, options)
    merge.survey()
    merge.decide()
    return write_weights(merge, inputs, output, job.shard_size, lambda shards: merge.write(shards, output, attempt))


class ClusterMerge(Merge):
    """The engine whose walks are done by workers."""

    def __init__(self, workers: Workers, shares: Sequence[Share], inputs: Inputs, options: Options) -> None:
        super().__init__(
            inputs.layout,
            FileVectors(inputs.checkpoints),
            options,
            kernels_for(torch.device("cpu")),
            labels=inputs.labels,
            threads=1,
            notes=tuple(inputs.warnings()),
        )
        self._workers, self._shares = workers, shares

    def look(self) -> Survey:
        self.method.assume(self.layout.elements)
        found = Survey.nothing(len(self.layout.mergeable), self.tasks)
        for share, part in zip(self._shares, self._ask("look"), strict=True):
            found.add(part, [piece.tensor for piece in share.parts])
        return found

    def conclude(self, found: Survey) -> None:
        super().conclude(found)
        self._ask("conclude", found.changed, self.elements)

    def _mark(self) -> None:
        """The workers see for themselves, when told what is merged, that they have to."""

    def choose(self) -> None:
        wide = [tensor.working == "F64" for tensor in self.layout.mergeable]
        auctioneer = ClusterAuctioneer(self._workers, self._shares, self.places, wide)
        self.method.decide(auctioneer)
        auctioneer.finish()
        self._ask("settle", self.method)

    def make_stash(self, places: Sequence[TensorPlace]) -> None:
        """The workers keep what they measure."""

    def measure(self, places: Sequence[TensorPlace]) -> None:
        tensors = [place.tensor for place in places if place.tensor not in self._measured]
        if not tensors:
            return
        # Not to be done again by a successor: it reads again what its predecessor had kept.
        calls = deque(Call(k, "measure", (tensors,)) for k in range(len(self._shares)))
        for _, found in self._workers.each(calls):
            self.add(found)
        self._measured.update(tensors)

    def write(self, shards: Sequence[Shard], output: Output, attempt: str) -> dict[str, str]:
        """Let the workers write shards, each its parts of them; the sha256 of each. A complete one is kept at once."""
        paths = {shard.name: output.begin_shard(shard, attempt) for shard in shards}
        named = {path: next(shard for shard in shards if shard.name == name) for name, path in paths.items()}
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
        """Who writes what of a shard."""
        place = {tensor.name: k for k, tensor in enumerate(self.layout.mergeable)}
        found: dict[int, list[Slice]] = {}
        offset = len(shard.header)
        for info in shard.tensors:
            for k, share in enumerate(self._shares):
                if info.name in share.copied:
                    found.setdefault(k, []).append(Slice(info, 0, offset))
                for part in share.parts:
                    if part.tensor == place.get(info.name):
                        own = TensorInfo(info.name, info.dtype, (part.stop - part.start,))
                        at = offset + part.start * BITS[info.dtype] // 8
                        found.setdefault(k, []).append(Slice(own, part.start, at))
            offset += info.nbytes
        return found

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """A call to all workers on which later ones build; answers by worker."""
        calls = deque(Call.lasting(k, name, *arguments) for k in range(len(self._shares)))
        answers = {call.worker: answer for call, answer in self._workers.each(calls)}
        return [answers[k] for k in range(len(self._shares))]


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

    def merge(self, job: Job) -> MergeReport:
        """Do the merge and write its weights; `memory` bounds each worker."""
        shares = divide(job.inputs.layout, job.options.out_dtype, self.room.workers)
        room = replace(self.room, workers=len(shares))
        try:
            with RayWorkers(self.ray, room, _forward_only(job.progress)) as workers:
                return merge_by(workers, shares, job, room.cpus)
        except ClusterError as error:
            raise ClusterError(
                f"{error}. Finished shards are kept in {job.output.partial}: run the same command again to continue"
            ) from None


@contextmanager
def join_cluster(address: str | None, workers: int | None, threads: int | None) -> Iterator[Cluster]:
    """Join the cluster at an address, or one on this machine, and find room for workers there."""
    with ray_session(address, workers) as ray:
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        yield Cluster(ray, find_room(nodes, workers, threads))


def _forward_only(progress: Progress | None) -> Callable[[Mapping[str, tuple[int, int]]], None] | None:
    """What workers have done, as bars that only go forward: a new worker begins anew, which nobody needs to see."""
    if progress is None:
        return None
    furthest: dict[str, int] = {}

    def watch(phases: Mapping[str, tuple[int, int]]) -> None:
        for phase, (done, total) in phases.items():
            furthest[phase] = max(done, furthest.get(phase, 0))
            progress(phase, furthest[phase], total)

    return watch
