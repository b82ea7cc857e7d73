"""A floor for auctions on planes of this process.

What needs only planes goes span by span, what needs values as well goes piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.kernels import SLOTS, Kernels, Listed, Plane, Planes, Runs
from tunable_magmax.merging.ownership import Each, Piece, Stretch, pieces

SPAN = 1 << 22
"""Slots that are worked on at a time: half a megabyte of each plane."""

BATCH = 8
"""Histograms of magnitudes that are held at a time: half a megabyte each."""

BATCH_BYTES = 2 * BATCH << 19
"""What a selection by magnitude needs for them."""

LISTED_BYTES = 56
"""What an element takes whose magnitude is listed: code, lottery number and place, and copies while they are sorted."""

LEAST_ROOM = BATCH_BYTES // LISTED_BYTES
"""Elements that can always be listed: the memory is that of the histograms, which are done with by then."""


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int
    runs: Runs


class LocalFloor:
    """A `Floor` on planes of this process. `pair(task, piece)` reads the base's and a task's values."""

    def __init__(
        self,
        kernels: Kernels,
        planes: Planes,
        stretches: Sequence[Stretch],
        each: Each[Any],
        pair: Callable[[int, Piece], tuple[Tensor, Tensor]],
        chunk: int,
        wide: bool,
        room: int,
    ) -> None:
        self.kernels, self.planes, self.each, self.pair = kernels, planes, each, pair
        self.wide, self.room = wide, room
        self._spans = _spans(stretches)
        self._pieces = pieces(stretches, chunk)
        self._batches = _batches(self._pieces)
        self._looks: list[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]] = []
        self._listed: list[Listed] = []

    def open(self, free: int) -> None:
        for piece in self._pieces:
            start, stop = piece.slots
            self.kernels.fill(self.planes.part(free, start, -(-stop // SLOTS) * SLOTS), stop - start)
            self.planes.release(free, start, stop)

    def tally(self, row: int, other: int) -> int:
        return sum(self._over(self.kernels.tally, row, other))

    def claim(self, row: int, free: int, won: int) -> None:
        self._over(self.kernels.claim, row, free, won)

    def retire(self, free: int, won: int) -> None:
        self._over(self.kernels.retire, free, won)

    def unite(self, row: int, more: int) -> None:
        self._over(self.kernels.unite, row, more)

    def histogram(self, task: int, row: int, free: int, shift: int, bits: int, prefix: int) -> NDArray[np.int64]:
        def count(piece: Piece, counts: NDArray[np.int64]) -> None:
            base, values = self.pair(task, piece)
            plane, unowned = (self.planes.part(r, *piece.slots) for r in (row, free))
            self.kernels.magnitude_histogram(plane, unowned, base, values, self.wide, shift, prefix, counts)
            self._release(piece.slots, row, free)

        return self._counted(count, bits)

    def cut(self, task: int, row: int, free: int, low: int, high: int, won: int, level: int) -> None:
        def work(piece: Piece) -> None:
            self._cut(piece, self.pair(task, piece), (row, free, won, level), low, high)
            self._release(piece.slots, row, free, won, level)

        self.each(work, self._pieces)

    def narrow(
        self, task: int, row: int, free: int, low: int, high: int, won: int, level: int, shift: int, bits: int
    ) -> NDArray[np.int64]:
        def work(piece: Piece, counts: NDArray[np.int64]) -> None:
            base, values = pair = self.pair(task, piece)
            *_, undecided = self._cut(piece, pair, (row, free, won, level), low, high)
            prefix = low >> (shift + bits)
            self.kernels.magnitude_histogram(undecided, undecided, base, values, self.wide, shift, prefix, counts)
            self._release(piece.slots, row, free, won, level)

        return self._counted(work, bits)

    def sift(
        self, task: int, row: int, free: int, low: int, high: int, won: int, level: int, drum: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        def work(piece: Piece) -> Listed:
            base, values = pair = self.pair(task, piece)
            *_, undecided = self._cut(piece, pair, (row, free, won, level), low, high)
            element = piece.stretch.element + piece.start
            listed = self.kernels.magnitude_list(undecided, base, values, self.wide, element, drum)
            self._release(piece.slots, row, free, won, level)
            return listed

        self._listed = self.each(work, self._pieces)
        codes = [np.empty(0, np.int64), *(listed.codes for listed in self._listed)]
        numbers = [np.empty(0, np.uint64), *(listed.numbers for listed in self._listed)]
        return np.concatenate(codes), np.concatenate(numbers)

    def award_listed(self, won: int, code: int, highest: int) -> None:
        for piece, listed in zip(self._pieces, self._listed, strict=True):
            equal = (listed.codes == code) & (listed.numbers <= np.uint64(highest))
            self._award(won, piece.slots, listed.places[(listed.codes > code) | equal])
        self._listed = []

    def look(self, row: int, free: int, won: int, drum: int, low: int, high: int) -> tuple[int, NDArray[np.uint64]]:
        def work(span: _Span) -> Any:
            plane, unowned, taken = (self.planes.part(r, span.start, span.stop) for r in (row, free, won))
            found = self.kernels.split(plane, unowned, taken, span.runs, drum, low, high)
            self._release((span.start, span.stop), row, free, won)
            return found

        self._looks = self.each(work, self._spans)
        numbers = [keys for _, keys, _ in self._looks]
        return sum(winners for winners, _, _ in self._looks), np.concatenate([np.empty(0, np.uint64), *numbers])

    def award(self, won: int, highest: int) -> None:
        for span, (_, keys, places) in zip(self._spans, self._looks, strict=True):
            self._award(won, (span.start, span.stop), places[keys <= np.uint64(highest)])

    def _cut(
        self, piece: Piece, pair: tuple[Tensor, Tensor], rows: tuple[int, int, int, int], low: int, high: int
    ) -> list[Plane]:
        plane, unowned, taken, undecided = parts = [self.planes.part(row, *piece.slots) for row in rows]
        self.kernels.magnitude_cut(plane, unowned, *pair, self.wide, low, high, taken, undecided)
        return parts

    def _counted(self, count: Callable[[Piece, NDArray[np.int64]], None], bits: int) -> NDArray[np.int64]:
        """The sum of what is counted piece by piece, in few histograms: making and adding them takes time, too."""

        def work(run: Sequence[Piece]) -> NDArray[np.int64]:
            counts = np.zeros((1 << bits) + 1, np.int64)
            for piece in run:
                count(piece, counts)
            return counts

        total: NDArray[np.int64] = sum(self.each(work, self._batches), np.zeros((1 << bits) + 1, np.int64))
        return total[:-1]

    def _award(self, won: int, slots: tuple[int, int], places: NDArray[np.uint64]) -> None:
        if len(places):
            self.kernels.award(self.planes.part(won, *slots), places)
            self._release(slots, won)

    def _over(self, operation: Callable[..., Any], *rows: int) -> list[Any]:
        def work(span: _Span) -> Any:
            result = operation(*(self.planes.part(row, span.start, span.stop) for row in rows))
            self._release((span.start, span.stop), *rows)
            return result

        return self.each(work, self._spans)

    def _release(self, slots: tuple[int, int], *rows: int) -> None:
        for row in rows:
            self.planes.release(row, *slots)


def _spans(stretches: Sequence[Stretch]) -> list[_Span]:
    spans: list[_Span] = []
    runs: list[tuple[int, int, int]] = []

    def close() -> None:
        if runs:
            start, stop = runs[0][0], runs[-1][1]
            columns = np.array([(a - start, b - start) for a, b, _ in runs], np.int64)
            elements = np.array([element for _, _, element in runs], np.uint64)
            spans.append(_Span(start, stop, Runs(columns[:, 0].copy(), columns[:, 1].copy(), elements)))
            runs.clear()

    for stretch in stretches:
        padded = -(-stretch.size // SLOTS) * SLOTS
        for start in range(0, padded, SPAN):
            stop = min(start + SPAN, padded)
            # A span has no gaps: the slots of tensors that are not merged hold bits that mean nothing.
            if runs and (stretch.slot + stop - runs[0][0] > SPAN or runs[-1][1] != stretch.slot + start):
                close()
            runs.append((stretch.slot + start, stretch.slot + stop, stretch.element + start))
    close()
    return spans


def _batches(todo: Sequence[Piece]) -> list[Sequence[Piece]]:
    """Pieces in `BATCH` runs of about as many elements each, and fewer if there are few."""
    ends = np.cumsum([piece.stop - piece.start for piece in todo])
    bounds = [int(np.searchsorted(ends, ends[-1] * k / BATCH)) for k in range(BATCH)] if len(todo) else []
    return [todo[a:b] for a, b in pairwise([*bounds, len(todo)]) if a < b]
