"""The operations on compiled loops of the CPU, and the planes there: bits in 64-bit words, in memory or in a file."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.kernels import (
    SLOTS,
    Chunk,
    Counts,
    Each,
    Kernels,
    Keys,
    Planes,
    TensorPlace,
    Vote,
    loops,
    padded,
)
from tunable_magmax.merging.owners import added

if TYPE_CHECKING:
    from tunable_magmax.merging.cuts import Listed, Window

WINDOW = 1 << 16
"""Pages of a mapped file come and go in aligned windows of this many bytes."""

Words = NDArray[np.uint64]
Span = tuple[int, int]
"""The first slot of a slice of planes, and the one after its last."""
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class MemoryPlanes(Planes):
    """Planes in memory."""

    def __init__(self, rows: int, slots: int) -> None:
        self.words: Words = np.zeros((rows, slots // SLOTS), np.uint64)

    def part(self, row: int, start: int, stop: int) -> Words:
        """Returns a view of slots start:stop of a row (start is a multiple of `SLOTS`)."""
        return self.words[row, start // SLOTS : -(-stop // SLOTS)]

    def release(self, slots: tuple[int, int], *rows: int) -> None:
        """Lets go of the memory behind these slots of some rows (-1: no row), if they are kept on disk."""


class MappedPlanes(MemoryPlanes):
    """Planes in a file of their own, whose pages are let go as soon as a slice has been worked on."""

    def __init__(self, rows: int, slots: int, path: Path) -> None:
        self._path = path
        self._row_bytes = -(-slots // (8 * WINDOW)) * WINDOW
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
        self.words = np.frombuffer(self._map, np.uint64).reshape(rows, -1)

    def release(self, slots: tuple[int, int], *rows: int) -> None:
        # Whole windows: a fault brings in all pages of one. Dropping what a neighbour uses costs a fault, never data.
        first, last = slots[0] // (8 * WINDOW) * WINDOW, -(-slots[1] // (8 * WINDOW)) * WINDOW
        for row in rows:
            if row >= 0:
                self._map.madvise(mmap.MADV_DONTNEED, row * self._row_bytes + first, last - first)

    def close(self) -> None:
        self.words = np.zeros((0, 0), np.uint64)
        with suppress(BufferError):  # the traceback of an error may still hold a view; the map goes with it
            self._map.close()
        self._path.unlink(missing_ok=True)


class PlaneGroup:
    """The planes of tensors that share a budget, or of a part of these, worked on in spans of slots.

    Rows go by their numbers. Operations are those of `Step`. Bits of other tensors between these mean nothing.
    """

    def __init__(self, planes: MemoryPlanes, places: Sequence[TensorPlace], most: int, each: Each) -> None:
        self._planes, self._each, self._places = planes, each, places
        stop = places[-1].slot + padded(places[-1].size) if places else 0
        starts = range(places[0].slot if places else 0, stop, most)
        self._spans = [(start, min(start + most, stop)) for start in starts]
        self._first_words = np.array([place.slot // SLOTS for place in places], np.int64)
        self._first_elements = np.array([place.element for place in places], np.uint64)
        self._scanned: list[tuple[int, Keys, Words]] = []

    def fill(self, row: int) -> None:
        """Puts every element into a row, and no other bit."""
        for place in self._places:
            slots = place.slot, place.slot + padded(place.size)
            words = self._planes.part(row, *slots)
            words[: place.size // SLOTS] = np.uint64(0xFFFFFFFFFFFFFFFF)
            if place.size % SLOTS:
                words[place.size // SLOTS] = np.uint64((1 << place.size % SLOTS) - 1)
            self._planes.release(slots, row)

    def count_common(self, row: int, other: int) -> int:
        return sum(map(int, self._over(loops.count_common, row, other)))

    def intersect(self, row: int, other: int, out: int) -> None:
        self._over(np.bitwise_and, row, other, out)

    def subtract(self, row: int, other: int) -> None:
        self._over(lambda one, two: np.bitwise_and(one, ~two, out=one), row, other)

    def unite(self, row: int, other: int) -> None:
        self._over(lambda one, two: np.bitwise_or(one, two, out=one), row, other)

    def scan_keys(self, row: int, free: int, chosen: int, lottery_state: int, low: int, high: int) -> tuple[int, Keys]:
        """Chooses elements of both rows with keys below `low`; returns how many, and the keys from `low` to `high`."""
        numbers = np.uint64(lottery_state), (np.uint64(low), np.uint64(high))
        tensors = self._first_words, self._first_elements

        def scan(span: Span) -> tuple[int, Keys, Words]:
            plane, unowned, won = (self._planes.part(r, *span) for r in (row, free, chosen))
            room = _room(int(loops.count_common(plane, unowned)), low, high)
            while True:
                found = np.empty(room, np.uint64), np.empty(room, np.uint64)
                below, undecided = loops.scan_keys(plane, unowned, won, span[0] // SLOTS, tensors, *numbers, found)
                if undecided <= room:
                    break
                room = int(undecided)
            self._planes.release(span, row, free, chosen)
            keys, slots = (each[:undecided].copy() for each in found)
            return int(below), keys, slots

        self._scanned = self._each(scan, self._spans)
        return added((below, keys) for below, keys, _ in self._scanned)

    def choose_scanned(self, chosen: int, highest: int) -> None:
        """Adds to a row those of the last scan whose keys are at most `highest`."""
        for span, (_, keys, slots) in zip(self._spans, self._scanned, strict=True):
            won = slots[keys <= np.uint64(highest)]
            words = self._planes.part(chosen, *span)
            np.bitwise_or.at(words, won >> np.uint64(6), np.uint64(1) << (won & np.uint64(63)))
            self._planes.release(span, chosen)
        self._scanned = []

    def _over(self, operation: Callable[..., Any], *rows: int) -> list[Any]:
        def work(span: Span) -> Any:
            result = operation(*(self._planes.part(row, *span) for row in rows))
            self._planes.release(span, *rows)
            return result

        return self._each(work, self._spans)


def _room(candidates: int, low: int, high: int) -> int:
    """Returns room for the keys that chance can bring into a window: a second scan costs as much as the first."""
    expected = candidates * (high - low + 1) / 2**64
    return int(expected + 8 * math.sqrt(expected)) + 64


def _addresses(tasks: Sequence[Tensor]) -> Words:
    return np.array([values.data_ptr() for values in tasks], np.uint64)


class NumbaKernels(Kernels):
    """`Kernels` for the CPU."""

    chunk = 1 << 19
    span = 1 << 22
    """Slots of planes that are worked on at a time."""
    threads = True

    def plane_bytes(self, slots: int) -> int:
        return slots // 8

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        return MemoryPlanes(rows, slots) if spill is None else MappedPlanes(rows, slots, spill)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        # numpy asks for huge pages, torch does not: without them, touching fresh memory is a third of a merge's time.
        return torch.from_numpy(np.empty(elements * dtype.itemsize, np.uint8)).view(dtype)

    def survey(
        self, chunks: Sequence[Chunk], compared: Sequence[Sequence[bool]], rows: Sequence[int], planes: Planes | None
    ) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_], float]]:
        found = []
        held, marked = MemoryPlanes(0, 0) if planes is None else planes, np.array(rows, np.int64)
        assert isinstance(held, MemoryPlanes)
        for chunk, own in zip(chunks, compared, strict=True):
            changed, suspect = np.zeros((2, len(chunk.tasks)), np.bool_)
            where = np.array(own, np.bool_), marked, held.words, chunk.slot // SLOTS
            loops.survey(chunk.base.numpy(), _addresses(chunk.tasks), *where, changed, suspect)
            held.release(chunk.slots, *rows)
            square = loops.squared_distance(chunk.tasks[-1].numpy(), chunk.base.numpy())
            found.append((changed, suspect, float(square)))
        return found

    def plane_groups(self, planes: Planes, groups: Sequence[Sequence[TensorPlace]], each: Each) -> PlaneGroup:
        assert isinstance(planes, MemoryPlanes)
        [places] = groups
        return PlaneGroup(planes, places, self.span, each)

    def scan(self, chunk: Chunk, window: Window) -> tuple[int, Listed]:
        above, last = ((np.float64(cut.magnitude), np.uint64(cut.key)) for cut in (window.above, window.last))
        sample = np.uint32(window.attempt), np.uint32(window.most)
        lottery = np.uint64(window.lottery_state), np.uint64(chunk.element)
        values, room = (chunk.base.numpy(), chunk.tasks[window.task].numpy()), 64
        while True:
            listed = np.empty((2, room), np.uint64)
            before, found = loops.scan(*values, above, last, sample, lottery, listed)
            if found <= room:
                return int(before), listed[:, :found].copy()
            room = int(found)

    def gather(
        self, chunks: Sequence[Chunk], rows: Sequence[Sequence[int]], planes: Planes, outs: Sequence[Tensor]
    ) -> list[Counts]:
        assert isinstance(planes, MemoryPlanes)
        found: list[Counts] = []
        for chunk, own, out in zip(chunks, rows, outs, strict=True):
            marks = np.array(own, np.int64), planes.words, chunk.slot // SLOTS
            loops.gather(chunk.base.numpy(), _addresses(chunk.tasks), *marks, out.numpy())
            owned = [planes.part(row, *chunk.slots) if row >= 0 else planes.words[:0].ravel() for row in own]
            found.append(np.array([loops.count_common(plane, plane) for plane in owned], np.int64))
            planes.release(chunk.slots, *own)
        return found

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        counts = np.zeros(len(chunk.tasks), np.int64)
        loops.largest(chunk.base.numpy(), _addresses(chunk.tasks), out.numpy(), counts)
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

    def elect(self, chunk: Chunk, votes: Sequence[Vote], out: Tensor) -> None:
        addresses = _addresses([chunk.tasks[vote.task] for vote in votes])
        weights = np.array([(vote.factor, vote.share) for vote in votes], np.float64)
        leasts = np.array([vote.cut.magnitude for vote in votes], np.float64)
        keys = np.array([(vote.lottery_state, vote.cut.key) for vote in votes], np.uint64)
        loops.elect(chunk.base.numpy(), addresses, weights, leasts, keys, np.uint64(chunk.element), out.numpy())

    def squares(self, vectors: Sequence[Tensor]) -> list[float]:
        return [float(loops.sum_of_squares(vector.numpy())) for vector in vectors]

    def step(self, bases: Sequence[Tensor], taus: Sequence[Tensor], scale: float, outs: Sequence[Tensor]) -> list[bool]:
        return [
            bool(loops.step(base.numpy(), tau.numpy(), _NUMPY[base.dtype](scale), out.numpy()))
            for base, tau, out in zip(bases, taus, outs, strict=True)
        ]
