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
from tunable_magmax.merging.auction import TensorPlace, TensorRange
from tunable_magmax.merging.kernels.cuda import LEFT_OVER, CudaKernels, Drawing, Letter, Sequel
from tunable_magmax.merging.kernels.launch import Address, Segment, Table, row_of
from tunable_magmax.merging.methods import Ties, TunableMagmax

SPARE = 2
"""Rows of the planes beyond the tasks': what is free, and equal magnitudes."""
AT_ONCE = 4
"""So many bidders' portions of what nobody owns are drawn without asking whether there is any."""
TRIES = 4
NOT_FOUND = "the lottery's threshold was not found; please report this"

Values = Callable[[Mapping[int, int]], Iterable[Table]]
"""Tables of all values, given the group of each tensor."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What is auctioned: the merged tensors with their planes, of which `spare` is the first spare row.

    `values` are looked at where magnitudes matter; `wide` says that one of the tensors is float64.
    """

    places: Sequence[TensorPlace]
    bits: Tensor
    spare: int
    values: Values
    wide: bool

    @property
    def elements(self) -> int:
        return sum(place.size for place in self.places)

    @property
    def free(self) -> Address:
        return self.row(self.spare)

    @property
    def level(self) -> Address:
        return self.row(self.spare + 1)

    def row(self, row: int) -> Address:
        """Where a row of the planes lies."""
        return row_of(self.bits, row)


class Sheet:
    """The numbers of an auction, on the device: rows of [groups], all 0 but what each task wants."""

    def __init__(self, kernels: CudaKernels, wanted: NDArray[np.int64]) -> None:
        self._tasks, groups = wanted.shape
        # By task: wanted, got, portions of what nobody owns, and how much of that there is before each; then what
        # nobody owns, the state, and two rows of candidates.
        rest = np.zeros((3 * self._tasks + 4, groups), np.int64)
        self.numbers = kernels.numbers(np.concatenate([wanted, rest]))

    def wanted(self, task: int) -> Address:
        return row_of(self.numbers, task)

    def got(self, task: int) -> Address:
        return row_of(self.numbers, self._tasks + task)

    def portion(self, task: int) -> Address:
        return row_of(self.numbers, 2 * self._tasks + task)

    def remaining(self, task: int) -> Address:
        return row_of(self.numbers, 3 * self._tasks + task)

    @property
    def unowned(self) -> Address:
        return row_of(self.numbers, 4 * self._tasks)

    @property
    def state(self) -> Address:
        return row_of(self.numbers, 4 * self._tasks + 1)

    def candidates(self, k: int) -> Address:
        return row_of(self.numbers, 4 * self._tasks + 2 + k % 2)

    def note(self, task: int, got: Tensor) -> None:
        """Write down what a task got."""
        self.numbers[self._tasks + task] = got

    def reopen(self) -> None:
        """Whatever called the auction off is done with."""
        self.numbers[4 * self._tasks + 1].zero_()

    def letter(self) -> Letter:
        """To be read with `told`."""
        return Letter(self.numbers[2 * self._tasks : 4 * self._tasks + 2])

    def told(self, letter: Letter) -> tuple[NDArray[np.int64], int, int]:
        """Portions [tasks, groups], how many elements nobody owned, and the state, when the letter was written."""
        found = letter.read()
        return found[: self._tasks], int(found[-2].sum()), int(found[-1, 0])


@dataclass(frozen=True, slots=True)
class Plan:
    """An auction before anything is known of candidates: what each task wants [tasks, groups], and a sheet for it."""

    method: TunableMagmax
    table: Table
    sizes: tuple[int, ...]
    wanted: NDArray[np.int64]
    sheet: Sheet


class Auctions:
    """Holds auctions, and keeps what the next one of the same tensors can use again."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._cuda = kernels
        self._tables: dict[tuple[int, ...], Table] = {}
        self._drawings: dict[tuple[int, ...], Drawing] = {}

    def clear(self) -> None:
        """Let go of memory on the device."""
        self._tables.clear()
        self._drawings.clear()

    def geometry(self, places: Sequence[TensorPlace], groups: Sequence[Sequence[int]]) -> Table:
        """Where merged tensors lie, without their values, with the group of each."""
        key = (len(groups), *(place.tensor for place in places))
        if key not in self._tables:
            group_of = {k: g for g, members in enumerate(groups) for k in members}
            segments = [segment_of(TensorRange(s, 0, s.size), (), group_of[k]) for k, s in enumerate(places)]
            self._tables[key] = Table(segments, torch.float32, self._cuda.device)
        return self._tables[key]

    def plan(
        self,
        method: TunableMagmax,
        places: Sequence[TensorPlace],
        groups: Sequence[Sequence[int]],
        budgets: NDArray[np.int64],
    ) -> Plan:
        sizes = tuple(sum(places[k].size for k in group) for group in groups)
        wanted = budgets.T.copy()
        return Plan(method, self.geometry(places, groups), sizes, wanted, Sheet(self._cuda, wanted))

    def open(self, plan: Plan, floor: Floor) -> Auction:
        """Order an auction."""
        return Auction(self, self._cuda, floor, plan)

    def trim(self, method: Ties, floor: Floor) -> None:
        """Keep each task's largest elements."""
        if not floor.places:
            return
        table = self.geometry(floor.places, [range(len(floor.places))])
        wanted = self._cuda.numbers([int(method.options.density * floor.elements)])
        for tries in range(TRIES):
            state = self._cuda.zeros(1)
            draws = Draws(self._cuda, floor, table, self.drawing((floor.elements,), tries), state.data_ptr())
            self._cuda.open(table, floor.free)
            for t in method.voters:
                lottery_state = lottery.lottery_state(method.options.seed, lottery.TIES_CUT, t + 1)
                draws.cut(t, floor.free, wanted, self._cuda.numbers([floor.elements]), floor.row(t), lottery_state)
            if not state.any():
                return
        raise ExactnessError(NOT_FOUND)

    def drawing(self, sizes: tuple[int, ...], tries: int) -> Drawing:
        """Room for draws among groups of these sizes, with a window that is wider at every try."""
        key = (*sizes, tries)
        if key not in self._drawings:
            self._drawings[key] = Drawing(self._cuda, sizes, deviations=5.0 * 4**tries)
        return self._drawings[key]


class Auction:
    """All auctions of a method, ordered from the device when this is made. `close` waits for them.

    `owners` has the row of what each task owns, which holds when it is closed. Kernels that are given the sheet's
    state do nothing if the auction was called off, so what relies on its result may be ordered before it is closed.
    """

    def __init__(self, house: Auctions, kernels: CudaKernels, floor: Floor, plan: Plan) -> None:
        self._house, self._cuda, self._floor, self.plan = house, kernels, floor, plan
        bidders = np.flatnonzero(plan.wanted.any(axis=1))[::-1].tolist()
        first = floor.spare - len(plan.wanted)
        self.owners = {t: first + t if plan.method.reusable else plan.method.rows[t] for t in bidders}
        self._begin(0)

    def _begin(self, tries: int) -> None:
        plan, floor, sheet = self.plan, self._floor, self.plan.sheet
        self._draws = Draws(self._cuda, floor, plan.table, self._house.drawing(plan.sizes, tries), sheet.state)
        self._cuda.open(plan.table, floor.free)
        bid = self._bid_by_magnitude if plan.method.options.keep == "magnitude" else self._bid_by_lottery
        bid()
        at_once = len(self.owners) <= AT_ONCE
        tasks, groups = plan.wanted.shape
        self._cuda.divide(
            tasks, groups, sheet.wanted(0), sheet.got(0), sheet.unowned, sheet.portion(0), sheet.remaining(0),
            at_once, sheet.state,
        )  # fmt: skip
        if at_once:
            self._share_out(sorted(self.owners))
        self._letter = sheet.letter()

    def close(self, mark: Callable[[], object]) -> bool:
        """Wait, and see to what could not be ordered in advance; `mark` marks candidates anew.

        Returns whether all went as ordered. If not, what was ordered after the auction was not done.
        """
        for tries in range(1, TRIES + 1):
            sheet = self.plan.sheet
            portions, self.plan.method.leftovers, state = sheet.told(self._letter)
            if state == LEFT_OVER:
                sheet.reopen()
                self._share_out(np.flatnonzero(portions.any(axis=1)).tolist())
                *_, state = sheet.told(sheet.letter())
                if not state:
                    return False
            if not state:
                return tries == 1
            if tries < TRIES:  # a threshold was missed: all over again, with a wider window
                mark()  # the attempt may have written over the marks
                self.plan = replace(self.plan, sheet=Sheet(self._cuda, self.plan.wanted))
                self._begin(tries)
        raise ExactnessError(NOT_FOUND)

    def _bid_by_lottery(self) -> None:
        """Rules 4 and 5: a draw for one task after the other, each of which counts the next one's candidates."""
        floor, owners, rows, sheet = self._floor, self.owners, self.plan.method.rows, self.plan.sheet
        planes = [*(floor.row(rows[t]) for t in owners), floor.free]
        counted = [*(sheet.candidates(k) for k in range(len(owners))), sheet.unowned]
        self._cuda.count(self.plan.table, planes[0], floor.free, 0, counted[0])
        for k, (t, owned) in enumerate(owners.items()):
            sequel = Sequel(False, floor.free, planes[k + 1], counted[k + 1])
            lottery_state = self._lottery(lottery.KEEP, t)
            self._draws.pick(
                planes[k], floor.row(owned), lottery_state, sheet.wanted(t), counted[k], sequel, sheet.got(t)
            )

    def _bid_by_magnitude(self) -> None:
        """Rules 4 and 5 with the largest magnitudes of one task after the other."""
        plan, floor, sheet = self.plan, self._floor, self.plan.sheet
        candidates, won = self._cuda.zeros(len(plan.sizes)), 0
        for t, owned in self.owners.items():
            plane, wanted = floor.row(plan.method.rows[t]), sheet.numbers[t]
            self._cuda.count(plan.table, plane, floor.free, won, candidates.data_ptr())
            sheet.note(t, torch.minimum(wanted, candidates))
            won = floor.row(owned)
            self._draws.cut(t, plane, wanted, candidates, won, self._lottery(lottery.KEEP, t))
        self._cuda.count(plan.table, floor.free, floor.free, won, sheet.unowned)

    def _share_out(self, tasks: Sequence[int]) -> None:
        """Rule 6: what nobody owns, by lottery, to these tasks."""
        floor, sheet = self._floor, self.plan.sheet
        for t in tasks:
            won, lottery_state, sequel = (
                floor.row(self.owners[t]),
                self._lottery(lottery.LEFTOVERS, t),
                Sequel(True, floor.free),
            )
            self._draws.pick(floor.free, won, lottery_state, sheet.portion(t), sheet.remaining(t), sequel)

    def _lottery(self, purpose: int, task: int) -> int:
        return lottery.lottery_state(self.plan.method.options.seed, purpose, task + 1)


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws among the groups of a table, which write to `state` if a threshold lies outside its window."""

    cuda: CudaKernels
    floor: Floor
    table: Table
    drawing: Drawing
    state: Address

    def pick(
        self, plane: Address, won: Address, lottery_state: int, wanted: Address, candidates: Address, then: Sequel,
        counts: Address = 0,
    ) -> None:  # fmt: skip
        """The wanted number of a plane's free elements, by lottery, are `won`; see `CudaKernels.pick`."""
        free, state = self.floor.free, self.state
        self.cuda.pick(
            self.table, plane, free, won, lottery_state, self.drawing, wanted, candidates, counts, state, then
        )

    def cut(
        self, task: int, plane: Address, wanted: Tensor, candidates: Tensor, owned: Address, lottery_state: int
    ) -> None:
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
        self.pick(floor.level, owned, lottery_state, left.data_ptr(), candidates.data_ptr(), Sequel(True))


def segment_of(bounds: TensorRange, values: Sequence[Tensor], group: int = 0) -> Segment:
    """A range of a tensor, as the kernels' tables list it."""
    place, start = bounds.place, bounds.start
    return Segment(values, bounds.stop - start, place.slot + start, place.element + start, place.tensor, group)
