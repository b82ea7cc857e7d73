"""The few operations that every merge is made of, behind one interface: `Kernels`.

`native` runs on compiled loops (numba, CPU), `torch_ops` on torch operations, on any device. Both give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Plane = Any
"""A slice of one row of `Planes`: a bit set over element slots, in the kernels' own form."""
Counts: TypeAlias = NDArray[np.int64] | None
"""Elements that each task gave; None where elements have no owners."""
Formula = Callable[[Sequence[Tensor]], Tensor]
"""Makes one task vector of several, element by element."""

SLOTS = 64
"""Each tensor's elements start at a slot that is a multiple of this, so that no two tensors share a word of a plane."""
# How the bit pattern of a magnitude is cut into digits (shift, bits): it has 31 bits in float32 and 63 in float64.
NARROW_DIGITS = ((15, 16), (0, 15))
WIDE_DIGITS = ((47, 16), (31, 16), (15, 16), (0, 15))


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

    `slot` is the range's first slot in the planes, `element` the element index (rule 2) of its first value.
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


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the tensors inside a slice of planes begin and end (slots, relative) and their first element index."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    elements: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The elements of a range that are in both planes, with the values of the task and the base.

    They are chosen by the magnitude of the difference, as float64 if `wide`.
    """

    plane: Plane
    free: Plane
    base: Tensor
    values: Tensor
    wide: bool


@dataclass(frozen=True, slots=True)
class Listed:
    """Some candidates: the code of each one's magnitude, its lottery number, and its slot, counted in the range."""

    codes: NDArray[np.int64]
    numbers: NDArray[np.uint64]
    slots: NDArray[np.uint64]


class VectorKernels(Protocol):
    """The operations that make merged vectors."""

    def apply(self, chunk: Any, formula: Formula, out: Any) -> Counts:
        """Writes what a formula makes of all task vectors, by torch operations: for methods without a kernel."""

    def gather(self, chunk: Any, rows: Any, planes: Any, out: Any) -> Counts:
        """Writes each element's difference from the base in the task whose row holds it (-1: no row)."""

    def largest(self, chunk: Any, out: Any) -> Counts:
        """Writes the difference of largest magnitude, the later task's if two are equal."""

    def single(self, chunk: Any, task: int, out: Any) -> Counts:
        """Writes the vector of one task."""

    def draw(self, chunk: Any, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Any) -> Counts:
        """Writes the difference of the first of the tasks whose top is not below the element's lottery number."""

    def weighted_sum(self, chunk: Any, tasks: Sequence[int], factors: Sequence[float], out: Any) -> None:
        """Writes the sum of some task vectors, each times its factor."""

    def elect(
        self,
        chunk: Any,
        tasks: Sequence[int],
        factors: Sequence[float],
        shares: Sequence[float],
        rows: Sequence[int],
        planes: Any,
        out: Any,
    ) -> None:
        """Writes the sum of those weighted differences, of elements in the task's row, that have the sum's sign.

        It is divided by the sum of their tasks' shares, unless that is 0: with 1 for each, this is their mean.
        """


class Kernels(VectorKernels, Protocol):
    """What a device must be able to do."""

    chunk: int
    threads: bool
    """Whether several threads may share the work."""

    def plane_bytes(self, slots: int) -> int: ...
    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes: ...
    def empty(self, elements: int, dtype: torch.dtype) -> Tensor: ...

    def survey(
        self, chunk: Chunk, compared: Sequence[bool], rows: Sequence[int], planes: Planes | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]: ...

    def square(self, vector: Tensor) -> float: ...
    def squared_distance(self, values: Tensor, base: Tensor) -> float: ...

    def fill(self, plane: Plane, elements: int) -> None: ...
    def tally(self, plane: Plane, free: Plane) -> int: ...
    def claim(self, plane: Plane, free: Plane, won: Plane) -> None: ...
    def retire(self, free: Plane, won: Plane) -> None: ...
    def unite(self, won: Plane, more: Plane) -> None: ...
    def split(
        self, plane: Plane, free: Plane, won: Plane, runs: Runs, lottery_state: int, low: int, high: int
    ) -> tuple[int, NDArray[np.uint64], NDArray[np.uint64]]: ...
    def award(self, won: Plane, slots: NDArray[np.uint64]) -> None: ...

    def magnitude_histogram(self, candidates: Candidates, shift: int, prefix: int, counts: NDArray[np.int64]) -> None:
        """Counts by a digit of the magnitude's code, where the higher ones are `prefix`; others go to the last bin."""

    def magnitude_cut(self, candidates: Candidates, low: int, high: int, won: Plane, level: Plane) -> None: ...
    def magnitude_list(self, candidates: Candidates, element: int, lottery_state: int) -> Listed: ...

    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool: ...
