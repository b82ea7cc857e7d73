"""The few operations that every merge is made of, behind one interface: `Kernels`.

`numba_ops` runs on compiled `loops` (CPU), `triton_ops` on Triton `programs` (NVIDIA GPUs). Both give the same bits. A
new backend implements `Kernels` and `Planes`; no other module knows which one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from tunable_magmax.merging.cuts import Cut, Listed, Window


Counts: TypeAlias = NDArray[np.int64] | None
"""Elements that each task gave; None where elements have no owners."""
Keys = NDArray[np.uint64]
"""Lottery numbers (docs/method.md, section 4)."""
Each = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]
"""Applies a function to items, in threads or not, and returns the results in order."""

SLOTS = 64
"""Each tensor's elements start at a slot that is a multiple of this, so that no two tensors share a word of a plane."""


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


class Planes:
    """Rows of bits, one bit for each element slot, in the backend's own form."""

    def close(self) -> None:
        """Frees all rows, if they are kept on disk; others go with the object."""


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """The rows of planes that an assignment works in."""

    candidates: tuple[int, ...]
    """The row that marks each task's candidates; -1 for none."""
    unused: tuple[int, ...]
    """Rows for what tasks own, if the candidates are to stay as they are; else the candidates' own rows are used."""
    free: int
    chosen: int

    @classmethod
    def for_tasks(cls, wanted: Sequence[bool], lasting: bool) -> PlaneRows:
        """Returns rows for the wanted tasks; with `lasting`, candidates stay as they are.

        >>> PlaneRows.for_tasks([True, False, True], lasting=False)
        PlaneRows(candidates=(0, -1, 1), unused=(), free=2, chosen=3)
        """
        rows = sum(wanted)
        candidates = tuple(sum(wanted[:t]) if wanted[t] else -1 for t in range(len(wanted)))
        unused = tuple(range(rows + 2, 2 * rows + 2)) if lasting else ()
        return cls(candidates, unused, rows, rows + 1)

    @property
    def count(self) -> int:
        return self.chosen + 1 + len(self.unused)


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owns the elements of a group of tensors."""

    rows: tuple[int, ...]
    """The row that holds each task's elements (-1 for none)."""
    leftovers: int
    """How many elements were nobody's candidates, and were given away by key."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What a task brings to an election of signs: its vector times a factor, where its cut keeps it, and its share."""

    task: int
    factor: float
    share: float
    cut: Cut
    lottery_state: int
    """Of the keys that the cut compares."""


class Kernels(Protocol):
    """What a backend must be able to do. Each operation works on one chunk, or on chunks of one type together.

    Values have the working type, float32 or float64. Every operation rounds as docs/method.md says: no fused
    multiply-add, no reordering but in squared lengths. No method changes its inputs.
    """

    chunk: int
    """The elements of a chunk that suit the device."""
    threads: bool
    """Whether several threads may work at a time, each on a chunk; else chunks are taken together."""

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for values on the device."""

    def plane_bytes(self, slots: int) -> int:
        """Returns the memory of this machine that a row of planes takes."""

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        """Returns rows of bits, all 0; in the file `spill` if one is named."""

    # -- who owns what ------------------------------------------------------------------------------------------------

    def survey(
        self, chunks: Sequence[Chunk], compared: Sequence[Sequence[bool]], rows: Sequence[int], planes: Planes | None
    ) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_], float]]:
        """Marks the candidates of the compared tasks [chunks, tasks] in each chunk.

        The candidates of task k, the elements whose difference from the base is at least as large as that of every
        compared task before it, go to the row rows[k], unless that is -1. Of each chunk, returns which tasks differ
        from the base, which not finitely, and the squared length of the last vector.
        """

    def plane_groups(self, planes: Planes, groups: Sequence[Sequence[TensorPlace]], each: Each) -> Any:
        """Returns the planes of groups of tensors, with the operations of `Step`.

        With `threads`, there is one group, of which `each` works on many spans at a time. Else these operations are on
        all groups together, and there is a `choose` beside them.
        """

    def scan(self, chunk: Chunk, window: Window) -> tuple[int, Listed]:
        """Returns how many elements are above a window, and those inside, or its sample of them."""

    # -- merged vectors -----------------------------------------------------------------------------------------------

    def gather(
        self, chunks: Sequence[Chunk], rows: Sequence[Sequence[int]], planes: Planes, outs: Sequence[Tensor]
    ) -> list[Counts]:
        """Writes each element's difference from the base in the task whose row holds it (-1: no row)."""

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        """Writes the difference of largest magnitude, the later task's if two are equal."""

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        """Writes the difference of the first of the tasks whose top is not below the element's key."""

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        """Writes the sum of some task vectors, each times its factor."""

    def elect(self, chunk: Chunk, votes: Sequence[Vote], out: Tensor) -> None:
        """Writes the sum of those weighted differences that their task's cut keeps and that have the sum's sign.

        It is divided by the sum of their tasks' shares, unless that is 0: with 1 for each, this is their mean.
        """

    def squares(self, vectors: Sequence[Tensor]) -> list[float]:
        """Returns the squared length of each vector, summed in float64 in any order."""

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(self, bases: Sequence[Tensor], taus: Sequence[Tensor], scale: float, outs: Sequence[Tensor]) -> list[bool]:
        """Writes base + scale * tau for each base; returns whether every result is finite."""
