"""A worker of a cluster: how a merge is divided into shares, and what a worker does with its share.

Nothing here knows Ray. All a worker knows comes in calls, and none of them depends on the clock, the machine or
chance: a new worker that gets the same calls reaches the same state.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.shards import Shard
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import output_tensors, shard_data
from tunable_magmax.engines.sources import file_sources
from tunable_magmax.errors import ClusterError, InputError, StorageError
from tunable_magmax.merging.assignment import LocalPlaneGroup, Ownership, PlaneRows
from tunable_magmax.merging.kernels import SLOTS, Keys
from tunable_magmax.merging.layout import Layout, Mergeable
from tunable_magmax.merging.merge import Findings, Merge
from tunable_magmax.merging.merged_elements import EqualScan, Groups, LocalElements, Quota
from tunable_magmax.merging.methods import Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import Survey
from tunable_magmax.merging.resources import Limits, kernels_for
from tunable_magmax.merging.walker import Source, Sources


@dataclass(frozen=True, slots=True)
class Part:
    """Elements start:stop of a mergeable tensor, which is known by its place in the layout."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Share:
    """The work of one worker: its ranges of mergeable tensors, at most one of each, and the tensors that it copies."""

    parts: tuple[Part, ...]
    copied: tuple[str, ...]

    def layout(self, whole: Layout) -> Layout:
        """Returns a layout in which each range is a tensor: same names and element indices, shorter shapes."""
        parts = tuple(_cut(whole.mergeable[part.tensor], part) for part in self.parts)
        return replace(whole, mergeable=parts, copied=(), ties={}, warnings=())


def _cut(tensor: Mergeable, part: Part) -> Mergeable:
    infos = tuple(replace(info, shape=(part.stop - part.start,)) for info in tensor.infos)
    return Mergeable(tensor.name, infos, tensor.element + part.start, (part.tensor, tensor.size))


def divide(layout: Layout, out_dtype: str | None, workers: int) -> list[Share]:
    """Divides a merge into shares of about equally many bytes to read, each a range of the output.

    There are fewer than `workers` if there is too little to do. Cuts inside a tensor fall on multiples of 64 elements.

    >>> from tunable_magmax.checkpoints.tensors import TensorInfo
    >>> infos = (TensorInfo("w", "F32", (1000,)),) * 3
    >>> whole = Layout((Mergeable("w", infos, 0),), (TensorInfo("steps", "I64", ()),), {}, ())
    >>> [share.parts for share in divide(whole, None, 2)]
    [(Part(tensor=0, start=0, stop=448),), (Part(tensor=0, start=448, stop=1000),)]
    """
    place = {tensor.name: k for k, tensor in enumerate(layout.mergeable)}
    merged = {tensor.name: out_dtype or tensor.widest for tensor in layout.mergeable}
    planned = output_tensors(layout, merged, out_dtype)
    costs = {tensor.name: sum(info.nbytes for info in tensor.infos) for tensor in layout.mergeable}
    costs |= {info.name: info.nbytes for info in layout.copied}
    total, spent = sum(costs.values()), 0
    shares: list[tuple[list[Part], list[str]]] = [([], []) for _ in range(workers)]
    current = 0
    for info in planned:
        cost, start = costs[info.name], 0
        if info.name not in place:
            shares[current][1].append(info.name)
        while info.name in place:
            k, size = place[info.name], info.numel
            room = total * (current + 1) // workers - spent - cost * start // max(size, 1)
            stop = size if current == workers - 1 else min(size, start + room * size // max(cost, 1) // SLOTS * SLOTS)
            if stop > start or not size:
                shares[current][0].append(Part(k, start, stop))
            if stop >= size:
                break
            start, current = max(start, stop), current + 1
        spent += cost
    return [Share(tuple(parts), tuple(copied)) for parts, copied in shares if parts or copied]


class PartSource:
    """A `Source` of a worker's ranges of tensors; `starts` says by name with which element of a tensor each begins."""

    def __init__(self, source: Source, starts: Mapping[str, int]) -> None:
        self._source, self._starts = source, starts

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        first = self._starts[name]
        return self._source.read(name, first + start, first + stop, scratch)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker needs to begin. Paths are absolute: another machine has another current folder."""

    base: Path
    tasks: tuple[Path, ...]
    options: Options
    layout: Layout
    share: Share
    threads: int
    memory: int
    spill: Path
    """The file of its planes, if they need one; each worker of the share adds something of its own to the name."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A worker's range of a tensor in an output file: `begin` is its first element, `offset` its place in bytes."""

    info: TensorInfo
    begin: int
    offset: int


Step = tuple[str, tuple[Any, ...]]
"""The name of an operation of `PlaneGroup`, and its arguments."""


class Worker:
    """Does one share of a merge. The driver calls the methods in the order in which they stand here.

    Tensors go by their numbers in the whole merge's layout.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._groups: dict[tuple[int, ...], LocalPlaneGroup] = {}
        self._done: dict[str, tuple[int, int]] = {}

    def begin(self, assignment: Assignment) -> None:
        """Opens the inputs and prepares the merge. What the driver can read and this worker can't is an error."""
        self._assignment = assignment
        options, share = assignment.options, assignment.share
        try:
            self._inputs = self._stack.enter_context(Inputs(assignment.base, assignment.tasks, options))
        except InputError as error:
            raise ClusterError(f"a worker can't read what the driver can: {error}. {_SHARED}") from None
        if self._inputs.layout != assignment.layout:
            raise ClusterError(f"a worker finds other checkpoints than the driver at the same paths. {_SHARED}")
        layout = share.layout(assignment.layout)
        sources: list[Source] = []
        for k, source in enumerate(file_sources(self._inputs.checkpoints)):
            names = zip(layout.names(k), share.parts, strict=True)
            sources.append(PartSource(source, {name: part.start for name, part in names}))
        limits = Limits(assignment.threads, assignment.memory, _own_file(assignment.spill), self._note_progress)
        kernels = kernels_for(torch.device("cpu"))
        self._merge = self._stack.enter_context(
            Merge(Sources(layout, sources, self._inputs.labels), options, kernels, limits)
        )

    def scan(self) -> Survey:
        """Surveys the share."""
        return self._merge.scan(self._assignment.layout.elements)

    def apply(self, changed: NDArray[np.bool_], elements: int, wide: bool) -> None:
        """Takes over what is merged: `changed` [all tensors, T], the number of elements, and whether some are float64.

        All are the whole merge's.
        """
        tensors = [part.tensor for part in self._assignment.share.parts]
        survey = Survey.nothing(len(tensors), changed.shape[1])
        survey.changed[:] = changed[tensors]
        self._merge.apply(survey, elements)
        self._elements: LocalElements = self._merge.merged_elements()
        self._elements.wide = wide
        self._position = {tensors[place.tensor]: k for k, place in enumerate(self._elements.places)}

    def plane_steps(self, tensors: tuple[int, ...], steps: Sequence[Step]) -> Any:
        """Does steps of an assignment that the driver makes, on some tensors; returns the last one's result."""
        if tensors not in self._groups:
            self._groups[tensors] = self._elements.plane_group(self._here(tensors))
        result = None
        for name, arguments in steps:
            result = getattr(self._groups[tensors], name)(*arguments)
        return result

    def assign_groups(self, quotas: Sequence[Quota], rows: PlaneRows, seed: int) -> list[Ownership]:
        """Assigns the elements of groups of tensors that are here entirely."""
        here = [Quota(self._here(quota.members), quota.budget) for quota in quotas]
        return self._elements.assign_groups(here, rows, seed)

    def count_magnitudes(
        self, groups: Groups, tasks: Sequence[int], prefixes: NDArray[np.int64], digit: tuple[int, int]
    ) -> NDArray[np.int64]:
        """Counts this share's elements of groups of tensors by a digit of their magnitude."""
        return self._elements.count_magnitudes([self._here(group) for group in groups], tasks, prefixes, digit)

    def scan_equal(self, groups: Groups, scans: Sequence[EqualScan]) -> list[tuple[int, Keys]]:
        """Answers scans for this share's elements."""
        return self._elements.scan_equal([self._here(group) for group in groups], scans)

    def _here(self, tensors: Sequence[int]) -> tuple[int, ...]:
        """Returns the places of those tensors of which this worker has a part."""
        return tuple(self._position[k] for k in tensors if k in self._position)

    def take_over(self, method: Method) -> None:
        """Takes over what the driver's method has decided."""
        self._merge.method = method
        self._groups.clear()

    def measure(self, tensors: Sequence[int]) -> Findings:
        """Counts owners and measures the merged vector of its ranges of some tensors; keeps it if memory allows."""
        places = [self._elements.places[k] for k in self._here(tensors)]
        if self._merge.options.scale is None:
            self._merge.cache_delta(places)
        self._merge.measure(places)
        return self._findings()

    def write(self, path: Path, slices: Sequence[Slice], scale: float) -> Findings:
        """Writes this worker's ranges of an output file; returns what was counted on the way."""
        self._merge.scale = scale
        infos = tuple(part.info for part in slices)
        here = Shard(path.name, infos, b"", sum(info.nbytes for info in infos))
        data = shard_data(self._merge, self._inputs, here, {part.info.name: part.begin for part in slices})
        file = os.open(path, os.O_WRONLY)
        try:
            for part in slices:
                at, end = part.offset, part.offset + part.info.nbytes
                while at < end:
                    block = next(data)
                    _write_at(file, block, at)
                    at += block.nbytes
            os.fsync(file)
        finally:
            os.close(file)
        self._inputs.refuse_changed()
        return self._findings()

    def digest(self, path: Path) -> str:
        """Returns the sha256 of a complete file."""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def progress(self) -> dict[str, tuple[int, int]]:
        """Returns elements done and in all, by phase."""
        return dict(self._done)

    def close(self) -> None:
        """Closes the inputs and the merge."""
        self._stack.close()

    def _findings(self) -> Findings:
        """Returns what was counted, by the tensors of the whole merge."""
        own = self._merge.findings()
        parts = self._assignment.share.parts
        return Findings({parts[k].tensor: counts for k, counts in own.counts.items()}, own.squares)

    def _note_progress(self, phase: str, done: int, total: int) -> None:
        self._done[phase] = (done, total)


_SHARED = "Workers read the inputs themselves: put base and tasks on a file system that all nodes mount at one place"


def _own_file(spill: Path) -> Path:
    """Returns a name that no other worker of the share uses, since one out of reach may still write to its own file.

    The files of predecessors are removed.
    """
    for stale in spill.parent.glob(f"{spill.name}-*"):
        stale.unlink(missing_ok=True)
    return spill.with_name(f"{spill.name}-{uuid.uuid4().hex[:8]}")


def _write_at(file: int, data: memoryview, offset: int) -> None:
    left = data.cast("B")
    while left:
        written = os.pwrite(file, left, offset)
        if not written:
            raise StorageError("nothing more can be written")
        left, offset = left[written:], offset + written
