"""What a worker of a cluster does: the walks over its share of a merge, and the driver's auctions on its planes.

Nothing here knows Ray. All a worker knows comes in calls, and none of them depends on the clock, the machine or
chance: a new worker that is given the same calls is in the same state.
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

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.checkpoints.shards import Shard
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.engines.weight_files import output_tensors, shard_data
from tunable_magmax.errors import ClusterError, InputError, StorageError
from tunable_magmax.merging.auction import Lot, Ownership, TensorPlace, Terms
from tunable_magmax.merging.kernels import SLOTS, Chunk, Kernels, Planes
from tunable_magmax.merging.local_auction import LocalGroupPlanes
from tunable_magmax.merging.methods import METHODS, Counts, Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import Vectors
from tunable_magmax.merging.report import Survey
from tunable_magmax.merging.resources import factor_room, kernels_for
from tunable_magmax.merging.stream import Findings, Merge


@dataclass(frozen=True, slots=True)
class Part:
    """Elements start:stop of a mergeable tensor, which is known by its place in the layout."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does: its parts of mergeable tensors, at most one of each, and the tensors that it copies."""

    parts: tuple[Part, ...]
    copied: tuple[str, ...]

    def layout(self, whole: Layout) -> Layout:
        """The parts as if each were a tensor: same names and element indices, shorter shapes."""
        parts = tuple(_cut(whole.mergeable[part.tensor], part) for part in self.parts)
        return replace(whole, mergeable=parts, copied=(), ties={}, warnings=())


def _cut(tensor: Mergeable, part: Part) -> Mergeable:
    infos = tuple(replace(info, shape=(part.stop - part.start,)) for info in tensor.infos)
    return replace(tensor, infos=infos, element=tensor.element + part.start)


def divide(layout: Layout, out_dtype: str | None, workers: int) -> list[Share]:
    """Shares of about equally many bytes to read, each a range of the output as planned from headers.

    There are fewer than `workers` if there is not enough to do. Cuts inside a tensor fall on multiples of 64 elements.

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
    """`Vectors` for parts of tensors."""

    def __init__(self, vectors: Vectors, whole: Layout, share: Share) -> None:
        self.borrows = vectors.borrows
        self._vectors = vectors
        self._of = {whole.mergeable[part.tensor].name: (whole.mergeable[part.tensor], part) for part in share.parts}

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        whole, part = self._of[tensor.name]
        return self._vectors.read(source, whole, part.start + start, part.start + stop, scratch)


class PartMethod(Method):
    """A method at work on parts of tensors: what it says of a part is what it says of the whole."""

    def __init__(self, method: Method, whole: Layout, share: Share) -> None:
        super().__init__(method.options, method.tasks)
        self.method, self.plane_rows, self.cuts_by_magnitude = method, method.plane_rows, method.cuts_by_magnitude
        self.elements = whole.elements
        """How many elements are merged, here and elsewhere."""
        self._places = [(part.tensor, whole.mergeable[part.tensor].size) for part in share.parts]

    def marks(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        return self.method.marks(*self._places[tensor])

    def assume(self, elements: int) -> bool:
        return self.method.assume(self.elements)

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.method.combined(*self._places[tensor])

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        return self.method.combine(kernels, chunk, self._places[tensor][0], planes, out)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker needs to know before it begins. Paths are absolute: another machine has another current folder."""

    base: Path
    tasks: tuple[Path, ...]
    options: Options
    layout: Layout
    share: Share
    threads: int
    memory: int
    spill: Path
    """How the file of its planes is called, if they need one; each worker of the share adds something of its own."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A worker's part of a tensor in an output file: `begin` is its first element, `offset` its place in bytes."""

    info: TensorInfo
    begin: int
    offset: int


Step = tuple[str, tuple[Any, ...]]
"""The name of a `GroupPlanes`'s operation, and its arguments."""


class Worker:
    """One share of a merge. The driver calls the methods in the order in which they stand here."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._floors: dict[tuple[int, ...] | None, LocalGroupPlanes] = {}
        self._done: dict[str, tuple[int, int]] = {}

    def begin(self, assignment: Assignment) -> None:
        """Open the inputs and make ready.

        What is wrong here alone is no fault of the inputs, so finished shards outlive it: a `ClusterError`.
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
        self._merge = self._stack.enter_context(
            Merge(
                share.layout(assignment.layout),
                PartVectors(FileVectors(self._inputs.checkpoints, room), assignment.layout, share),
                options,
                kernels_for(torch.device("cpu")),
                labels=self._inputs.labels,
                threads=assignment.threads,
                memory=assignment.memory,
                spill=_own_file(assignment.spill),
                progress=self._note_progress,
                method=self._method,
            )
        )

    def look(self) -> Survey:
        """Walk 1 over the share."""
        return self._merge.look()

    def conclude(self, changed: NDArray[np.bool_], elements: int) -> None:
        """Know what is merged: `changed` [all tensors, T] and the number of elements are the whole merge's."""
        tensors = [part.tensor for part in self._assignment.share.parts]
        found = Survey.nothing(len(tensors), self._method.tasks)
        found.changed[:] = changed[tensors]
        self._method.elements = elements
        self._merge.conclude(found)
        self._auctioneer = self._merge.auctioneer()
        self._position = {tensors[place.tensor]: k for k, place in enumerate(self._auctioneer.places)}

    def floor(self, tensors: tuple[int, ...] | None, wide: bool, steps: Sequence[Step]) -> Any:
        """Do the steps of an auction that is held by the driver, of some tensors or of all; the last one's result."""
        if tensors not in self._floors:
            held = self._position if tensors is None else [k for k in tensors if k in self._position]
            members = [self._position[k] for k in held]
            self._floors[tensors] = self._auctioneer.group_planes(members, wide, self._merge.walker.each)
        result = None
        for name, arguments in steps:
            result = getattr(self._floors[tensors], name)(*arguments)
        return result

    def auctions(self, lots: Sequence[Lot], terms: Terms) -> list[Ownership]:
        """Hold auctions of tensors that are here entirely; the members of the lots are tensors of the whole merge."""
        here = [Lot(tuple(self._position[k] for k in lot.members), lot.budget) for lot in lots]
        return self._auctioneer.auctions(here, terms)

    def settle(self, method: Method) -> None:
        """Take over what the driver's method has decided."""
        self._method.method = method
        self._floors.clear()

    def measure(self, tensors: Sequence[int]) -> Findings:
        """Count owners and measure the merged vector of the parts of some tensors, and keep it if memory allows."""
        places = [self._place(k) for k in tensors if k in self._position]
        if self._merge.options.scale is None:
            self._merge.make_stash(places)
        self._merge.measure(places)
        return self._found()

    def write(self, path: Path, slices: Sequence[Slice], scale: float) -> Findings:
        """Write what is this worker's of an output file; what was counted on the way."""
        self._merge.scale = scale
        infos = tuple(piece.info for piece in slices)
        here = Shard(path.name, infos, b"", sum(info.nbytes for info in infos))
        data = shard_data(self._merge, self._inputs, here, {piece.info.name: piece.begin for piece in slices})
        file = os.open(path, os.O_WRONLY)
        try:
            for piece in slices:
                at, end = piece.offset, piece.offset + piece.info.nbytes
                while at < end:
                    block = next(data)
                    _write_at(file, block, at)
                    at += block.nbytes
            os.fsync(file)
        finally:
            os.close(file)
        return self._found()

    def digest(self, path: Path) -> str:
        """The sha256 of a file that is complete."""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def progress(self) -> dict[str, tuple[int, int]]:
        """Elements done and in all, by phase."""
        return dict(self._done)

    def close(self) -> None:
        """Let go of everything."""
        self._stack.close()

    def _place(self, tensor: int) -> TensorPlace:
        return self._auctioneer.places[self._position[tensor]]

    def _found(self) -> Findings:
        """What was counted, by the tensors of the whole merge."""
        found = self._merge.findings()
        parts = self._assignment.share.parts
        return Findings({parts[k].tensor: counts for k, counts in found.counts.items()}, found.squares)

    def _note_progress(self, phase: str, done: int, total: int) -> None:
        self._done[phase] = (done, total)


_SHARED = "Workers read the inputs themselves: put base and tasks on a file system that all nodes mount at one place"


def _own_file(spill: Path) -> Path:
    """A name that no other worker of the share uses: one that is only out of reach may still write to its own.

    Nobody needs the files of predecessors any more.
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
