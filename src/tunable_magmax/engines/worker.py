"""A worker of a cluster: how a merge is divided into shares, and what a worker does with its share.

Nothing here knows Ray. All a worker knows comes in calls, and none of them depends on the clock, the machine or
chance: a new worker that gets the same calls reaches the same state.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
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
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.errors import ClusterError, InputError, StorageError
from tunable_magmax.merging.auction import Group, Ownership, Terms
from tunable_magmax.merging.group_planes import GroupPlanes
from tunable_magmax.merging.kernels import SLOTS, Counts, VectorKernels
from tunable_magmax.merging.layout import Layout, Mergeable
from tunable_magmax.merging.methods import METHODS, Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import Sources, Vectors
from tunable_magmax.merging.report import Survey
from tunable_magmax.merging.resources import Limits, factor_room, kernels_for
from tunable_magmax.merging.stream import Findings, Merge


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
    return replace(tensor, infos=infos, element=tensor.element + part.start)


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


class PartVectors:
    """`Vectors` for a worker's ranges of tensors."""

    def __init__(self, vectors: Vectors, whole: Layout, share: Share) -> None:
        self.borrows = vectors.borrows
        self._vectors = vectors
        self._of = {whole.mergeable[part.tensor].name: (whole.mergeable[part.tensor], part) for part in share.parts}

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        whole, part = self._of[tensor.name]
        return self._vectors.read(source, whole, part.start + start, part.start + stop, scratch)


class PartMethod(Method):
    """A method for a worker's ranges of tensors: it treats a range as it treats the whole tensor."""

    def __init__(self, method: Method, whole: Layout, share: Share) -> None:
        super().__init__(method.options, method.tasks)
        self.method, self.spare, self.cuts_by_magnitude = method, method.spare, method.cuts_by_magnitude
        self.elements = whole.elements
        """How many elements all workers merge."""
        self._places = [(part.tensor, whole.mergeable[part.tensor].size) for part in share.parts]

    def marks(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        return self.method.marks(*self._places[tensor])

    def assume(self, elements: int) -> bool:
        return self.method.assume(self.elements)

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.method.combined(*self._places[tensor])

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        return self.method.combine(kernels, chunk, self._places[tensor][0], planes, out)


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
"""The name of an operation of `GroupPlanes`, and its arguments."""


class Worker:
    """Does one share of a merge. The driver calls the methods in the order in which they stand here."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._groups: dict[tuple[int, ...] | None, GroupPlanes] = {}
        self._done: dict[str, tuple[int, int]] = {}

    def begin(self, assignment: Assignment) -> None:
        """Opens the inputs and prepares the merge.

        What the driver can read and this worker can't is a `ClusterError`, so that finished shards are kept.
        """
        self._assignment = assignment
        options, share = assignment.options, assignment.share
        try:
            self._inputs = self._stack.enter_context(Inputs(assignment.base, assignment.tasks, options))
        except InputError as error:
            raise ClusterError(f"a worker can't read what the driver can: {error}. {_SHARED}") from None
        if self._inputs.layout != assignment.layout:
            raise ClusterError(f"a worker finds other checkpoints than the driver at the same paths. {_SHARED}")
        self._method = PartMethod(
            METHODS[options.method](options, len(assignment.tasks)), assignment.layout, assignment.share
        )
        room = factor_room(assignment.layout, assignment.memory)
        vectors = PartVectors(FileVectors(self._inputs.checkpoints, room), assignment.layout, share)
        self._merge = self._stack.enter_context(
            Merge(
                Sources(share.layout(assignment.layout), vectors, self._inputs.labels),
                options,
                kernels_for(torch.device("cpu")),
                Limits(assignment.threads, assignment.memory, _own_file(assignment.spill), self._note_progress),
                self._method,
            )
        )

    def look(self) -> Survey:
        """Surveys the share."""
        return self._merge.look()

    def conclude(self, changed: NDArray[np.bool_], elements: int) -> None:
        """Takes over what is merged: `changed` [all tensors, T] and the number of elements are the whole merge's."""
        tensors = [part.tensor for part in self._assignment.share.parts]
        survey = Survey.nothing(len(tensors), self._method.tasks)
        survey.changed[:] = changed[tensors]
        self._method.elements = elements
        self._merge.conclude(survey)
        self._auctioneer = self._merge.auctioneer()
        self._position = {tensors[place.tensor]: k for k, place in enumerate(self._auctioneer.places)}

    def auction_steps(self, tensors: tuple[int, ...] | None, wide: bool, steps: Sequence[Step]) -> Any:
        """Does steps of an auction that the driver holds, on some tensors or all; returns the last one's result."""
        if tensors not in self._groups:
            held = self._position if tensors is None else [k for k in tensors if k in self._position]
            members = [self._position[k] for k in held]
            self._groups[tensors] = self._auctioneer.group_planes(members, wide, self._merge.walker.each)
        result = None
        for name, arguments in steps:
            result = getattr(self._groups[tensors], name)(*arguments)
        return result

    def auctions(self, groups: Sequence[Group], terms: Terms) -> list[Ownership]:
        """Holds auctions of tensors that are here entirely; the groups' members are tensors of the whole merge."""
        here = [Group(tuple(self._position[k] for k in group.members), group.budget) for group in groups]
        return self._auctioneer.hold(here, terms)

    def settle(self, method: Method) -> None:
        """Takes over what the driver's method has decided."""
        self._method.method = method
        self._groups.clear()

    def measure(self, tensors: Sequence[int]) -> Findings:
        """Counts owners and measures the merged vector of its ranges of some tensors; keeps it if memory allows."""
        places = [self._auctioneer.places[self._position[k]] for k in tensors if k in self._position]
        if self._merge.options.scale is None:
            self._merge.make_stash(places)
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
