"""The few primitives that every merge is made of, behind one interface: `Kernels`.

`native` runs on compiled loops (numba, CPU), `portable` on torch operations (any device). Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Plane = Any
"""A slice of one row of `Planes`: a bit set over element slots, in the kernels' own form."""

SLOTS = 64
"""Each tensor's elements start at a slot that is a multiple of this, so that no two tensors share a word of a plane."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one tensor: the base's and all tasks' values in the working type, and where it lies.

    `slot` is the range's place in the planes, `element` the element index (rule 2) of its first value.
    """

    base: Tensor
    tasks: Sequence[Tensor]
    slot: int
    element: int


class Planes(Protocol):
    """Rows of bits, one bit an element slot."""

    def part(self, row: int, start: int, stop: int) -> Plane:
        """A view of slots start:stop of a row (start is a multiple of `SLOTS`)."""

    def release(self, row: int, start: int, stop: int) -> None:
        """Let go of the memory behind these slots, if they are kept on disk."""

    def close(self) -> None:
        """Drop everything."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the tensors inside a slice of planes begin and end (slots, relative) and their first element index."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    elements: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Listed:
    """Elements of a slice of planes: the code of each one's magnitude, its lottery number, and its place (slot)."""

    codes: NDArray[np.int64]
    numbers: NDArray[np.uint64]
    slots: NDArray[np.uint64]


class Kernels(Protocol):
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

    def difference(self, values: Tensor, base: Tensor, out: Tensor) -> None: ...
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

    def magnitude_histogram(
        self,
        plane: Plane,
        free: Plane,
        base: Tensor,
        values: Tensor,
        wide: bool,
        shift: int,
        prefix: int,
        counts: NDArray[np.int64],
    ) -> None:
        """Count by a digit of the magnitude's code, where the higher ones are `prefix`; others go to the last bin."""

    def magnitude_cut(
        self,
        plane: Plane,
        free: Plane,
        base: Tensor,
        values: Tensor,
        wide: bool,
        low: int,
        high: int,
        won: Plane,
        level: Plane,
    ) -> None: ...
    def magnitude_list(
        self, plane: Plane, base: Tensor, values: Tensor, wide: bool, element: int, lottery_state: int
    ) -> Listed: ...

    def gather(self, chunk: Chunk, rows: Sequence[int], planes: Planes, out: Tensor) -> None: ...
    def largest(self, chunk: Chunk, out: Tensor) -> NDArray[np.int64]: ...
    def draw(self, chunk: Chunk, tops: Sequence[int], lottery_state: int, out: Tensor) -> NDArray[np.int64]: ...
    def weighted_sum(self, chunk: Chunk, factors: Sequence[float], out: Tensor) -> None: ...
    def elect(
        self, chunk: Chunk, factors: Sequence[float], rows: Sequence[int], planes: Planes, out: Tensor
    ) -> None: ...
    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool: ...
