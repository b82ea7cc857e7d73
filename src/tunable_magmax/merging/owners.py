"""Who owns which element (docs/method.md, section 3): an assignment under quotas, on bit planes.

The planes come from the survey: bit p of task t's plane says that |tau_t[p]| is at least that of all compared earlier
tasks. Going t = T .. 1, a task's candidates are its plane and the free plane. "The n smallest keys" among c candidates
is a threshold near n/c: one scan decides all keys outside a narrow window and lists the few inside. Nothing is sorted.
What a `Part` answers can be added up over threads and machines, in the search for the cuts of TIES (`cuts`), too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.lottery import KEEP, LEFTOVERS, MASK, TIES_CUT, lottery_state
from tunable_magmax.merging.kernels import (
    Chunk,
    Each,
    Kernels,
    Keys,
    Owners,
    PlaneRows,
    Planes,
    TensorPlace,
    TensorRange,
)

if TYPE_CHECKING:
    from tunable_magmax.merging.cuts import Cut, Listed, Window

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
            if n > below:  # keys of one lottery state are all different: the mixing is a bijection
                step("choose_scanned", chosen, int(np.partition(keys, n - below - 1)[n - below - 1]))
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
    """Returns the sum of the counts and everything that was listed, of one scan or more."""
    below, listed = zip(*scanned, strict=True)
    return sum(below), np.concatenate(listed, axis=-1)


WORTH_WHILE = 64
"""A sample of one in more elements than this is drawn without reading the others."""


@dataclass(frozen=True, slots=True)
class Group:
    """Merged tensors, by number, that share a budget or quota, and how many elements they have."""

    tensors: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a part's method, or of a worker's."""

    part: int
    name: str
    arguments: tuple[Any, ...] = ()


class MergedElements:
    """The merged elements of all tensors: what a method may ask about them before the first one is merged.

    They are in parts, here or on workers, each of some tensors: `holder` says which part has which, `ask` sends calls
    to them.
    """

    def __init__(
        self,
        places: Sequence[TensorPlace],
        holder: Mapping[int, int],
        ask: Callable[[Sequence[Call]], list[Any]],
    ) -> None:
        self._sizes = {place.tensor: place.size for place in places}
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
            parts = self._parts(group)
            if len(parts) == 1:
                alone[parts[0]].append(number)
            else:
                step = partial(self._step, group)
                [owners[number]] = assign_owners(step, rows, [budgets[number]], seed)
        calls = [
            Call(part, "assign", ([groups[n] for n in own], [budgets[n] for n in own], rows, seed))
            for part, own in alone.items()
        ]
        for own, answer in zip(alone.values(), self._ask(calls), strict=True):
            owners |= dict(zip(own, answer, strict=True))
        return [owners[number] for number in range(len(groups))]

    def _parts(self, group: Group) -> list[int]:
        return sorted({self._holder[tensor] for tensor in group.tensors})

    def _step(self, group: Group, name: str, *arguments: int) -> list[Any]:
        return self._ask([Call(part, "plane_step", (group, name, arguments)) for part in self._parts(group)])

    def largest(self, group: Group, wanted: Mapping[int, int], seed: int) -> dict[int, Cut]:
        """Returns for each task the cut that keeps the `wanted` elements of largest magnitude of a group."""
        from tunable_magmax.merging.cuts import EVERYTHING, LISTED, NOTHING, SAMPLE, Cut, Window

        size, room = group.elements, max(SAMPLE, LISTED // len(wanted))
        states = {task: lottery_state(seed, TIES_CUT, task + 1) for task in wanted}
        cuts = {task: EVERYTHING if n else NOTHING for task, n in wanted.items() if n in (0, size)}
        windows = [
            Window(task, states[task], n, size, room, inside=size) for task, n in wanted.items() if task not in cuts
        ]
        while windows:
            answers = self._ask([Call(part, "scan", (group, windows)) for part in self._parts(group)])
            both = zip(windows, map(added, zip(*answers, strict=True)), strict=True)
            found = {window.task: window.next(*answer) for window, answer in both}
            cuts |= {task: each for task, each in found.items() if isinstance(each, Cut)}
            windows = [each for each in found.values() if isinstance(each, Window)]
        return cuts


class Part:
    """Merged elements that are here; what is asked about other tensors is left out.

    `walk` reads their values and works on them chunk by chunk, `each` applies functions in threads; `planes` hold their
    candidates.
    """

    def __init__(
        self, kernels: Kernels, planes: Planes | None, places: Sequence[TensorPlace], walk: Walk, each: Each
    ) -> None:
        self._kernels, self._planes, self._walk, self._each = kernels, planes, walk, each
        self._places = {place.tensor: place for place in places}
        self._shared: dict[Group, Any] = {}

    def assign(
        self, groups: Sequence[Group], budgets: Sequence[Sequence[int]], rows: PlaneRows, seed: int
    ) -> list[Owners]:
        """Assigns the elements of groups of tensors that are here entirely."""

        def assigned(groups: Sequence[Group], budgets: Sequence[Sequence[int]], each: Each) -> list[Owners]:
            planes = self._plane_groups(groups, each)
            step: Step = lambda name, *numbers: [getattr(planes, name)(*numbers)]  # noqa: E731
            return assign_owners(step, rows, budgets, seed, getattr(planes, "choose", None))

        def alone(pair: tuple[Group, Sequence[int]]) -> Owners:
            [own] = assigned([pair[0]], [pair[1]], lambda work, items: list(map(work, items)))
            return own

        if self._kernels.threads and len(groups) > 1:  # which share the threads; a single one uses them all
            return self._each(alone, list(zip(groups, budgets, strict=True)))
        return assigned(groups, budgets, self._each)

    def plane_step(self, group: Group, name: str, arguments: tuple[int, ...]) -> Any:
        """Does a step of an assignment that is made elsewhere: one of the operations of `Step`."""
        if group not in self._shared:
            self._shared[group] = self._plane_groups([group], self._each)
        return getattr(self._shared[group], name)(*arguments)

    def _plane_groups(self, groups: Sequence[Group], each: Each) -> Any:
        assert self._planes is not None
        return self._kernels.plane_groups(self._planes, [self._here(group) for group in groups], each)

    def scan(self, group: Group, windows: Sequence[Window]) -> list[tuple[int, Listed]]:
        """Counts and lists the elements of a group by windows: how many are above each, and those inside."""
        from tunable_magmax.merging.cuts import NOTHING

        # Where nothing is counted, a small sample is drawn first, which spares the memory.
        stride = min(int(1 / window.rate) if window.above == NOTHING else 1 for window in windows)
        scans = [replace(window, stride=stride) for window in windows] if stride > WORTH_WHILE else windows

        def work(bounds: TensorRange, chunk: Chunk) -> list[tuple[int, Listed]]:
            part = _sampled(chunk, stride) if stride > WORTH_WHILE else chunk
            return [self._kernels.scan(part, window) for window in scans]

        found = self._walk(work, self._here(group), lambda place: [window.task for window in windows])
        return [added(answers) for answers in zip(*(answers for _, answers in found), strict=True)]

    def _here(self, group: Group) -> list[TensorPlace]:
        return [self._places[tensor] for tensor in group.tensors if tensor in self._places]


def _sampled(chunk: Chunk, stride: int) -> Chunk:
    """Returns one of so many elements of a chunk, at random."""
    starts = np.arange(0, chunk.base.numel(), stride)
    drawn = starts + np.random.default_rng(chunk.element).integers(stride, size=len(starts))
    places = torch.from_numpy(drawn[drawn < chunk.base.numel()]).to(chunk.base.device)
    return Chunk(chunk.base[places], [values[places] for values in chunk.tasks], 0, chunk.element)
