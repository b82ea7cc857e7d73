"""What an auction does to the planes of a group of tensors.

What needs only planes is done slice by slice, what needs values as well range by range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.merging.kernels import (
    SLOTS,
    Candidates,
    Kernels,
    Listed,
    Planes,
    Runs,
    TensorPlace,
    TensorRange,
    split_ranges,
)

Item = TypeVar("Item")
Each = Callable[[Callable[[Item], Any], Iterable[Item]], list[Any]]
"""Applies a function to items, in threads or not, and returns the results in order."""

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
class Cut:
    """A division of the free candidates of a row by their magnitude in the task's vector.

    Those with a magnitude (as a code) above `high` go to the row `won`, those from `low` to `high` to the row `level`.
    """

    task: int
    row: int
    free: int
    low: int
    high: int
    won: int
    level: int


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int
    runs: Runs


class GroupPlanes:
    """The planes of a group of tensors that are auctioned together, and what an auction does to them.

    All results can be added up, so that the planes may lie on several machines. `pair(task, bounds)` reads the base's
    and a task's values; `wide` says that one of the tensors is float64, so that magnitudes are compared as float64;
    `room` is how many elements `sift` may list.
    """

    def __init__(
        self,
        kernels: Kernels,
        planes: Planes,
        places: Sequence[TensorPlace],
        each: Each[Any],
        pair: Callable[[int, TensorRange], tuple[Tensor, Tensor]],
        chunk: int,
        wide: bool,
        room: int,
    ) -> None:
        self.kernels, self.planes, self.each, self.pair = kernels, planes, each, pair
        self.wide, self.room = wide, room
        self._spans = _spans(places)
        self._ranges = split_ranges(places, chunk)
        self._batches = _batches(self._ranges)
        self._looks: list[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]] = []
        self._listed: list[Listed] = []

    def open(self, free: int) -> None:
        """Puts every element into the row `free`."""
        for bounds in self._ranges:
            start, stop = bounds.slots
            self.kernels.fill(self.planes.part(free, start, -(-stop // SLOTS) * SLOTS), stop - start)
            self.planes.release(bounds.slots, free)

    def tally(self, row: int, other: int) -> int:
        """Returns how many elements two rows share."""
        return sum(self._over(self.kernels.tally, row, other))

    def claim(self, row: int, free: int, won: int) -> None:
        """Sets won = row and free."""
        self._over(self.kernels.claim, row, free, won)

    def retire(self, free: int, won: int) -> None:
        """Sets free = free without won."""
        self._over(self.kernels.retire, free, won)

    def unite(self, row: int, more: int) -> None:
        """Sets row = row or more."""
        self._over(self.kernels.unite, row, more)

    def histogram(self, task: int, row: int, free: int, shift: int, bits: int, prefix: int) -> NDArray[np.int64]:
        """Counts free candidates by a digit of their magnitude in the task's vector; higher digits must be `prefix`."""

        def count(bounds: TensorRange, counts: NDArray[np.int64]) -> None:
            candidates = self._candidates(bounds, task, row, free)
            self.kernels.magnitude_histogram(candidates, shift, prefix, counts)
            self.planes.release(bounds.slots, row, free)

        return self._counted(count, bits)

    def cut(self, cut: Cut) -> None:
        """Divides the candidates."""

        def work(bounds: TensorRange) -> None:
            self._cut(bounds, cut)
            self.planes.release(bounds.slots, cut.row, cut.free, cut.won, cut.level)

        self.each(work, self._ranges)

    def narrow(self, cut: Cut, shift: int, bits: int) -> NDArray[np.int64]:
        """Cuts, and counts what went to `level` by the digit that follows those that `low` and `high` share."""

        def work(bounds: TensorRange, counts: NDArray[np.int64]) -> None:
            undecided = self._cut(bounds, cut)
            self.kernels.magnitude_histogram(undecided, shift, cut.low >> (shift + bits), counts)
            self.planes.release(bounds.slots, cut.row, cut.free, cut.won, cut.level)

        return self._counted(work, bits)

    def sift(self, cut: Cut, lottery_state: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Cuts, and returns the magnitudes (as codes) and lottery numbers of what went to `level`, in any order."""

        def work(bounds: TensorRange) -> Listed:
            undecided = self._cut(bounds, cut)
            listed = self.kernels.magnitude_list(undecided, bounds.place.element + bounds.start, lottery_state)
            self.planes.release(bounds.slots, cut.row, cut.free, cut.won, cut.level)
            return listed

        self._listed = self.each(work, self._ranges)
        codes = [np.empty(0, np.int64), *(listed.codes for listed in self._listed)]
        numbers = [np.empty(0, np.uint64), *(listed.numbers for listed in self._listed)]
        return np.concatenate(codes), np.concatenate(numbers)

    def award_listed(self, won: int, code: int, highest: int) -> None:
        """Adds those of the last sift with a greater code, and with this code those with numbers to `highest`."""
        for bounds, listed in zip(self._ranges, self._listed, strict=True):
            equal = (listed.codes == code) & (listed.numbers <= np.uint64(highest))
            self._award(won, bounds.slots, listed.slots[(listed.codes > code) | equal])
        self._listed = []

    def look(
        self, row: int, free: int, won: int, lottery_state: int, low: int, high: int
    ) -> tuple[int, NDArray[np.uint64]]:
        """Lets free candidates with numbers below `low` win; returns how many, and the numbers from `low` to `high`."""

        def work(span: _Span) -> Any:
            plane, unowned, taken = (self.planes.part(r, span.start, span.stop) for r in (row, free, won))
            found = self.kernels.split(plane, unowned, taken, span.runs, lottery_state, low, high)
            self.planes.release((span.start, span.stop), row, free, won)
            return found

        self._looks = self.each(work, self._spans)
        numbers = [keys for _, keys, _ in self._looks]
        return sum(winners for winners, _, _ in self._looks), np.concatenate([np.empty(0, np.uint64), *numbers])

    def award(self, won: int, highest: int) -> None:
        """Adds to `won` those of the last look whose numbers are at most `highest`."""
        for span, (_, keys, slots) in zip(self._spans, self._looks, strict=True):
            self._award(won, (span.start, span.stop), slots[keys <= np.uint64(highest)])

    def _candidates(self, bounds: TensorRange, task: int, row: int, free: int) -> Candidates:
        plane, unowned = (self.planes.part(r, *bounds.slots) for r in (row, free))
        return Candidates(plane, unowned, *self.pair(task, bounds), self.wide)

    def _cut(self, bounds: TensorRange, cut: Cut) -> Candidates:
        """Cuts one range; returns the candidates that went to `level`."""
        candidates = self._candidates(bounds, cut.task, cut.row, cut.free)
        won, level = (self.planes.part(row, *bounds.slots) for row in (cut.won, cut.level))
        self.kernels.magnitude_cut(candidates, cut.low, cut.high, won, level)
        return replace(candidates, plane=level, free=level)

    def _counted(self, count: Callable[[TensorRange, NDArray[np.int64]], None], bits: int) -> NDArray[np.int64]:
        """Sums what is counted range by range, in few histograms: making and adding them takes time, too."""

        def work(run: Sequence[TensorRange]) -> NDArray[np.int64]:
            counts = np.zeros((1 << bits) + 1, np.int64)
            for bounds in run:
                count(bounds, counts)
            return counts

        total: NDArray[np.int64] = sum(self.each(work, self._batches), np.zeros((1 << bits) + 1, np.int64))
        return total[:-1]

    def _award(self, won: int, within: tuple[int, int], slots: NDArray[np.uint64]) -> None:
        if len(slots):
            self.kernels.award(self.planes.part(won, *within), slots)
            self.planes.release(within, won)

    def _over(self, operation: Callable[..., Any], *rows: int) -> list[Any]:
        def work(span: _Span) -> Any:
            result = operation(*(self.planes.part(row, span.start, span.stop) for row in rows))
            self.planes.release((span.start, span.stop), *rows)
            return result

        return self.each(work, self._spans)


def _spans(places: Sequence[TensorPlace]) -> list[_Span]:
    spans: list[_Span] = []
    runs: list[tuple[int, int, int]] = []

    def close() -> None:
        if runs:
            start, stop = runs[0][0], runs[-1][1]
            columns = np.array([(a - start, b - start) for a, b, _ in runs], np.int64)
            elements = np.array([element for _, _, element in runs], np.uint64)
            spans.append(_Span(start, stop, Runs(columns[:, 0].copy(), columns[:, 1].copy(), elements)))
            runs.clear()

    for place in places:
        padded = -(-place.size // SLOTS) * SLOTS
        for start in range(0, padded, SPAN):
            stop = min(start + SPAN, padded)
            # A span has no gaps: the slots of tensors that are not merged hold bits that mean nothing.
            if runs and (place.slot + stop - runs[0][0] > SPAN or runs[-1][1] != place.slot + start):
                close()
            runs.append((place.slot + start, place.slot + stop, place.element + start))
    close()
    return spans


def _batches(todo: Sequence[TensorRange]) -> list[Sequence[TensorRange]]:
    """Divides ranges into `BATCH` runs of about equally many elements, or fewer runs if there are few."""
    ends = np.cumsum([bounds.stop - bounds.start for bounds in todo])
    bounds = [int(np.searchsorted(ends, ends[-1] * k / BATCH)) for k in range(BATCH)] if len(todo) else []
    return [todo[a:b] for a, b in pairwise([*bounds, len(todo)]) if a < b]
