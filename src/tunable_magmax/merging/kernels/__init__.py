"""The few operations that every merge is made of, behind one interface: `Kernels`.

`numba_ops` runs on compiled loops (CPU), `torch_ops` on torch operations (any device), `triton_ops` on Triton programs
where it has one and on `torch_ops` elsewhere (NVIDIA GPUs). All give the same bits. A new backend implements `Kernels`
and `Planes`; no other module knows which one is used.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Plane = Any
"""A slice of one row of `Planes`: a bit set over element slots, in the backend's own form."""
Counts: TypeAlias = NDArray[np.int64] | None
"""Elements that each task gave; None where elements have no owners."""
Formula = Callable[[Sequence[Tensor]], Tensor]
"""Makes one task vector of several, element by element."""
Keys = NDArray[np.uint64]
"""Lottery numbers (docs/method.md, section 4)."""

SLOTS = 64
"""Each tensor's elements start at a slot that is a multiple of this, so that no two tensors share a word of a plane."""
WINDOW = 1 << 16
"""Pages of a mapped file come and go in aligned windows of this many bytes."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a mergeable tensor lies: its place in the layout, its first slot in the planes, its first element index."""

    tensor: int
    slot: int
    element: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Elements start:stop of a tensor."""

    place: TensorPlace
    start: int
    stop: int

    @property
    def slots(self) -> tuple[int, int]:
        """The range's first slot in the planes, and the one after its last."""
        return self.place.slot + self.start, self.place.slot + self.stop


def padded(size: int) -> int:
    """Returns the slots that a tensor takes in the planes."""
    return -(-size // SLOTS) * SLOTS


def split_ranges(places: Iterable[TensorPlace], chunk: int) -> list[TensorRange]:
    """Splits tensors into ranges of at most `chunk` elements, in order."""
    return [
        TensorRange(place, start, min(start + chunk, place.size))
        for place in places
        for start in range(0, place.size, chunk)
    ]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The base's and all tasks' values of a range, in the working type.

    `slot` is the range's first slot in the planes, `element` the element index of its first value.
    """

    base: Tensor
    tasks: Sequence[Tensor]
    slot: int
    element: int

    @property
    def slots(self) -> tuple[int, int]:
        """The chunk's first slot in the planes, and the one after its last."""
        return self.slot, self.slot + self.base.numel()


class Planes(ABC):
    """Rows of bits, one bit for each element slot."""

    @abstractmethod
    def part(self, row: int, start: int, stop: int) -> Plane:
        """Returns a view of slots start:stop of a row (start is a multiple of `SLOTS`)."""

    def release(self, slots: tuple[int, int], *rows: int) -> None:  # noqa: B027 - nothing to do in memory
        """Lets go of the memory behind these slots of some rows (-1: no row), if they are kept on disk."""

    def close(self) -> None:  # noqa: B027 - nothing to do in memory
        """Frees all rows, if they are kept on disk; others go with the object."""


class MappedRows:
    """Rows of equally many bytes, all 0 at first, in a file of their own that `close` removes."""

    def __init__(self, rows: int, row_bytes: int, path: Path) -> None:
        self._path, self._rows = path, rows
        self._row_bytes = -(-row_bytes // WINDOW) * WINDOW
        size = rows * self._row_bytes
        with open(path, "w+b") as file:
            # Claim the space now: a full disk must be an error here, not a SIGBUS in the middle of a loop.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                for start in range(0, size, 1 << 24):
                    file.write(bytes(min(1 << 24, size - start)))
                file.flush()
            self._map = mmap.mmap(file.fileno(), size)

    def rows(self, dtype: Any) -> NDArray[Any]:
        """Returns the rows as an array of some type."""
        return np.frombuffer(self._map, dtype).reshape(self._rows, -1)

    def release(self, start: int, stop: int, *rows: int) -> None:
        """Lets go of the memory behind bytes start:stop of some rows (-1: no row); the file keeps what they hold."""
        # Whole windows: a fault brings in all pages of one. Dropping what a neighbour uses costs a fault, never data.
        first, last = start // WINDOW * WINDOW, -(-stop // WINDOW) * WINDOW
        for row in rows:
            if row >= 0:
                self._map.madvise(mmap.MADV_DONTNEED, row * self._row_bytes + first, last - first)

    def close(self) -> None:
        """Removes the file."""
        with suppress(BufferError):  # the traceback of an error may still hold a view; the map goes with it
            self._map.close()
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the tensors inside a slice of planes begin and end (slots, relative) and their first element index."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    elements: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which elements of a task vector are kept: those of a larger magnitude, and of equal ones those with keys up to
    `key`."""

    magnitude: float
    key: int


class Kernels(Protocol):
    """What a backend must be able to do. Each operation works on one chunk or one slice of planes, or on one after the
    other: a GPU takes a whole batch of chunks, of one type, at once.

    Values have the working type, float32 or float64. Every operation rounds as docs/method.md says: no fused
    multiply-add, no reordering but in `square` and `squared_distance`. No method changes its inputs.
    """

    chunk: int
    """The elements of a chunk that suit the device."""
    span: int
    """Slots of planes that are worked on at a time."""
    threads: bool
    """Whether several threads may work at a time."""

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for values on the device."""

    def plane_bytes(self, slots: int) -> int:
        """Returns the memory of this machine that a row of planes takes."""

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        """Returns rows of bits, all 0; in the file `spill` if one is named."""

    # -- the candidates' scan -----------------------------------------------------------------------------------------

    def survey(
        self, chunk: Chunk, compared: Sequence[bool], rows: Sequence[int], planes: Planes | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Marks the candidates of each task; returns which tasks differ from the base, and which not finitely.

        Task k takes part in the comparison if compared[k]. Its candidates, the elements whose difference from the base
        is at least as large as that of every compared task before it, go to the row rows[k], unless that is -1.
        """

    def survey_all(
        self, chunks: Sequence[Chunk], marks: Sequence[tuple[Sequence[bool], Sequence[int]]], planes: Planes | None
    ) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_], float]]:
        """Surveys chunks; of each, returns the squared length of the last task's vector, too."""
        return [
            (*self.survey(chunk, *mark, planes), self.squared_distance(chunk.tasks[-1], chunk.base))
            for chunk, mark in zip(chunks, marks, strict=True)
        ]

    # -- planes, and the threshold search over keys -------------------------------------------------------------------

    def fill(self, plane: Plane, elements: int) -> None:
        """Sets the first bits, as many as there are elements, and no others."""

    def count_common(self, plane: Plane, other: Plane) -> int:
        """Returns how many bits two planes have in common."""

    def intersect(self, plane: Plane, other: Plane, out: Plane) -> None:
        """Sets out = plane and other."""

    def subtract(self, plane: Plane, other: Plane) -> None:
        """Sets plane = plane without other."""

    def unite(self, plane: Plane, other: Plane) -> None:
        """Sets plane = plane or other."""

    def scan_keys(
        self, plane: Plane, free: Plane, won: Plane, runs: Runs, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys, NDArray[np.uint64]]:
        """Draws a key for every element of `plane` and `free`, and sets `won` to those with keys below `low`.

        Returns how many these are, and the keys from `low` to `high` with their slots, counted from the slice's first.
        """

    def set_slots(self, plane: Plane, slots: NDArray[np.uint64]) -> None:
        """Sets the bits at these slots."""

    # -- the threshold search over magnitudes -------------------------------------------------------------------------

    def count_magnitudes(
        self, chunk: Chunk, tasks: Sequence[int], prefixes: Sequence[int], digit: tuple[int, int], wide: bool
    ) -> NDArray[np.int64]:
        """Counts elements by a digit (shift, bits) of their magnitude's code, [tasks, 2**bits].

        Elements count whose higher digits are the task's prefix. With `wide`, codes are those of float64.
        """

    def scan_equal(
        self, chunk: Chunk, task: int, magnitude: float, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys]:
        """Draws a key for every element of this magnitude: returns how many are below `low`, and those to `high`."""

    # -- sums ---------------------------------------------------------------------------------------------------------

    def square(self, vector: Tensor) -> float:
        """Returns the squared length, summed in float64 in any order."""

    def squared_distance(self, values: Tensor, base: Tensor) -> float:
        """Returns the squared length of values - base."""

    def squares(self, vectors: Sequence[Tensor]) -> list[float]:
        """Returns the squared length of each vector."""
        return [self.square(vector) for vector in vectors]

    # -- merged vectors -----------------------------------------------------------------------------------------------

    def apply(self, chunk: Chunk, formula: Formula, out: Tensor) -> Counts:
        """Writes what a formula in torch makes of all task vectors: for methods without an operation of their own."""

    def gather(self, chunk: Chunk, rows: Sequence[int], planes: Planes, out: Tensor) -> Counts:
        """Writes each element's difference from the base in the task whose row holds it (-1: no row)."""

    def gather_all(
        self, chunks: Sequence[Chunk], rows: Sequence[Sequence[int]], planes: Planes, outs: Sequence[Tensor]
    ) -> list[Counts]:
        """Gathers chunks, of which each has its own rows."""
        return [self.gather(chunk, own, planes, out) for chunk, own, out in zip(chunks, rows, outs, strict=True)]

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        """Writes the difference of largest magnitude, the later task's if two are equal."""

    def single(self, chunk: Chunk, task: int, out: Tensor) -> Counts:
        """Writes the vector of one task."""

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        """Writes the difference of the first of the tasks whose top is not below the element's key."""

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        """Writes the sum of some task vectors, each times its factor."""

    def elect(
        self,
        chunk: Chunk,
        tasks: Sequence[int],
        factors: Sequence[float],
        shares: Sequence[float],
        cuts: Sequence[Cut],
        lottery_states: Sequence[int],
        out: Tensor,
    ) -> None:
        """Writes the sum of those weighted differences that their task's cut keeps and that have the sum's sign.

        It is divided by the sum of their tasks' shares, unless that is 0: with 1 for each, this is their mean.
        """

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool:
        """Writes base + scale * tau; returns whether every result is finite."""

    def step_all(
        self, bases: Sequence[Tensor], taus: Sequence[Tensor], scale: float, outs: Sequence[Tensor]
    ) -> list[bool]:
        """Makes the step of each base."""
        return [self.step(base, tau, scale, out) for base, tau, out in zip(bases, taus, outs, strict=True)]
