"""Rules 4 to 6 on a GPU: all groups of tensors at once, and the host looks at the result alone.

An `Auction` is begun, the host does other things, and then closes it. A draw decides lottery numbers against a window
around the expected threshold. One outside the window is noticed, and everything is drawn again with a wider one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.kernels.cuda import CudaKernels, Drawing, Sequel
from tunable_magmax.merging.kernels.tables import Address, Segment, Table, row_of
from tunable_magmax.merging.methods import Ties, TunableMagmax
from tunable_magmax.merging.ownership import Piece, Stretch

SPARE = 2
"""Rows of the planes beyond the tasks': what is free, and equal magnitudes."""
TRIES = 4
NOT_FOUND = "the lottery's threshold was not found; please report this"

Values = Callable[[Mapping[int, int]], Iterable[Table]]
"""Tables of all values, given the group of each tensor."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What is auctioned: the merged tensors with their planes, of which `spare` is the first spare row.

    `values` are looked at where magnitudes matter; `wide` says that one of the tensors is float64.
    """

    stretches: Sequence[Stretch]
    bits: Tensor
    spare: int
    values: Values
    wide: bool

    @property
    def elements(self) -> int:
        return sum(stretch.size for stretch in self.stretches)

    @property
    def free(self) -> Address:
        return self.row(self.spare)

    @property
    def level(self) -> Address:
        return self.row(self.spare + 1)

    def row(self, row: int) -> Address:
        """Where a row of the planes lies."""
        return row_of(self.bits, row)


@dataclass(frozen=True, slots=True)
class Plan:
    """An auction before anything is known of candidates: who may bid for how much, and room for what is counted.

    `wanted` is [tasks, groups]; the device has it, too, in the first rows of `numbers`, followed by what it tells the
    host: each task's elements, those that nobody has, and whether a draw has missed. Then come numbers of candidates.
    """

    method: TunableMagmax
    stretches: Sequence[Stretch]
    table: Table
    sizes: tuple[int, ...]
    wanted: NDArray[np.int64]
    numbers: Tensor

    @property
    def tasks(self) -> int:
        return len(self.wanted)

    def asked(self, task: int) -> Address:
        return row_of(self.numbers, task)

    def got(self, task: int) -> Address:
        return row_of(self.numbers, self.tasks + task)

    @property
    def unowned(self) -> Address:
        return row_of(self.numbers, 2 * self.tasks)

    @property
    def failed(self) -> Address:
        return row_of(self.numbers, 2 * self.tasks + 1)

    def candidates(self, k: int) -> Address:
        return row_of(self.numbers, 2 * self.tasks + 2 + k % 2)

    def told(self) -> NDArray[np.int64]:
        """What the device has to tell: waits for it."""
        return self.numbers[self.tasks : 2 * self.tasks + 2].cpu().numpy()


class Auctions:
    """Holds auctions, and keeps what the next one of the same tensors can use again."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._cuda = kernels
        self._tables: dict[tuple[int, int], Table] = {}
        self._drawings: dict[tuple[int, ...], Drawing] = {}
        self._expected: Plan | None = None

    def clear(self) -> None:
        """Let go of memory on the device."""
        self._tables.clear()
        self._drawings.clear()
        self._expected = None

    def geometry(self, stretches: Sequence[Stretch], groups: Sequence[Sequence[int]]) -> Table:
        """Where merged tensors lie, without their values, with the group of each."""
        key = (len(groups), len(stretches))
        if key not in self._tables:
            group_of = {k: g for g, members in enumerate(groups) for k in members}
            segments = [segment_of(Piece(s, 0, s.size), (), group_of[k]) for k, s in enumerate(stretches)]
            self._tables[key] = Table(segments, torch.float32, self._cuda.device)
        return self._tables[key]

    def expect(self, method: TunableMagmax, stretches: Sequence[Stretch]) -> None:
        """Make ready for an auction that is likely to come."""
        budget = method.options.budget
        if stretches and (budget is None or sum(budget) == sum(stretch.size for stretch in stretches)):
            self._expected = self._plan(method, stretches)
            self.drawing(self._expected.sizes, 0)

    def open(self, method: TunableMagmax, floor: Floor, mark: Callable[[], object]) -> Auction:
        """Begin an auction; `mark` marks candidates anew."""
        plan, self._expected = self._expected, None
        if plan is None or plan.method is not method or plan.stretches != floor.stretches:
            plan = self._plan(method, floor.stretches)
        return Auction(self, self._cuda, floor, plan, mark)

    def _plan(self, method: TunableMagmax, stretches: Sequence[Stretch]) -> Plan:
        groups, budgets = method.groups(stretches)
        sizes = tuple(sum(stretches[k].size for k in group) for group in groups)
        wanted = np.array(budgets, np.int64).T.copy()
        return Plan(method, stretches, self.geometry(stretches, groups), sizes, wanted, self.sheet(wanted))

    def sheet(self, wanted: NDArray[np.int64]) -> Tensor:
        """A plan's numbers, all 0 but what is wanted."""
        tasks, groups = wanted.shape
        return self._cuda.numbers(np.concatenate([wanted, np.zeros((tasks + 4, groups), np.int64)]))

    def trim(self, method: Ties, floor: Floor) -> None:
        """Keep each task's largest elements."""
        if not floor.stretches:
            return
        table = self.geometry(floor.stretches, [range(len(floor.stretches))])
        wanted = self._cuda.numbers([int(method.options.density * floor.elements)])
        for tries in range(TRIES):
            failed = self._cuda.zeros(1)
            draws = Draws(self._cuda, floor, table, self.drawing((floor.elements,), tries), failed.data_ptr())
            self._cuda.open(table, floor.free)
            for t in method.voters:
                drum = lottery.drum(method.options.seed, lottery.TIES_CUT, t + 1)
                draws.cut(t, floor.free, wanted, self._cuda.numbers([floor.elements]), floor.row(t), drum)
            if not failed.any():
                return
        raise ExactnessError(NOT_FOUND)

    def drawing(self, sizes: tuple[int, ...], tries: int) -> Drawing:
        """Room for draws among groups of these sizes, with a window that is wider at every try."""
        key = (*sizes, tries)
        if key not in self._drawings:
            self._drawings[key] = Drawing(self._cuda, sizes, deviations=5.0 * 4**tries)
        return self._drawings[key]


class Auction:
    """All auctions of a method: the device is at it when this is made; `close` waits for it.

    `owners` has the row of what each task owns, which holds when it is closed.
    """

    def __init__(
        self, house: Auctions, kernels: CudaKernels, floor: Floor, plan: Plan, mark: Callable[[], object]
    ) -> None:
        self._house, self._cuda, self._floor, self._plan, self._mark = house, kernels, floor, plan, mark
        method = plan.method
        bidders = [t for t in reversed(range(plan.tasks)) if plan.wanted[t].any()]
        self.owners = {t: floor.spare - plan.tasks + t if method.reusable else method.rows[t] for t in bidders}
        self._begin(0)

    def _begin(self, tries: int) -> None:
        """Rules 4 and 5."""
        plan, floor = self._plan, self._floor
        self._draws = Draws(self._cuda, floor, plan.table, self._house.drawing(plan.sizes, tries), plan.failed)
        self._cuda.open(plan.table, floor.free)
        bid = self._bid_by_magnitude if plan.method.options.keep == "magnitude" else self._bid_by_lottery
        bid()

    def close(self) -> None:
        """Share out what nobody has; if a threshold was missed, do everything again with a wider window."""
        method = self._plan.method
        for tries in range(1, TRIES + 1):
            found = self._plan.told()
            counts, unowned, missed = found[:-2], found[-2], found[-1].any()
            method.leftovers = int(unowned.sum())
            if method.leftovers and not missed:
                self._share_out(self._plan.wanted - counts, unowned)
                missed = self._plan.told()[-1].any()
            if not missed:
                return
            if tries < TRIES:
                self._mark()  # the attempt may have written over the marks
                self._plan = replace(self._plan, numbers=self._house.sheet(self._plan.wanted))
                self._begin(tries)
        raise ExactnessError(NOT_FOUND)

    def _bid_by_lottery(self) -> None:
        """Draw for one task after the other; each draw also counts the next task's candidates, or what is left."""
        plan, floor, owners = self._plan, self._floor, self.owners
        planes = [*(floor.row(plan.method.rows[t]) for t in owners), floor.free]
        counted = [*(plan.candidates(k) for k in range(len(owners))), plan.unowned]
        self._cuda.count(plan.table, planes[0], floor.free, 0, counted[0])
        for k, (t, owned) in enumerate(owners.items()):
            sequel = Sequel(False, floor.free, planes[k + 1], counted[k + 1])
            drum = self._drum(lottery.KEEP, t)
            self._draws.pick(planes[k], floor.row(owned), drum, plan.asked(t), counted[k], sequel, plan.got(t))

    def _bid_by_magnitude(self) -> None:
        """Take the largest magnitudes for one task after the other."""
        plan, floor = self._plan, self._floor
        candidates, won = self._cuda.zeros(len(plan.sizes)), 0
        for t, owned in self.owners.items():
            plane, asked = floor.row(plan.method.rows[t]), plan.numbers[t]
            self._cuda.count(plan.table, plane, floor.free, won, candidates.data_ptr())
            plan.numbers[plan.tasks + t] = torch.minimum(asked, candidates)
            won = floor.row(owned)
            self._draws.cut(t, plane, asked, candidates, won, self._drum(lottery.KEEP, t))
        self._cuda.count(plan.table, floor.free, floor.free, won, plan.unowned)

    def _share_out(self, left: NDArray[np.int64], unowned: NDArray[np.int64]) -> None:
        """Rule 6: what nobody owns, by lottery, to the tasks with budget left."""
        floor = self._floor
        portions, remaining = [], [unowned]
        for rest in left:
            portions.append(np.minimum(rest, remaining[-1]))
            remaining.append(remaining[-1] - portions[-1])
        numbers = self._cuda.numbers([*portions, *remaining])
        for t, portion in enumerate(portions):
            if portion.any():
                asked, candidates = row_of(numbers, t), row_of(numbers, len(portions) + t)
                won, drum = floor.row(self.owners[t]), self._drum(lottery.LEFTOVERS, t)
                self._draws.pick(floor.free, won, drum, asked, candidates, Sequel(True, floor.free))

    def _drum(self, purpose: int, task: int) -> int:
        return lottery.drum(self._plan.method.options.seed, purpose, task + 1)


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws among the groups of a table, which write to `failed` if a threshold lies outside its window."""

    cuda: CudaKernels
    floor: Floor
    table: Table
    drawing: Drawing
    failed: Address

    def pick(
        self, plane: Address, won: Address, drum: int, wanted: Address, candidates: Address, then: Sequel,
        counts: Address = 0,
    ) -> None:  # fmt: skip
        """The wanted number of a plane's free elements, by lottery, are `won`; see `CudaKernels.pick`."""
        free, failed = self.floor.free, self.failed
        self.cuda.pick(self.table, plane, free, won, drum, self.drawing, wanted, candidates, counts, failed, then)

    def cut(self, task: int, plane: Address, wanted: Tensor, candidates: Tensor, owned: Address, drum: int) -> None:
        """The wanted candidates of largest magnitude go to `owned`, equal ones by lottery; resets `candidates`."""
        cuda, floor = self.cuda, self.floor
        groups = {segment.tensor: segment.group for segment in self.table.segments}

        def walk() -> Iterable[Table]:
            return floor.values(groups)

        codes, left = cuda.threshold(walk, task, floor.wide, plane, floor.free, wanted, candidates)
        left = torch.where(wanted >= candidates, 0, left)
        cuda.sever(walk, task, floor.wide, plane, floor.free, wanted, candidates, codes, owned, floor.level)
        candidates.zero_()
        cuda.count(self.table, floor.level, floor.free, 0, candidates.data_ptr())
        self.pick(floor.level, owned, drum, left.data_ptr(), candidates.data_ptr(), Sequel(True))


def segment_of(piece: Piece, values: Sequence[Tensor], group: int = 0) -> Segment:
    """A piece of a tensor, as the kernels' tables list it."""
    stretch, start = piece.stretch, piece.start
    return Segment(values, piece.stop - start, stretch.slot + start, stretch.element + start, stretch.tensor, group)
