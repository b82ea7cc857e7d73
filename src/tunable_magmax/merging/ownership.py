"""Rules 4 to 6: who owns which element. The auction runs on bit planes alone; no lists of elements, no sorting.

The planes come from the survey: bit p of task t's plane says that |tau_t[p]| is at least that of all compared earlier
tasks. Going t = T .. 1, a task's candidates are its plane and the free plane. "The n smallest lottery numbers" among c
candidates is a threshold near n/c: one look decides all numbers outside a narrow window and lists the few inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.kernels import SLOTS, Kernels, Planes, Runs

SPAN = 1 << 22
"""Slots that are worked on at a time: half a megabyte of each plane."""

BATCH = 8
"""Histograms of magnitudes that are held at a time: half a megabyte each."""

BATCH_BYTES = 2 * BATCH << 19
"""What a selection by magnitude needs for them."""

# How the bit pattern of a magnitude is cut into digits (shift, bits): it has 31 bits in float32 and 63 in float64.
NARROW_DIGITS = ((15, 16), (0, 15))
WIDE_DIGITS = ((47, 16), (31, 16), (15, 16), (0, 15))

Item = TypeVar("Item")
Each = Callable[[Callable[[Item], Any], Iterable[Item]], list[Any]]
"""Applies a function to items, in threads or not, and returns the results in order."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A merged tensor's place: its first slot in the planes, its first element index, and its size."""

    tensor: int
    slot: int
    element: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a stretch, counted from the tensor's start."""

    stretch: Stretch
    start: int
    stop: int

    @property
    def slots(self) -> tuple[int, int]:
        return self.stretch.slot + self.start, self.stretch.slot + self.stop


def pieces(stretches: Iterable[Stretch], chunk: int) -> list[Piece]:
    """Cut tensors into chunks, in order."""
    return [
        Piece(stretch, start, min(start + chunk, stretch.size))
        for stretch in stretches
        for start in range(0, stretch.size, chunk)
    ]


@dataclass(frozen=True, slots=True)
class SpareRows:
    """Rows of the planes that selection works in: what is free, what was just won, and two for equal magnitudes.

    Selection by lottery alone does not need the latter two. With `extra` rows, one for each task, the tasks' own rows
    stay as they are, for another auction.
    """

    free: int
    won: int
    level: int = -1
    drawn: int = -1
    extra: tuple[int, ...] = ()

    @classmethod
    def after(cls, rows: int, by_magnitude: bool, extra: int = 0) -> SpareRows:
        """Spare rows behind the given number of rows."""
        first = rows + (4 if by_magnitude else 2)
        further = tuple(range(first, first + extra))
        return cls(rows, rows + 1, *((rows + 2, rows + 3) if by_magnitude else (-1, -1)), further)

    @property
    def stop(self) -> int:
        """The number of rows in all."""
        return max(self.won, self.drawn, *self.extra) + 1


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int
    runs: Runs


class Floor(Protocol):
    """Where an auction takes place: the planes of a group of tensors, and the few things done to them.

    Everything that a floor tells can be added up, so that the planes may lie on several machines.
    """

    wide: bool
    """Whether one of the tensors is float64, so that magnitudes are compared as float64."""

    def open(self, free: int) -> None:
        """Every element is in the row `free`."""

    def tally(self, row: int, other: int) -> int:
        """How many elements two rows share."""

    def claim(self, row: int, free: int, won: int) -> None:
        """won = row and free."""

    def retire(self, free: int, won: int) -> None:
        """free = free without won."""

    def unite(self, row: int, more: int) -> None:
        """row = row or more."""

    def histogram(self, task: int, row: int, free: int, shift: int, bits: int, prefix: int) -> NDArray[np.int64]:
        """Free candidates by a digit of their magnitude in the task's vector, where the higher digits are `prefix`."""

    def cut(self, task: int, row: int, free: int, threshold: int, won: int, level: int) -> None:
        """Free candidates with a magnitude above the threshold go to `won`, those that equal it to `level`."""

    def look(self, row: int, free: int, won: int, drum: int, low: int, high: int) -> tuple[int, NDArray[np.uint64]]:
        """Free candidates with lottery numbers below `low` win; how many, and the numbers from `low` to `high`."""

    def award(self, won: int, highest: int) -> None:
        """Those of the last look whose numbers are at most `highest` win, too."""


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
    ) -> None:
        self.kernels, self.planes, self.each, self.pair, self.wide = kernels, planes, each, pair, wide
        self._spans = _spans(stretches)
        self._pieces = pieces(stretches, chunk)
        self._looks: list[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]] = []

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
        def count(piece: Piece) -> Any:
            base, values = self.pair(task, piece)
            plane, unowned = (self.planes.part(r, *piece.slots) for r in (row, free))
            found = self.kernels.magnitude_histogram(plane, unowned, base, values, self.wide, shift, bits, prefix)
            self._release(piece.slots, row, free)
            return found

        counts = np.zeros(1 << bits, np.int64)
        for start in range(0, len(self._pieces), BATCH):
            counts += np.sum(self.each(count, self._pieces[start : start + BATCH]), axis=0)
        return counts

    def cut(self, task: int, row: int, free: int, threshold: int, won: int, level: int) -> None:
        def work(piece: Piece) -> None:
            base, values = self.pair(task, piece)
            rows = [self.planes.part(r, *piece.slots) for r in (row, free, won, level)]
            self.kernels.magnitude_cut(rows[0], rows[1], base, values, self.wide, threshold, rows[2], rows[3])
            self._release(piece.slots, row, free, won, level)

        self.each(work, self._pieces)

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
            chosen = places[keys <= np.uint64(highest)]
            if len(chosen):
                self.kernels.award(self.planes.part(won, span.start, span.stop), chosen)
                self._release((span.start, span.stop), won)

    def _over(self, operation: Callable[..., Any], *rows: int) -> list[Any]:
        def work(span: _Span) -> Any:
            result = operation(*(self.planes.part(row, span.start, span.stop) for row in rows))
            self._release((span.start, span.stop), *rows)
            return result

        return self.each(work, self._spans)

    def _release(self, slots: tuple[int, int], *rows: int) -> None:
        for row in rows:
            self.planes.release(row, *slots)


class Selection:
    """Picks exactly n of the candidates in a group of tensors: all, by lottery, or by magnitude."""

    def __init__(self, floor: Floor, spare: SpareRows) -> None:
        self._floor = floor
        self.free, self.won, self.level, self.drawn = spare.free, spare.won, spare.level, spare.drawn
        self._extra = list(spare.extra)

    def open(self) -> None:
        """Make every element of the group free."""
        self._floor.open(self.free)

    def count(self, row: int) -> int:
        """How many candidates a row has among the free elements."""
        return self._floor.tally(row, self.free)

    def holds(self, row: int) -> int:
        """How many elements a row holds."""
        return self._floor.tally(row, row)

    def take(self, row: int, n: int, candidates: int, drum: int) -> None:
        """Put n of the row's free candidates into the `won` row: those with the smallest lottery numbers."""
        if n >= candidates:
            self._floor.claim(row, self.free, self.won)
        else:
            self._draw(row, self.won, n, candidates, drum)

    def take_largest(self, task: int, row: int, n: int, candidates: int, drum: int) -> None:
        """The same, by largest magnitude of the task's vector; equal magnitudes by lottery."""
        if n >= candidates:
            self._floor.claim(row, self.free, self.won)
            return
        threshold, wanted = self._threshold(task, row, n)
        self._floor.cut(task, row, self.free, threshold, self.won, self.level)
        self._draw(self.level, self.drawn, wanted, self.count(self.level), drum)
        self._floor.unite(self.won, self.drawn)

    def settle(self, row: int) -> int:
        """The winners are no longer free and become the row's owned elements; returns the row that now holds them."""
        self._floor.retire(self.free, self.won)
        owned, self.won = self.won, self._extra.pop() if self._extra else row
        return owned

    def keep(self, row: int) -> int:
        """The winners become what the row holds, and stay free for others; returns the row that now holds them."""
        self.won, kept = row, self.won
        return kept

    def add(self, row: int) -> None:
        """The winners are no longer free and join what the row holds."""
        self._floor.retire(self.free, self.won)
        self._floor.unite(row, self.won)

    def _threshold(self, task: int, row: int, n: int) -> tuple[int, int]:
        """The magnitude of the n-th largest candidate, as an integer code, and how many equal to it are wanted."""
        prefix, wanted = 0, n
        for shift, bits in WIDE_DIGITS if self._floor.wide else NARROW_DIGITS:
            counts = self._floor.histogram(task, row, self.free, shift, bits, prefix)
            from_top = np.cumsum(counts[::-1])
            place = int(np.searchsorted(from_top, wanted))
            wanted -= int(from_top[place - 1]) if place else 0
            prefix = (prefix << bits) | (len(counts) - 1 - place)
        return prefix, wanted

    def _draw(self, row: int, into: int, n: int, candidates: int, drum: int) -> None:
        """Of the row's free candidates, put the n with the smallest lottery numbers into another row."""
        share = n / max(candidates, 1)
        # Eight deviations each side of the expected threshold: a miss has odds of 1e-15 and costs another look.
        half = (8 * math.sqrt(candidates * share * (1 - share)) + 16) / max(candidates, 1)
        while True:
            low = max(0, int((share - half) * 2.0**64))
            high = min(lottery.MASK, int((share + half) * 2.0**64))
            winners, numbers = self._floor.look(row, self.free, into, drum, low, high)
            wanted = n - winners
            if 0 <= wanted <= len(numbers):
                break
            half = max(16 * half, 2.0**-40)
        if wanted:
            # No two elements have the same number in one drum (the mixing is a bijection), so this takes exactly n.
            self._floor.award(into, int(np.partition(numbers, wanted - 1)[wanted - 1]))


@dataclass(frozen=True, slots=True)
class Ownership:
    """The auction's result for one group: the row that holds each task's elements (-1 for none), and the counts."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    leftovers: int


def auction(selection: Selection, rows: Sequence[int], budget: Sequence[int], seed: int, keep: str) -> Ownership:
    """Rules 4 to 6 for one group of tensors: rows[t] is the plane of task t (from 0)."""
    tasks = len(budget)
    held = [row if n else -1 for row, n in zip(rows, budget, strict=True)]
    counts = [0] * tasks
    selection.open()
    for t in reversed(range(tasks)):
        if not budget[t]:
            continue
        candidates = selection.count(held[t])
        drum = lottery.drum(seed, lottery.KEEP, t + 1)
        if keep == "magnitude":
            selection.take_largest(t, held[t], budget[t], candidates, drum)
        else:
            selection.take(held[t], budget[t], candidates, drum)
        counts[t] = min(candidates, budget[t])
        held[t] = selection.settle(held[t])
    leftovers = unowned = selection.count(selection.free)
    for t in range(tasks):
        more = min(budget[t] - counts[t], unowned)
        if more:
            selection.take(selection.free, more, unowned, lottery.drum(seed, lottery.LEFTOVERS, t + 1))
            selection.add(held[t])
            counts[t] += more
            unowned -= more
    found = [selection.holds(row) if n else 0 for row, n in zip(held, budget, strict=True)]
    if found != list(budget):
        raise ExactnessError(f"the tasks own {found} elements, their budget is {list(budget)}; please report this")
    return Ownership(tuple(held), tuple(counts), leftovers)


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
