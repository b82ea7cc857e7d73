"""Who owns which element (docs/method.md, section 3): an assignment under quotas, on bit planes.

The planes come from the survey: bit p of task t's plane says that |tau_t[p]| is at least that of all compared earlier
tasks. Going t = T .. 1, a task's candidates are its plane and the free plane. "The n smallest keys" among c candidates
is a threshold near n/c: one scan decides all keys outside a narrow window and lists the few inside. Nothing is sorted.
What `PlaneGroup` does can be added up over threads and machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tunable_magmax import lottery
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.kernels import Kernels, Keys, Planes, Runs, TensorPlace, padded

Item = TypeVar("Item")
Each = Callable[[Callable[[Item], Any], Iterable[Item]], list[Any]]
"""Applies a function to items, in threads or not, and returns the results in order."""

SPAN = 1 << 22
"""Slots that are worked on at a time: half a megabyte of each plane."""


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


class PlaneGroup(Protocol):
    """The planes of tensors that share a budget, in this process or in several. Rows go by their numbers."""

    def fill(self, row: int) -> None:
        """Puts every element into a row."""

    def count_common(self, row: int, other: int) -> int:
        """Returns how many elements two rows share."""

    def intersect(self, row: int, other: int, out: int) -> None:
        """Sets out = row and other."""

    def subtract(self, row: int, other: int) -> None:
        """Sets row = row without other."""

    def unite(self, row: int, other: int) -> None:
        """Sets row = row or other."""

    def scan_keys(self, row: int, free: int, chosen: int, lottery_state: int, low: int, high: int) -> tuple[int, Keys]:
        """Chooses elements of both rows with keys below `low`; returns how many, and the keys from `low` to `high`."""

    def choose_scanned(self, chosen: int, highest: int) -> None:
        """Adds to a row those of the last scan whose keys are at most `highest`."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns the elements of one group: the row of each task's elements (-1 for none), and the counts."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    leftovers: int


def assign_owners(group: PlaneGroup, rows: PlaneRows, budget: Sequence[int], seed: int) -> Ownership:
    """Gives each task exactly its budget of a group's elements."""
    tasks = len(budget)
    held = [row if n else -1 for row, n in zip(rows.candidates, budget, strict=True)]
    counts = [0] * tasks
    free, chosen, unused = rows.free, rows.chosen, list(rows.unused)
    group.fill(free)
    for t in reversed(range(tasks)):
        if not budget[t]:
            continue
        candidates = group.count_common(held[t], free)
        counts[t] = min(candidates, budget[t])
        state = lottery.lottery_state(seed, lottery.KEEP, t + 1)
        _choose(group, (held[t], free, chosen), counts[t], candidates, state)
        group.subtract(free, chosen)
        held[t], chosen = chosen, unused.pop() if unused else held[t]
    leftovers = unowned = group.count_common(free, free)
    for t in range(tasks):
        more = min(budget[t] - counts[t], unowned)
        if more:
            state = lottery.lottery_state(seed, lottery.LEFTOVERS, t + 1)
            _choose(group, (free, free, chosen), more, unowned, state)
            group.subtract(free, chosen)
            group.unite(held[t], chosen)
            counts[t] += more
            unowned -= more
    found = [group.count_common(row, row) if n else 0 for row, n in zip(held, budget, strict=True)]
    if found != list(budget):
        raise ExactnessError(f"the tasks own {found} elements, their budget is {list(budget)}; please report this")
    return Ownership(tuple(held), tuple(counts), leftovers)


def _choose(group: PlaneGroup, rows: tuple[int, int, int], n: int, candidates: int, lottery_state: int) -> None:
    """Puts n of the elements that two rows share into a third: those with the smallest keys."""
    row, free, chosen = rows
    if n >= candidates:
        group.intersect(row, free, chosen)
        return
    for low, high in windows(n, candidates):
        below, keys = group.scan_keys(row, free, chosen, lottery_state, low, high)
        if 0 <= n - below <= len(keys):
            if n > below:
                group.choose_scanned(chosen, nth_smallest(keys, n - below))
            return


def windows(n: int, candidates: int) -> Iterable[tuple[int, int]]:
    """Yields ever wider windows of keys for the n-th smallest of some candidates' keys."""
    share = n / candidates
    # Eight deviations each side of the expected threshold: a miss has odds of 1e-15 and costs another scan.
    half = (8 * sqrt(candidates * share * (1 - share)) + 16) / candidates
    while True:
        yield max(0, int((share - half) * 2.0**64)), min(lottery.MASK, int((share + half) * 2.0**64))
        half = max(16 * half, 2.0**-40)


def nth_smallest(keys: Keys, n: int) -> int:
    """Returns the n-th smallest key. Keys of one lottery state are all different (the mixing is a bijection).

    >>> nth_smallest(np.array([7, 3, 5], np.uint64), 2)
    5
    """
    return int(np.partition(keys, n - 1)[n - 1])


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    stop: int
    runs: Runs


class LocalPlaneGroup:
    """A `PlaneGroup` in this process, worked on slice by slice."""

    def __init__(self, kernels: Kernels, planes: Planes, places: Sequence[TensorPlace], each: Each[Any]) -> None:
        self._kernels, self._planes, self._each, self._places = kernels, planes, each, places
        self._spans = _spans(places)
        self._scanned: list[tuple[int, Keys, NDArray[np.uint64]]] = []

    def fill(self, row: int) -> None:
        for place in self._places:
            stop = place.slot + padded(place.size)
            self._kernels.fill(self._planes.part(row, place.slot, stop), place.size)
            self._planes.release((place.slot, stop), row)

    def count_common(self, row: int, other: int) -> int:
        return sum(self._over(self._kernels.count_common, row, other))

    def intersect(self, row: int, other: int, out: int) -> None:
        self._over(self._kernels.intersect, row, other, out)

    def subtract(self, row: int, other: int) -> None:
        self._over(self._kernels.subtract, row, other)

    def unite(self, row: int, other: int) -> None:
        self._over(self._kernels.unite, row, other)

    def scan_keys(self, row: int, free: int, chosen: int, lottery_state: int, low: int, high: int) -> tuple[int, Keys]:
        def work(span: _Span) -> Any:
            plane, unowned, won = (self._planes.part(r, span.start, span.stop) for r in (row, free, chosen))
            found = self._kernels.scan_keys(plane, unowned, won, span.runs, lottery_state, low, high)
            self._planes.release((span.start, span.stop), row, free, chosen)
            return found

        self._scanned = self._each(work, self._spans)
        keys = [keys for _, keys, _ in self._scanned]
        return sum(below for below, _, _ in self._scanned), np.concatenate([np.empty(0, np.uint64), *keys])

    def choose_scanned(self, chosen: int, highest: int) -> None:
        for span, (_, keys, slots) in zip(self._spans, self._scanned, strict=True):
            self._kernels.set_slots(self._planes.part(chosen, span.start, span.stop), slots[keys <= np.uint64(highest)])
            self._planes.release((span.start, span.stop), chosen)
        self._scanned = []

    def _over(self, operation: Callable[..., Any], *rows: int) -> list[Any]:
        def work(span: _Span) -> Any:
            result = operation(*(self._planes.part(row, span.start, span.stop) for row in rows))
            self._planes.release((span.start, span.stop), *rows)
            return result

        return self._each(work, self._spans)


def _spans(places: Sequence[TensorPlace]) -> list[_Span]:
    """Divides the slots of some tensors into slices without gaps: other tensors' bits mean nothing."""
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
        for start in range(0, padded(place.size), SPAN):
            stop = min(start + SPAN, padded(place.size))
            if runs and (place.slot + stop - runs[0][0] > SPAN or runs[-1][1] != place.slot + start):
                close()
            runs.append((place.slot + start, place.slot + stop, place.element + start))
    close()
    return spans
