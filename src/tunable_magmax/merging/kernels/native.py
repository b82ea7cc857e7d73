"""The primitives on compiled CPU loops. Planes are bits in 64-bit words, in memory or in a file that is mapped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.kernels import (
    SLOTS,
    Candidates,
    Chunk,
    Counts,
    Formula,
    Listed,
    Planes,
    Runs,
    loops,
    value_loops,
)
from tunable_magmax.merging.kernels.mapped_rows import MappedRows

Words = NDArray[np.uint64]
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_CODES: dict[bool, tuple[Any, Any]] = {False: (np.int32, np.float32(1)), True: (np.int64, np.float64(1))}
"""By whether magnitudes are compared as float64: the type of their codes, and a 1 of the type of the magnitudes."""


class MemoryPlanes(Planes):
    """Planes in memory."""

    def __init__(self, rows: int, slots: int) -> None:
        self.words: Words = np.zeros((rows, slots // SLOTS), np.uint64)

    def part(self, row: int, start: int, stop: int) -> Words:
        return self.words[row, start // SLOTS : -(-stop // SLOTS)]


class MappedPlanes(MemoryPlanes):
    """Planes in a file, whose pages are let go as soon as a slice has been worked on."""

    def __init__(self, rows: int, slots: int, path: Path) -> None:
        self._file = MappedRows(rows, slots // 8, path)
        self.words = self._file.rows(np.uint64)

    def release(self, slots: tuple[int, int], *rows: int) -> None:
        self._file.release(slots[0] // 8, -(-slots[1] // 8), *rows)

    def close(self) -> None:
        self.words = np.zeros((0, 0), np.uint64)
        self._file.close()


def _addresses(tasks: Sequence[Tensor]) -> Words:
    return np.array([values.data_ptr() for values in tasks], np.uint64)


def _words(planes: Planes | None) -> Words:
    if planes is None:
        return np.zeros((0, 0), np.uint64)
    assert isinstance(planes, MemoryPlanes)
    return planes.words


class NativeKernels:
    """`Kernels` for the CPU."""

    chunk = 1 << 19
    threads = True

    def plane_bytes(self, slots: int) -> int:
        return slots // 8

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        return MemoryPlanes(rows, slots) if spill is None else MappedPlanes(rows, slots, spill)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        # numpy asks for huge pages, torch does not: without them, touching fresh memory is a third of a merge's time.
        return torch.from_numpy(np.empty(elements * dtype.itemsize, np.uint8)).view(dtype)

    def survey(
        self, chunk: Chunk, compared: Sequence[bool], rows: Sequence[int], planes: Planes | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        changed = np.zeros(len(chunk.tasks), np.bool_)
        suspect = np.zeros(len(chunk.tasks), np.bool_)
        marks = np.array(compared, np.bool_), np.array(rows, np.int64), _words(planes), chunk.slot // SLOTS
        value_loops.survey(chunk.base.numpy(), _addresses(chunk.tasks), *marks, changed, suspect)
        return changed, suspect

    def square(self, vector: Tensor) -> float:
        return float(value_loops.sum_of_squares(vector.numpy()))

    def squared_distance(self, values: Tensor, base: Tensor) -> float:
        return float(value_loops.squared_distance(values.numpy(), base.numpy()))

    def fill(self, plane: Words, elements: int) -> None:
        plane[: elements // SLOTS] = np.uint64(0xFFFFFFFFFFFFFFFF)
        if elements % SLOTS:
            plane[elements // SLOTS] = np.uint64((1 << elements % SLOTS) - 1)

    def tally(self, plane: Words, free: Words) -> int:
        return int(loops.tally(plane, free))

    def claim(self, plane: Words, free: Words, won: Words) -> None:
        np.bitwise_and(plane, free, out=won)

    def retire(self, free: Words, won: Words) -> None:
        loops.retire(free, won)

    def unite(self, won: Words, more: Words) -> None:
        won |= more

    def split(
        self, plane: Words, free: Words, won: Words, runs: Runs, lottery_state: int, low: int, high: int
    ) -> tuple[int, Words, Words]:
        # Room for what chance can bring: a second look costs as much as the first.
        expected = self.tally(plane, free) * (high - low + 1) / 2**64
        room = int(expected + 8 * math.sqrt(expected)) + 64
        words = runs.starts // SLOTS, -(-runs.stops // SLOTS), runs.elements
        window = np.uint64(low), np.uint64(high)
        while True:
            keys, slots = np.empty(room, np.uint64), np.empty(room, np.uint64)
            winners, undecided = loops.split(plane, free, won, words, np.uint64(lottery_state), window, (keys, slots))
            if undecided <= room:
                return int(winners), keys[:undecided].copy(), slots[:undecided].copy()
            room = int(undecided)

    def award(self, won: Words, slots: Words) -> None:
        loops.award(won, slots)

    def magnitude_histogram(self, candidates: Candidates, shift: int, prefix: int, counts: NDArray[np.int64]) -> None:
        integer, _ = _CODES[candidates.wide]
        bins = len(counts) - 1
        digit = integer(shift), integer(prefix * bins), integer(bins)
        loops.magnitude_histogram(candidates.plane, candidates.free, *_values(candidates), digit, counts)

    def magnitude_cut(self, candidates: Candidates, low: int, high: int, won: Words, level: Words) -> None:
        integer, _ = _CODES[candidates.wide]
        limits = integer(low), integer(high)
        loops.magnitude_cut(candidates.plane, candidates.free, *_values(candidates), limits, won, level)

    def magnitude_list(self, candidates: Candidates, element: int, lottery_state: int) -> Listed:
        size = loops.tally(candidates.plane, candidates.free)
        listed = Listed(np.empty(size, np.int64), np.empty(size, np.uint64), np.empty(size, np.uint64))
        into = listed.codes, listed.numbers, listed.slots
        first, state = np.uint64(element), np.uint64(lottery_state)
        loops.magnitude_list(candidates.plane & candidates.free, *_values(candidates), first, state, into)
        return listed

    def apply(self, chunk: Chunk, formula: Formula, out: Tensor) -> Counts:
        out.copy_(formula([values - chunk.base for values in chunk.tasks]))
        return None

    def gather(self, chunk: Chunk, rows: Sequence[int], planes: Planes, out: Tensor) -> Counts:
        marks = np.array(rows, np.int64), _words(planes), chunk.slot // SLOTS
        value_loops.gather(chunk.base.numpy(), _addresses(chunk.tasks), *marks, out.numpy())
        owned = [planes.part(row, *chunk.slots) if row >= 0 else None for row in rows]
        counts = np.array([0 if plane is None else self.tally(plane, plane) for plane in owned], np.int64)
        planes.release(chunk.slots, *rows)
        return counts

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        counts = np.zeros(len(chunk.tasks), np.int64)
        value_loops.largest(chunk.base.numpy(), _addresses(chunk.tasks), out.numpy(), counts)
        return counts

    def single(self, chunk: Chunk, task: int, out: Tensor) -> Counts:
        value_loops.subtract(chunk.tasks[task].numpy(), chunk.base.numpy(), out.numpy())
        counts = np.zeros(len(chunk.tasks), np.int64)
        counts[task] = out.numel()
        return counts

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        drawn = np.zeros(len(tasks), np.int64)
        numbers = np.array(tops, np.uint64), np.uint64(lottery_state), np.uint64(chunk.element)
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        value_loops.draw(chunk.base.numpy(), addresses, *numbers, out.numpy(), drawn)
        counts = np.zeros(len(chunk.tasks), np.int64)
        counts[list(tasks)] = drawn
        return counts

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        value_loops.weighted_sum(chunk.base.numpy(), addresses, np.array(factors, np.float64), out.numpy())

    def elect(
        self,
        chunk: Chunk,
        tasks: Sequence[int],
        factors: Sequence[float],
        shares: Sequence[float],
        rows: Sequence[int],
        planes: Planes,
        out: Tensor,
    ) -> None:
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        numbers = np.array(factors, np.float64), np.array(shares, np.float64)
        marks = np.array(rows, np.int64), _words(planes), chunk.slot // SLOTS
        value_loops.elect(chunk.base.numpy(), addresses, *numbers, *marks, out.numpy())
        planes.release(chunk.slots, *rows)

    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool:
        return bool(value_loops.step(base.numpy(), tau.numpy(), _NUMPY[base.dtype](scale), out.numpy()))


def _values(candidates: Candidates) -> tuple[Any, Any, Any]:
    """The values of base and task, and a 1 of the type in which their difference's magnitude counts."""
    return candidates.base.numpy(), candidates.values.numpy(), _CODES[candidates.wide][1]
