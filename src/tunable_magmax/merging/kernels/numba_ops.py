"""The operations on compiled loops of the CPU. Planes are bits in 64-bit words, in memory or in a mapped file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.kernels import (
    SLOTS,
    Chunk,
    Counts,
    Cut,
    Formula,
    Kernels,
    Keys,
    MappedRows,
    Planes,
    Runs,
    loops,
)

Words = NDArray[np.uint64]
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


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


class NumbaKernels(Kernels):
    """`Kernels` for the CPU."""

    chunk = 1 << 19
    span = 1 << 22
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
        loops.survey(chunk.base.numpy(), _addresses(chunk.tasks), *marks, changed, suspect)
        return changed, suspect

    def square(self, vector: Tensor) -> float:
        return float(loops.sum_of_squares(vector.numpy()))

    def squared_distance(self, values: Tensor, base: Tensor) -> float:
        return float(loops.squared_distance(values.numpy(), base.numpy()))

    def fill(self, plane: Words, elements: int) -> None:
        plane[: elements // SLOTS] = np.uint64(0xFFFFFFFFFFFFFFFF)
        if elements % SLOTS:
            plane[elements // SLOTS] = np.uint64((1 << elements % SLOTS) - 1)

    def count_common(self, plane: Words, other: Words) -> int:
        return int(loops.count_common(plane, other))

    def intersect(self, plane: Words, other: Words, out: Words) -> None:
        np.bitwise_and(plane, other, out=out)

    def subtract(self, plane: Words, other: Words) -> None:
        np.bitwise_and(plane, ~other, out=plane)

    def unite(self, plane: Words, other: Words) -> None:
        plane |= other

    def scan_keys(
        self, plane: Words, free: Words, won: Words, runs: Runs, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys, Words]:
        room = _room(self.count_common(plane, free), low, high)
        words = runs.starts // SLOTS, -(-runs.stops // SLOTS), runs.elements
        window = np.uint64(low), np.uint64(high)
        while True:
            found = np.empty(room, np.uint64), np.empty(room, np.uint64)
            below, undecided = loops.scan_keys(plane, free, won, words, np.uint64(lottery_state), window, found)
            if undecided <= room:
                keys, slots = (each[:undecided].copy() for each in found)
                return int(below), keys, slots
            room = int(undecided)

    def set_slots(self, plane: Words, slots: Words) -> None:
        np.bitwise_or.at(plane, slots >> np.uint64(6), np.uint64(1) << (slots & np.uint64(63)))

    def count_magnitudes(
        self, chunk: Chunk, tasks: Sequence[int], prefixes: Sequence[int], digit: tuple[int, int], wide: bool
    ) -> NDArray[np.int64]:
        shift, bits = digit
        counts = np.zeros((len(tasks), 1 << bits), np.int64)
        integer, unit = (np.int64, np.float64(1)) if wide else (np.int32, np.float32(1))
        firsts = np.array([prefix << bits for prefix in prefixes], integer)
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        loops.count_magnitudes(chunk.base.numpy(), addresses, unit, integer(shift), firsts, counts)
        return counts

    def scan_equal(
        self, chunk: Chunk, task: int, magnitude: float, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys]:
        narrow = _NUMPY[chunk.base.dtype](magnitude)
        if narrow != np.float64(magnitude):  # a float64, which no difference of float32 is
            return 0, np.empty(0, np.uint64)
        values = chunk.base.numpy(), chunk.tasks[task].numpy(), narrow
        numbers = np.uint64(lottery_state), np.uint64(chunk.element), (np.uint64(low), np.uint64(high))
        room = 64
        while True:
            keys = np.empty(room, np.uint64)
            below, undecided = loops.scan_equal(*values, *numbers, keys)
            if undecided <= room:
                return int(below), keys[:undecided].copy()
            room = int(undecided)

    def apply(self, chunk: Chunk, formula: Formula, out: Tensor) -> Counts:
        out.copy_(formula([values - chunk.base for values in chunk.tasks]))
        return None

    def gather(self, chunk: Chunk, rows: Sequence[int], planes: Planes, out: Tensor) -> Counts:
        marks = np.array(rows, np.int64), _words(planes), chunk.slot // SLOTS
        loops.gather(chunk.base.numpy(), _addresses(chunk.tasks), *marks, out.numpy())
        owned = [planes.part(row, *chunk.slots) if row >= 0 else None for row in rows]
        counts = np.array([0 if plane is None else self.count_common(plane, plane) for plane in owned], np.int64)
        planes.release(chunk.slots, *rows)
        return counts

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        counts = np.zeros(len(chunk.tasks), np.int64)
        loops.largest(chunk.base.numpy(), _addresses(chunk.tasks), out.numpy(), counts)
        return counts

    def single(self, chunk: Chunk, task: int, out: Tensor) -> Counts:
        with np.errstate(over="ignore", invalid="ignore"):  # the survey names what is not finite
            np.subtract(chunk.tasks[task].numpy(), chunk.base.numpy(), out=out.numpy())
        counts = np.zeros(len(chunk.tasks), np.int64)
        counts[task] = out.numel()
        return counts

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        drawn = np.zeros(len(tasks), np.int64)
        numbers = np.array(tops, np.uint64), np.uint64(lottery_state), np.uint64(chunk.element)
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        loops.draw(chunk.base.numpy(), addresses, *numbers, out.numpy(), drawn)
        counts = np.zeros(len(chunk.tasks), np.int64)
        counts[list(tasks)] = drawn
        return counts

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        loops.weighted_sum(chunk.base.numpy(), addresses, np.array(factors, np.float64), out.numpy())

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
        addresses = _addresses([chunk.tasks[t] for t in tasks])
        weights = np.array(factors, np.float64), np.array(shares, np.float64)
        kept = np.array([cut.magnitude for cut in cuts], np.float64), np.array([cut.key for cut in cuts], np.uint64)
        drawn = np.array(lottery_states, np.uint64), np.uint64(chunk.element)
        loops.elect(chunk.base.numpy(), addresses, weights, kept, drawn, out.numpy())

    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool:
        return bool(loops.step(base.numpy(), tau.numpy(), _NUMPY[base.dtype](scale), out.numpy()))


def _room(candidates: int, low: int, high: int) -> int:
    """Returns room for the keys that chance can bring into a window: a second scan costs as much as the first."""
    expected = candidates * (high - low + 1) / 2**64
    return int(expected + 8 * math.sqrt(expected)) + 64
