"""A merge by several workers: a driver that decides, workers that read, hold the planes and write.

The survey, the auctions, the scale and the report are those of the local engine. Here is only what makes it act on
parts that lie elsewhere: what is to be known of them is added up, and what is decided is told to all.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tunable_magmax.checkpoints.shards import Shard
from tunable_magmax.checkpoints.tensors import BITS, TensorInfo
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.cluster_field import ClusterAuctioneer
from tunable_magmax.engines.crew import Call
from tunable_magmax.engines.inputs import FileVectors, Inputs
from tunable_magmax.engines.parts import Share
from tunable_magmax.engines.place import Errand
from tunable_magmax.engines.weight_files import write_weights
from tunable_magmax.engines.worker import Assignment, Slice
from tunable_magmax.merging.auction import TensorPlace
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport, Survey
from tunable_magmax.merging.resources import kernels_for
from tunable_magmax.merging.stream import Merge


class Workers(Protocol):
    """Somebody who makes calls to workers: a `Crew`."""

    def each(self, calls: deque[Call]) -> Iterator[tuple[Call, Any]]:
        """Make all calls, also those added meanwhile; yields each with its result as it is answered."""


def merge_by(crew: Workers, shares: Sequence[Share], errand: Errand, threads: int) -> MergeReport:
    """A merge by workers, each with its share: the same files as the local engine's, to the byte."""
    inputs, options, output = errand.inputs, errand.options, errand.output
    attempt = uuid.uuid4().hex[:8]
    for stale in output.scratch("planes").parent.glob("*.planes-*"):
        stale.unlink(missing_ok=True)  # a worker of an earlier driver may just be leaving
    base, *tasks = (path.absolute() for path in inputs.paths)
    calls: deque[Call] = deque()
    for k, share in enumerate(shares):
        spill = output.scratch(f"{attempt}.planes-{k}")
        assignment = Assignment(base, tuple(tasks), options, inputs.layout, share, threads, errand.memory, spill)
        calls.append(Call.lasting(k, "begin", assignment))
    deque(crew.each(calls), maxlen=0)
    merge = ClusterMerge(crew, shares, inputs, options)
    merge.survey()
    merge.decide()
    return write_weights(merge, inputs, output, errand.shard_size, lambda shards: merge.write(shards, output, attempt))


class ClusterMerge(Merge):
    """The engine whose walks are done by workers."""

    def __init__(self, crew: Workers, shares: Sequence[Share], inputs: Inputs, options: Options) -> None:
        super().__init__(
            inputs.layout,
            FileVectors(inputs.checkpoints),
            options,
            kernels_for(torch.device("cpu")),
            labels=inputs.labels,
            threads=1,
            notes=tuple(inputs.warnings()),
        )
        self._crew, self._shares = crew, shares

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
        auctioneer = ClusterAuctioneer(self._crew, self._shares, self.places, wide)
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
        for _, found in self._crew.each(calls):
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
        for call, result in self._crew.each(calls):
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
        answers = {call.worker: answer for call, answer in self._crew.each(calls)}
        return [answers[k] for k in range(len(self._shares))]
