"""Who owns which element (docs/method.md, section 3): an assignment under quotas, on bit planes.

The planes come from the survey: bit p of task t's plane says that |tau_t[p]| is at least that of all compared earlier
tasks. Going t = T .. 1, a task's candidates are its plane and the free plane. "The n smallest keys" among c candidates
is a threshold near n/c: one scan decides all keys outside a narrow window and lists the few inside. Nothing is sorted.
What a `Part` answers can be added up over threads and machines.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.lottery import KEEP, LEFTOVERS, MASK, TIES_CUT, lottery_state
from tunable_magmax.merging.kernels import (
    Chunk,
    Cut,
    Each,
    Kernels,
    Keys,
    Owners,
    PlaneRows,
    Planes,
    TensorPlace,
    TensorRange,
)

Walk = Callable[..., Iterator[tuple[TensorRange, Any]]]
"""Applies a function to all chunks of some tensors: what `Walker.walk_chunks` does."""


Step = Callable[..., list[Any]]
"""Has each part of a group of tensors do an operation of its planes, by name; returns the parts' answers."""


Ints: TypeAlias = NDArray[np.int64]
ThreeRows: TypeAlias = tuple[int, int, int]
Choose = Callable[[Step, ThreeRows, Ints, Ints, int], None]
"""Puts n elements of each group that two rows share into a third: those with the smallest keys of a lottery state."""


def assign_owners(
    step: Step, rows: PlaneRows, budgets: Sequence[Sequence[int]], seed: int, choose: Choose | None = None
) -> list[Owners]:
    """Gives each task exactly its budget of each group's elements; budgets are [groups, tasks].

    `step` reaches the parts of one group; of all groups, if it answers with arrays and comes with a `choose`.
    """
    choose, budget = choose or _choose, np.array(budgets, np.int64).reshape(-1, len(rows.candidates))
    counts, taking = np.zeros_like(budget), np.flatnonzero(budget.any(axis=0)).tolist()
    held, free, chosen, unused = list(rows.candidates), rows.free, rows.chosen, list(rows.unused)

    def count(row: int, other: int) -> Ints:
        return np.zeros(len(budget), np.int64) + sum(step("count_common", row, other))

    step("fill", free)
    for t in reversed(taking):
        candidates = count(held[t], free)
        counts[:, t] = np.minimum(candidates, budget[:, t])
        state = lottery_state(seed, KEEP, t + 1)
        choose(step, (held[t], free, chosen), counts[:, t], candidates, state)
        step("subtract", free, chosen)
        held[t], chosen = chosen, unused.pop() if unused else held[t]
    leftovers = count(free, free)
    unowned = leftovers.copy()
    for t in taking:
        more = np.minimum(budget[:, t] - counts[:, t], unowned)
        if more.any():
            state = lottery_state(seed, LEFTOVERS, t + 1)
            choose(step, (free, free, chosen), more, unowned, state)
            step("subtract", free, chosen)
            step("unite", held[t], chosen)
            counts[:, t] += more
            unowned -= more
    return [
        Owners(tuple(row if n else -1 for row, n in zip(held, own, strict=True)), int(rest))
        for own, rest in zip(budget, leftovers, strict=True)
    ]


def _choose(step: Step, rows: ThreeRows, wanted: Ints, held: Ints, state: int) -> None:
    """Chooses in one group, whose parts scan keys; the driver finds the threshold."""
    (row, free, chosen), [n], [candidates] = rows, wanted.tolist(), held.tolist()
    if n >= candidates:
        step("intersect", row, free, chosen)
        return
    for low, high in windows(n, candidates):
        below, keys = added(step("scan_keys", row, free, chosen, state, low, high))
        if 0 <= n - below <= len(keys):
            if n > below:
                step("choose_scanned", chosen, nth_smallest(keys, n - below))
            return


def windows(n: int, candidates: int) -> Iterable[tuple[int, int]]:
    """Yields ever wider windows of keys for the n-th smallest of some candidates' keys."""
    share = n / candidates
    # Eight deviations each side of the expected threshold: a miss has odds of 1e-15 and costs another scan.
    half = (8 * sqrt(candidates * share * (1 - share)) + 16) / candidates
    while True:
        yield max(0, int((share - half) * 2.0**64)), min(MASK, int((share + half) * 2.0**64))
        half = max(16 * half, 2.0**-40)


def added(scanned: Iterable[tuple[int, Keys]]) -> tuple[int, Keys]:
    """Returns the sum of the counts and all keys of several scans."""
    below, keys = zip((0, np.empty(0, np.uint64)), *scanned, strict=True)
    return sum(below), np.concatenate(keys)


def nth_smallest(keys: Keys, n: int) -> int:
    """Returns the n-th smallest key. Keys of one lottery state are all different (the mixing is a bijection).

    >>> nth_smallest(np.array([7, 3, 5], np.uint64), 2)
    5
    """
    return int(np.partition(keys, n - 1)[n - 1])


COUNT_BYTES = 4 << 20
"""Memory for counts of magnitudes, in all and of each thread: groups are searched so many at a time."""
LEAST_BITS, MOST_BITS = 11, 16
"""Of a digit of a magnitude: each digit takes a walk, and twice the memory for each bit."""


@dataclass(frozen=True, slots=True)
class Group:
    """Merged tensors, by number, that share a budget or quota, and how many elements they have."""

    tensors: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class EqualScan:
    """Asks for the keys of a task's elements of one magnitude, in a group."""

    group: Group
    task: int
    magnitude: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a part's method, or of a worker's."""

    part: int
    name: str
    arguments: tuple[Any, ...] = ()


def digits(width: int, counts: int) -> list[tuple[int, int]]:
    """Cuts the bit pattern of a magnitude, its code, into few digits (shift, bits) of about so many values at most.

    A code has 31 bits of a float32, 63 of a float64. The patterns of non-negative floats have the order of the floats.

    >>> digits(31, 70_000), digits(31, 2048)
    ([(15, 16), (0, 15)], [(20, 11), (9, 11), (0, 9)])
    """
    bits = min(MOST_BITS, max(LEAST_BITS, counts.bit_length() - 1))
    return [(max(0, high - bits), min(bits, high)) for high in range(width, 0, -bits)]


class MergedElements:
    """The merged elements of all tensors: what a method may ask about them before the first one is merged.

    They are in parts, here or on workers, each of some tensors: `holder` says which part has which, `ask` sends calls
    to them. With `wide`, a merged tensor is float64, and magnitudes are compared as float64.
    """

    def __init__(
        self,
        places: Sequence[TensorPlace],
        wide: bool,
        holder: Mapping[int, int],
        ask: Callable[[Sequence[Call]], list[Any]],
    ) -> None:
        self._sizes, self._wide = {place.tensor: place.size for place in places}, wide
        self._holder, self._ask = holder, ask

    def groups(self, scope: str | None) -> list[Group]:
        """Returns which of the merged tensors share a budget: all, or each has its own."""
        if scope == "model":
            return [Group(tuple(self._sizes), sum(self._sizes.values()))]
        return [Group((tensor,), size) for tensor, size in self._sizes.items()]

    def assign(
        self, groups: Sequence[Group], budgets: Sequence[Sequence[int]], rows: PlaneRows, seed: int
    ) -> list[Owners]:
        """Gives each task exactly its budget of each group's elements; budgets are [groups, tasks].

        Groups of which one part has all tensors are left to that part.
        """
        owners: dict[int, Owners] = {}
        alone: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(groups):
            parts = sorted({self._holder[tensor] for tensor in group.tensors})
            if len(parts) == 1:
                alone[parts[0]].append(number)
            else:
                [owners[number]] = assign_owners(self._step(parts, group), rows, [budgets[number]], seed)
        calls = [
            Call(part, "assign", ([groups[n] for n in own], [budgets[n] for n in own], rows, seed))
            for part, own in alone.items()
        ]
        for own, answer in zip(alone.values(), self._ask(calls), strict=True):
            owners |= dict(zip(own, answer, strict=True))
        return [owners[number] for number in range(len(groups))]

    def _step(self, parts: Sequence[int], group: Group) -> Step:
        def step(name: str, *arguments: int) -> list[Any]:
            return self._ask([Call(part, "plane_step", (group, name, arguments)) for part in parts])

        return step

    def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        return self._ask([Call(part, name, arguments) for part in sorted(set(self._holder.values()))])

    def largest(
        self, tasks: Sequence[int], groups: Sequence[Group], wanted: Sequence[Sequence[int]], seed: int
    ) -> list[list[Cut]]:
        """Returns the cuts [groups, tasks] that keep the `wanted` [groups, tasks] elements of largest magnitude."""
        step = max(1, COUNT_BYTES // (len(tasks) * 8 << LEAST_BITS)) if tasks else 1
        cuts: list[list[Cut]] = []
        for first in range(0, len(groups), step):
            batch = slice(first, first + step)
            cuts += self._cuts(tasks, groups[batch], np.array(wanted[batch], np.int64), seed)
        return cuts

    def _cuts(self, tasks: Sequence[int], groups: Sequence[Group], wanted: Ints, seed: int) -> list[list[Cut]]:
        """Finds the magnitude of the last element that is kept digit by digit, and of equal ones the last key."""
        prefixes, left = np.zeros_like(wanted), wanted.copy()
        equal = np.zeros_like(wanted)
        for digit in digits(63 if self._wide else 31, COUNT_BYTES // max(8, 8 * wanted.size)):
            answers = self._ask_all("count_magnitudes", groups, tasks, prefixes, digit, self._wide)
            counts = sum(answers, np.zeros((*wanted.shape, 1 << digit[1]), np.int64))
            from_top = counts[..., ::-1].cumsum(axis=-1)
            place = (from_top < left[..., None]).sum(axis=-1, keepdims=True)
            above = np.take_along_axis(from_top, np.maximum(place - 1, 0), -1) * (place > 0)
            equal = np.take_along_axis(counts[..., ::-1], place, -1)[..., 0]
            left -= above[..., 0]
            prefixes = (prefixes << digit[1]) + (counts.shape[-1] - 1 - place[..., 0])
        codes = prefixes.astype(np.int64 if self._wide else np.int32)
        magnitudes = codes.view(np.float64 if self._wide else np.float32).astype(np.float64)
        keys = np.full_like(wanted, MASK, dtype=np.uint64)
        # Of equal magnitudes all are kept, or those with the smallest keys; zeros are nothing, kept or not.
        undecided = np.argwhere((left > 0) & (left < equal) & (magnitudes > 0)).tolist()
        wider = {(g, k): iter(windows(int(left[g, k]), int(equal[g, k]))) for g, k in undecided}
        while wider:
            scans = [
                EqualScan(groups[g], tasks[k], float(magnitudes[g, k]), *next(window))
                for (g, k), window in wider.items()
            ]
            found = map(added, zip(*self._ask_all("scan_equal", scans, seed), strict=True))
            for (g, k), scan, (below, listed) in zip(list(wider), scans, found, strict=True):
                n = int(left[g, k]) - below
                if 0 <= n <= len(listed):
                    keys[g, k] = nth_smallest(listed, n) if n else scan.low - 1
                    del wider[g, k]
        magnitudes[wanted == 0] = np.inf
        pairs = zip(magnitudes.tolist(), keys.tolist(), strict=True)
        return [[Cut(*pair) for pair in zip(values, last, strict=True)] for values, last in pairs]


class Part:
    """Merged elements that are here; what is asked about other tensors is left out.

    `walk` reads their values and works on them chunk by chunk, `each` applies functions in threads; `planes` hold their
    candidates.
    """

    def __init__(
        self, kernels: Kernels, planes: Planes | None, places: Sequence[TensorPlace], walk: Walk, each: Each[Any]
    ) -> None:
        self._kernels, self._planes, self._walk, self._each = kernels, planes, walk, each
        self._places = {place.tensor: place for place in places}
        self._plane_groups: dict[Group, Any] = {}

    def assign(
        self, groups: Sequence[Group], budgets: Sequence[Sequence[int]], rows: PlaneRows, seed: int
    ) -> list[Owners]:
        """Assigns the elements of groups of tensors that are here entirely."""
        assert self._planes is not None
        return self._kernels.assign(
            self._planes, [self._here(group) for group in groups], budgets, rows, seed, self._each
        )

    def plane_step(self, group: Group, name: str, arguments: tuple[int, ...]) -> Any:
        """Does a step of an assignment that is made elsewhere: one of the operations of `Step`."""
        if group not in self._plane_groups:
            assert self._planes is not None
            self._plane_groups[group] = self._kernels.plane_group(self._planes, self._here(group), self._each)
        return getattr(self._plane_groups[group], name)(*arguments)

    def count_magnitudes(
        self, groups: Sequence[Group], tasks: Sequence[int], prefixes: Ints, digit: tuple[int, int], wide: bool
    ) -> Ints:
        """Counts elements by a digit (shift, bits) of their magnitude, [groups, tasks, 2**bits].

        Elements count whose higher digits are the prefix [groups, tasks].
        """
        counts = np.zeros((*prefixes.shape, 1 << digit[1]), np.int64)
        group_of = {tensor: g for g, group in enumerate(groups) for tensor in group.tensors}
        alone = Lock()  # those who wait to be added up would take more memory than there is for counts

        def work(bounds: TensorRange, chunk: Chunk) -> None:
            group = group_of[bounds.place.tensor]
            found = self._kernels.count_magnitudes(chunk, tasks, prefixes[group].tolist(), digit, wide)
            with alone:
                counts[group] += found

        deque(self._walk(work, self._here(*groups), lambda bounds: tasks), maxlen=0)
        return counts

    def scan_equal(self, scans: Sequence[EqualScan], seed: int) -> list[tuple[int, Keys]]:
        """Answers scans: how many keys are below the window, and those inside."""
        wanted: dict[int, list[tuple[int, EqualScan]]] = defaultdict(list)
        for n, scan in enumerate(scans):
            for tensor in scan.group.tensors:
                wanted[tensor].append((n, scan))
        answers: list[list[tuple[int, Keys]]] = [[] for _ in scans]

        def work(bounds: TensorRange, chunk: Chunk) -> list[tuple[int, tuple[int, Keys]]]:
            return [(n, scan_one(chunk, scan)) for n, scan in wanted[bounds.place.tensor]]

        def scan_one(chunk: Chunk, scan: EqualScan) -> tuple[int, Keys]:
            state = lottery_state(seed, TIES_CUT, scan.task + 1)
            return self._kernels.scan_equal(chunk, scan.task, scan.magnitude, state, scan.low, scan.high)

        def tasks(bounds: TensorRange) -> list[int]:
            return [scan.task for _, scan in wanted[bounds.place.tensor]]

        for _, found in self._walk(work, self._here(*dict.fromkeys(scan.group for scan in scans)), tasks):
            for n, answer in found:
                answers[n].append(answer)
        return [added(found) for found in answers]

    def _here(self, *groups: Group) -> list[TensorPlace]:
        return [self._places[tensor] for group in groups for tensor in group.tensors if tensor in self._places]
