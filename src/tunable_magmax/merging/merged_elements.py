"""What a method may ask about all merged elements at once, before the first one is merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax import lottery
from tunable_magmax.merging.assignment import (
    Each,
    LocalPlaneGroup,
    Ownership,
    PlaneRows,
    assign_owners,
    nth_smallest,
    windows,
)
from tunable_magmax.merging.kernels import (
    NARROW_DIGITS,
    WIDE_DIGITS,
    Chunk,
    Cut,
    Kernels,
    Keys,
    Planes,
    TensorPlace,
    TensorRange,
    split_ranges,
)
from tunable_magmax.merging.walker import Walker

COUNT_BYTES = 2 << 20
"""Memory for counts of magnitudes: groups are searched so many at a time."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owns which element."""

    rows: Mapping[int, tuple[int, ...]]
    """By tensor, the row that holds each task's elements of it (-1 for none)."""
    leftovers: int = 0
    """How many elements were nobody's candidates, and were given away by key."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Merged tensors that share a budget, as places in `MergedElements.places`."""

    members: tuple[int, ...]
    budget: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EqualScan:
    """Asks for the keys of a task's elements of one magnitude, in one group of tensors."""

    group: int
    task: int
    magnitude: float
    lottery_state: int
    low: int
    high: int


Groups = Sequence[Sequence[int]]
"""Groups of merged tensors, as places in `MergedElements.places`."""


class MergedElements:
    """The merged elements of all tensors. Subclasses say where they are: here, or on workers.

    `places` are the merged tensors; with `wide`, one of them is float64, and magnitudes are compared as float64.
    """

    places: Sequence[TensorPlace]
    wide: bool

    @property
    def elements(self) -> int:
        """d, the number of merged elements."""
        return sum(place.size for place in self.places)

    def assign(self, groups: Groups, budgets: Sequence[Sequence[int]], rows: PlaneRows, seed: int) -> Owners:
        """Gives each task exactly its budget of each group's elements; budgets are [groups, tasks]."""
        quotas = [Quota(tuple(members), tuple(budget)) for members, budget in zip(groups, budgets, strict=True)]
        decided = self.assign_groups(quotas, rows, seed)
        owned = {self.places[k].tensor: own.rows for group, own in zip(groups, decided, strict=True) for k in group}
        return Owners(owned, sum(own.leftovers for own in decided))

    def largest(
        self, tasks: Sequence[int], groups: Groups, wanted: Sequence[Sequence[int]], seed: int
    ) -> list[list[Cut]]:
        """Returns the cuts [groups, tasks] that keep the `wanted` [groups, tasks] elements of largest magnitude."""
        step = max(1, COUNT_BYTES // (len(tasks) * 8 << NARROW_DIGITS[0][1])) if tasks else 1
        cuts: list[list[Cut]] = []
        for first in range(0, len(groups), step):
            batch = slice(first, first + step)
            cuts += self._cuts(tasks, groups[batch], np.array(wanted[batch], np.int64), seed)
        return cuts

    def _cuts(self, tasks: Sequence[int], groups: Groups, wanted: NDArray[np.int64], seed: int) -> list[list[Cut]]:
        """Finds the magnitude of the last element that is kept digit by digit, and of equal ones the last key."""
        prefixes, left = np.zeros_like(wanted), wanted.copy()
        equal = np.zeros_like(wanted)
        for digit in WIDE_DIGITS if self.wide else NARROW_DIGITS:
            counts = self.count_magnitudes(groups, tasks, prefixes, digit)
            from_top = counts[..., ::-1].cumsum(axis=-1)
            place = (from_top < left[..., None]).sum(axis=-1, keepdims=True)
            above = np.take_along_axis(from_top, np.maximum(place - 1, 0), -1) * (place > 0)
            equal = np.take_along_axis(counts[..., ::-1], place, -1)[..., 0]
            left -= above[..., 0]
            prefixes = (prefixes << digit[1]) + (counts.shape[-1] - 1 - place[..., 0])
        codes = prefixes.astype(np.int64 if self.wide else np.int32)
        magnitudes = codes.view(np.float64 if self.wide else np.float32).astype(np.float64)
        # Of equal magnitudes all are kept, or those with the smallest keys; zeros are nothing, kept or not.
        undecided = np.argwhere((left > 0) & (left < equal) & (magnitudes > 0)).tolist()
        searches = [(g, k, int(left[g, k]), int(equal[g, k]), float(magnitudes[g, k])) for g, k in undecided]
        keys = self._last_keys(tasks, groups, searches, seed)
        return [
            [
                Cut(float(magnitudes[g, k]), keys.get((g, k), lottery.MASK)) if wanted[g, k] else Cut(np.inf, 0)
                for k in range(len(tasks))
            ]
            for g in range(len(groups))
        ]

    def _last_keys(
        self,
        tasks: Sequence[int],
        groups: Groups,
        searches: Sequence[tuple[int, int, int, int, float]],
        seed: int,
    ) -> dict[tuple[int, int], int]:
        """Returns the key of the last element kept among those of one magnitude, by group and task.

        A search is a group, a task's place in `tasks`, how many are kept of how many, and their magnitude.
        """
        wider = {(g, k): iter(windows(n, held)) for g, k, n, held, _ in searches}
        last: dict[tuple[int, int], int] = {}
        while todo := [search for search in searches if search[:2] not in last]:
            scans = []
            for g, k, _, _, magnitude in todo:
                state = lottery.lottery_state(seed, lottery.TIES_CUT, tasks[k] + 1)
                scans.append(EqualScan(g, tasks[k], magnitude, state, *next(wider[g, k])))
            for (g, k, n, _, _), scan, (below, keys) in zip(todo, scans, self.scan_equal(groups, scans), strict=True):
                if n == below:
                    last[g, k] = scan.low - 1
                elif 0 < n - below <= len(keys):
                    last[g, k] = nth_smallest(keys, n - below)
        return last

    def assign_groups(self, quotas: Sequence[Quota], rows: PlaneRows, seed: int) -> list[Ownership]:
        """Assigns the elements of each group."""
        raise NotImplementedError

    def count_magnitudes(
        self, groups: Groups, tasks: Sequence[int], prefixes: NDArray[np.int64], digit: tuple[int, int]
    ) -> NDArray[np.int64]:
        """Counts elements by a digit (shift, bits) of their magnitude, [groups, tasks, 2**bits].

        Elements count whose higher digits are the prefix [groups, tasks].
        """
        raise NotImplementedError

    def scan_equal(self, groups: Groups, scans: Sequence[EqualScan]) -> list[tuple[int, Keys]]:
        """Answers scans: how many keys are below the window, and those inside."""
        raise NotImplementedError


class LocalElements(MergedElements):
    """Merged elements in this process: `walker` reads their values in chunks, `planes` hold their candidates."""

    def __init__(
        self,
        kernels: Kernels,
        planes: Planes | None,
        places: Sequence[TensorPlace],
        wide: bool,
        walker: Walker,
        chunk: int,
    ) -> None:
        self.places, self.wide = places, wide
        self._kernels, self._planes, self._walker, self._chunk = kernels, planes, walker, chunk

    def assign_groups(self, quotas: Sequence[Quota], rows: PlaneRows, seed: int) -> list[Ownership]:
        # Many groups share the threads; a single one uses them all.
        inside, outside = (self._walker.each, _one_by_one) if len(quotas) == 1 else (_one_by_one, self._walker.each)

        def work(quota: Quota) -> Ownership:
            return assign_owners(self.plane_group(quota.members, inside), rows, quota.budget, seed)

        return outside(work, quotas)

    def plane_group(self, members: Sequence[int], each: Each[Any] | None = None) -> LocalPlaneGroup:
        """Returns the planes of some of the merged tensors."""
        assert self._planes is not None
        return LocalPlaneGroup(
            self._kernels, self._planes, [self.places[k] for k in members], each or self._walker.each
        )

    def count_magnitudes(
        self, groups: Groups, tasks: Sequence[int], prefixes: NDArray[np.int64], digit: tuple[int, int]
    ) -> NDArray[np.int64]:
        counts = np.zeros((*prefixes.shape, 1 << digit[1]), np.int64)
        group_of = self._group_of(groups)

        def work(bounds: TensorRange, chunk: Chunk) -> NDArray[np.int64]:
            own = prefixes[group_of[bounds.place.tensor]].tolist()
            return self._kernels.count_magnitudes(chunk, tasks, own, digit, self.wide)

        for bounds, found in self._walker.walk(work, self._ranges(groups), lambda bounds: tasks):
            counts[group_of[bounds.place.tensor]] += found
        return counts

    def scan_equal(self, groups: Groups, scans: Sequence[EqualScan]) -> list[tuple[int, Keys]]:
        group_of = self._group_of(groups)
        of_group = {g: [n for n, scan in enumerate(scans) if scan.group == g] for g in range(len(groups))}
        below, keys = [0] * len(scans), [[np.empty(0, np.uint64)] for _ in scans]

        def numbers(bounds: TensorRange) -> list[int]:
            return of_group[group_of[bounds.place.tensor]]

        def work(bounds: TensorRange, chunk: Chunk) -> list[tuple[int, Keys]]:
            return [
                self._kernels.scan_equal(chunk, scan.task, scan.magnitude, scan.lottery_state, scan.low, scan.high)
                for scan in (scans[n] for n in numbers(bounds))
            ]

        asked = [groups[g] if own else () for g, own in of_group.items()]
        for bounds, found in self._walker.walk(
            work, self._ranges(asked), lambda bounds: [scans[n].task for n in numbers(bounds)]
        ):
            for n, (count, listed) in zip(numbers(bounds), found, strict=True):
                below[n] += count
                keys[n].append(listed)
        return [(count, np.concatenate(listed)) for count, listed in zip(below, keys, strict=True)]

    def _group_of(self, groups: Groups) -> dict[int, int]:
        return {self.places[k].tensor: g for g, members in enumerate(groups) for k in members}

    def _ranges(self, groups: Groups) -> list[TensorRange]:
        return split_ranges([self.places[k] for members in groups for k in members], self._chunk)


def _one_by_one(work: Any, items: Iterable[Any]) -> list[Any]:
    return [work(item) for item in items]
