"""Rules 4 to 6: who owns which element. The auction runs on bit planes; few elements are ever listed, none sorted.

The planes come from the survey: bit p of task t's plane says that |tau_t[p]| is at least that of all compared earlier
tasks. Going t = T .. 1, a task's candidates are its plane and the free plane. "The n smallest lottery numbers" among c
candidates is a threshold near n/c: one look decides all numbers outside a narrow window and lists the few inside. "The
n largest magnitudes" is one, too: a histogram of their leading bits tells the bin that it is in, and the few there are
listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.group_planes import Cut, Each, GroupPlanes
from tunable_magmax.merging.kernels import NARROW_DIGITS, WIDE_DIGITS, Kernels, Planes, TensorPlace, TensorRange


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
        """Returns the spare rows that follow the given number of rows."""
        first = rows + (4 if by_magnitude else 2)
        further = tuple(range(first, first + extra))
        return cls(rows, rows + 1, *((rows + 2, rows + 3) if by_magnitude else (-1, -1)), further)

    @property
    def stop(self) -> int:
        """The number of rows in all."""
        return max(self.won, self.drawn, *self.extra) + 1


class Selection:
    """Picks exactly n of the candidates in a group of tensors: all, by lottery, or by magnitude."""

    def __init__(self, planes: GroupPlanes, spare: SpareRows) -> None:
        self._planes = planes
        self.free, self.won, self.level, self.drawn = spare.free, spare.won, spare.level, spare.drawn
        self._extra = list(spare.extra)

    def open(self) -> None:
        """Makes every element of the group free."""
        self._planes.open(self.free)

    def count(self, row: int) -> int:
        """Returns how many candidates a row has among the free elements."""
        return self._planes.tally(row, self.free)

    def holds(self, row: int) -> int:
        """Returns how many elements a row holds."""
        return self._planes.tally(row, row)

    def take(self, row: int, n: int, candidates: int, lottery_state: int) -> None:
        """Puts n of the row's free candidates into the `won` row: those with the smallest lottery numbers."""
        if n >= candidates:
            self._planes.claim(row, self.free, self.won)
        else:
            self._draw(row, self.won, n, candidates, lottery_state)

    def take_largest(self, task: int, row: int, n: int, candidates: int, lottery_state: int) -> None:
        """Does the same by largest magnitude in the task's vector; equal magnitudes by lottery."""
        if n >= candidates:
            self._planes.claim(row, self.free, self.won)
            return
        planes = self._planes
        (shift, bits), *finer = WIDE_DIGITS if planes.wide else NARROW_DIGITS
        found = _Bin.of(planes.histogram(task, row, self.free, shift, bits, 0), n, 0, shift)
        among, into, marked = (row, self.free), self.won, candidates
        for shift, bits in finer:
            if found.held <= planes.room:
                break
            # Too many to list: mark them, and from now on look among them only.
            counts = planes.narrow(Cut(task, *among, found.low, found.high, into, self.level), shift, bits)
            self._gather(into)
            among, into, marked = (self.level, self.level), self.drawn, found.held
            found = _Bin.of(counts, found.wanted, found.low, shift)
        if found.held <= planes.room:
            codes, numbers = planes.sift(Cut(task, *among, found.low, found.high, into, self.level), lottery_state)
            if found.wanted:
                planes.award_listed(into, *_last_winner(codes, numbers, found.wanted))
        else:
            if marked > found.held:
                planes.cut(Cut(task, *among, found.low, found.high, into, self.level))
                self._gather(into)
            into = self.drawn
            self._draw(self.level, into, found.wanted, found.held, lottery_state)
        self._gather(into)

    def settle(self, row: int) -> int:
        """Makes the winners the owned elements of a task, no longer free; returns the row that now holds them."""
        self._planes.retire(self.free, self.won)
        owned, self.won = self.won, self._extra.pop() if self._extra else row
        return owned

    def keep(self, row: int) -> int:
        """Keeps the winners for a task, and leaves them free for others; returns the row that now holds them."""
        self.won, kept = row, self.won
        return kept

    def add(self, row: int) -> None:
        """Adds the winners to what the row holds; they are no longer free."""
        self._planes.retire(self.free, self.won)
        self._planes.unite(row, self.won)

    def _gather(self, row: int) -> None:
        """Adds what the row holds to the winners."""
        if row != self.won:
            self._planes.unite(self.won, row)

    def _draw(self, row: int, into: int, n: int, candidates: int, lottery_state: int) -> None:
        """Puts the n of the row's free candidates with the smallest lottery numbers into another row."""
        share = n / max(candidates, 1)
        # Eight deviations each side of the expected threshold: a miss has odds of 1e-15 and costs another look.
        half = (8 * math.sqrt(candidates * share * (1 - share)) + 16) / max(candidates, 1)
        while True:
            low = max(0, int((share - half) * 2.0**64))
            high = min(lottery.MASK, int((share + half) * 2.0**64))
            winners, numbers = self._planes.look(row, self.free, into, lottery_state, low, high)
            wanted = n - winners
            if 0 <= wanted <= len(numbers):
                break
            half = max(16 * half, 2.0**-40)
        if wanted:
            # Numbers from one lottery state are all different (the mixing is a bijection), so this takes exactly n.
            self._planes.award(into, int(np.partition(numbers, wanted - 1)[wanted - 1]))


@dataclass(frozen=True, slots=True)
class _Bin:
    """Codes of magnitudes from `low` to `high`, how many candidates have them, and how many of those are wanted.

    The wanted candidates with greater magnitudes are all above the bin.
    """

    low: int
    high: int
    held: int
    wanted: int

    @classmethod
    def of(cls, counts: NDArray[np.int64], wanted: int, low: int, shift: int) -> _Bin:
        """Returns the bin that holds the last of the wanted, counted from the top; the histogram begins at `low`."""
        from_top = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_top, wanted))
        above = int(from_top[place - 1]) if place else 0
        digit = len(counts) - 1 - place
        first = low + (digit << shift)
        return cls(first, first + (1 << shift) - 1, int(counts[digit]), wanted - above)


def _last_winner(codes: NDArray[np.int64], numbers: NDArray[np.uint64], wanted: int) -> tuple[int, int]:
    """Returns code and lottery number of the last of the wanted: largest codes first, then smallest numbers."""
    code = np.partition(codes, len(codes) - wanted)[len(codes) - wanted]
    place = wanted - int((codes > code).sum()) - 1
    return int(code), int(np.partition(numbers[codes == code], place)[place])


@dataclass(frozen=True, slots=True)
class Ownership:
    """The auction's result for one group: the row that holds each task's elements (-1 for none), and the counts."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    leftovers: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What all auctions of a merge have in common: the tasks' rows, the spare ones, the seed, and who is kept."""

    rows: tuple[int, ...]
    """The row that marks each task's candidates (from task 0; -1 for none)."""
    spare: SpareRows
    seed: int
    keep: str


def auction(selection: Selection, budget: Sequence[int], terms: Terms) -> Ownership:
    """Holds the auction of one group of tensors (rules 4 to 6)."""
    tasks = len(budget)
    held = [row if n else -1 for row, n in zip(terms.rows, budget, strict=True)]
    counts = [0] * tasks
    selection.open()
    for t in reversed(range(tasks)):
        if not budget[t]:
            continue
        candidates = selection.count(held[t])
        lottery_state = lottery.lottery_state(terms.seed, lottery.KEEP, t + 1)
        if terms.keep == "magnitude":
            selection.take_largest(t, held[t], budget[t], candidates, lottery_state)
        else:
            selection.take(held[t], budget[t], candidates, lottery_state)
        counts[t] = min(candidates, budget[t])
        held[t] = selection.settle(held[t])
    leftovers = unowned = selection.count(selection.free)
    for t in range(tasks):
        more = min(budget[t] - counts[t], unowned)
        if more:
            selection.take(selection.free, more, unowned, lottery.lottery_state(terms.seed, lottery.LEFTOVERS, t + 1))
            selection.add(held[t])
            counts[t] += more
            unowned -= more
    found = [selection.holds(row) if n else 0 for row, n in zip(held, budget, strict=True)]
    if found != list(budget):
        raise ExactnessError(f"the tasks own {found} elements, their budget is {list(budget)}; please report this")
    return Ownership(tuple(held), tuple(counts), leftovers)


@dataclass(frozen=True, slots=True)
class Group:
    """Merged tensors that share a budget, as places in the auctioneer's `places`."""

    members: tuple[int, ...]
    budget: tuple[int, ...]


@dataclass(slots=True)
class Owners:
    """What the auctions of a merge have decided."""

    rows: Mapping[int, Any]
    """By tensor, the rows that hold each task's elements of it, as the kernels' `gather` wants them."""
    leftovers: int = 0
    """How many elements were nobody's candidates, and were given away by lottery."""


class Auctioneer:
    """Holds the auctions of a merge: in this process, on a GPU, or on the workers of a cluster.

    Subclasses have `select` and `hold`, or other ways to do what these are for.
    """

    places: Sequence[TensorPlace]
    """The merged tensors."""

    @property
    def elements(self) -> int:
        """d, the number of merged elements."""
        return sum(place.size for place in self.places)

    def auctions(self, groups: Sequence[Sequence[int]], budgets: NDArray[np.int64], terms: Terms) -> Owners:
        """Holds an auction for each group of merged tensors (places in `places`), with budgets [groups, tasks]."""
        both = zip(groups, budgets.tolist(), strict=True)
        decided = self.hold([Group(tuple(members), tuple(budget)) for members, budget in both], terms)
        rows = {self.places[k].tensor: own.rows for group, own in zip(groups, decided, strict=True) for k in group}
        return Owners(rows, sum(own.leftovers for own in decided))

    def keep_largest(
        self,
        tasks: Sequence[int],
        groups: Sequence[Sequence[int]],
        wanted: Sequence[Sequence[int]],
        spare: SpareRows,
        seed: int,
    ) -> Sequence[int]:
        """Chooses the `wanted` [tasks, groups] elements of largest magnitude of each task and group.

        Equal ones go by lottery. Returns the rows of them, by task; they are the same in all groups.
        """

        def choose(group: int, selection: Selection) -> list[int]:
            size = sum(self.places[k].size for k in groups[group])
            selection.open()
            rows = []
            for row, (t, numbers) in enumerate(zip(tasks, wanted, strict=True)):
                lottery_state = lottery.lottery_state(seed, lottery.TIES_CUT, t + 1)
                selection.take_largest(t, selection.free, numbers[group], size, lottery_state)
                rows.append(selection.keep(row))
            return rows

        chosen = self.select(groups, spare, choose)
        return chosen[0] if chosen else ()

    def select(
        self, groups: Sequence[Sequence[int]], spare: SpareRows, choose: Callable[[int, Selection], list[int]]
    ) -> list[list[int]]:
        """Calls `choose` with the number of each group and a selection among its tensors."""
        raise NotImplementedError

    def hold(self, groups: Sequence[Group], terms: Terms) -> list[Ownership]:
        """Holds an auction for each group."""
        raise NotImplementedError


@dataclass(frozen=True)
class LocalAuctioneer(Auctioneer):
    """Holds auctions on planes of this process."""

    kernels: Kernels
    planes: Planes | None
    places: Sequence[TensorPlace]
    wide: Sequence[bool]
    """Whether each tensor is float64."""
    pair: Callable[[int, TensorRange], tuple[Tensor, Tensor]]
    chunk: int
    room: int
    """How many elements a selection by magnitude may list."""
    each: Each[Any]

    def select(
        self, groups: Sequence[Sequence[int]], spare: SpareRows, choose: Callable[[int, Selection], list[int]]
    ) -> list[list[int]]:
        inside, outside = self._threads(len(groups))

        def work(group: int) -> list[int]:
            return choose(group, Selection(self._planes_of(groups[group], inside), spare))

        return outside(work, range(len(groups)))

    def hold(self, groups: Sequence[Group], terms: Terms) -> list[Ownership]:
        inside, outside = self._threads(len(groups))

        def settle(group: Group) -> Ownership:
            return auction(Selection(self._planes_of(group.members, inside), terms.spare), group.budget, terms)

        return outside(settle, groups)

    def _threads(self, groups: int) -> tuple[Each[Any], Each[Any]]:
        """Returns who works inside a group, and who on groups: many share the threads, a single one uses them all."""
        return (self.each, _one_by_one) if groups == 1 else (_one_by_one, self.each)

    def _planes_of(self, members: Sequence[int], each: Each[Any]) -> GroupPlanes:
        return self.group_planes(members, any(self.wide[k] for k in members), each)

    def group_planes(self, members: Sequence[int], wide: bool, each: Each[Any]) -> GroupPlanes:
        """Returns the planes of some of the merged tensors, for one auction."""
        assert self.planes is not None
        chosen = [self.places[k] for k in members]
        return GroupPlanes(self.kernels, self.planes, chosen, each, self.pair, self.chunk, wide, self.room)


def _one_by_one(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [work(item) for item in items]
