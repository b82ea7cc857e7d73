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
from tunable_magmax.merging.auction import Auctioneer, Owners, SpareRows, Terms
from tunable_magmax.merging.kernels import TensorPlace, TensorRange
from tunable_magmax.merging.kernels.cuda import LEFT_OVER, CudaKernels, Drawing, HostCopy, Pick, Ranking, Sequel
from tunable_magmax.merging.kernels.launch import Address, Rows, Table
from tunable_magmax.merging.methods import Method

SPARE = 2
"""Rows of the planes beyond the tasks': what is free, and equal magnitudes."""
AT_ONCE = 4
"""So many bidders' portions of what nobody owns are drawn without asking whether there is any."""
TRIES = 4
NOT_FOUND = "the lottery's threshold was not found; please report this"

Values = Callable[[Mapping[int, int]], Iterable[Table]]
"""Tables of all values, given the group of each tensor."""


def plane_rows(method: Method) -> int:
    """Returns the rows of planes on a device: the method's own, more where marks serve again, and spare ones."""
    return 0 if method.spare is None else method.spare.free + len(method.spare.extra) + SPARE


@dataclass(frozen=True, slots=True)
class DevicePlanes:
    """The merged tensors with their planes, of which `spare` is the first spare row.

    `values` are looked at where magnitudes matter; `wide` says that one of the tensors is float64.
    """

    places: Sequence[TensorPlace]
    row: Rows
    spare: int
    values: Values
    wide: bool

    @property
    def free(self) -> Address:
        return self.row(self.spare)

    @property
    def level(self) -> Address:
        return self.row(self.spare + 1)


class AuctionNumbers:
    """The numbers of an auction, on the device: rows of [groups], all 0 but what each task wants."""

    def __init__(self, kernels: CudaKernels, wanted: NDArray[np.int64]) -> None:
        self._tasks, groups = wanted.shape
        # By task: wanted, got, portions of what nobody owns, and how much of that there is before each; then what
        # nobody owns, the state, and two rows of candidates.
        rest = np.zeros((3 * self._tasks + 4, groups), np.int64)
        self.table = kernels.numbers(np.concatenate([wanted, rest]))
        self._row = Rows(self.table)

    def wanted(self, task: int) -> Address:
        return self._row(task)

    def got(self, task: int) -> Address:
        return self._row(self._tasks + task)

    def portion(self, task: int) -> Address:
        return self._row(2 * self._tasks + task)

    def remaining(self, task: int) -> Address:
        return self._row(3 * self._tasks + task)

    @property
    def unowned(self) -> Address:
        return self._row(4 * self._tasks)

    @property
    def state(self) -> Address:
        return self._row(4 * self._tasks + 1)

    def candidates(self, k: int) -> Address:
        return self._row(4 * self._tasks + 2 + k % 2)

    def note(self, task: int, got: Tensor) -> None:
        """Sets what a task got."""
        self.table[self._tasks + task] = got

    def reopen(self) -> None:
        """Clears the state that called the auction off."""
        self.table[4 * self._tasks + 1].zero_()

    def copy(self) -> HostCopy:
        """Copies what `read` needs to the host."""
        return HostCopy(self.table[2 * self._tasks : 4 * self._tasks + 2])

    def read(self, copy: HostCopy) -> tuple[NDArray[np.int64], int, int]:
        """Returns portions [tasks, groups], how many elements nobody owned, and the state, when the copy was made."""
        values = copy.read()
        return values[: self._tasks], int(values[-2].sum()), int(values[-1, 0])


@dataclass(frozen=True, slots=True)
class Plan:
    """An auction before anything is known of candidates: what each task wants [tasks, groups], and its numbers."""

    terms: Terms
    table: Table
    sizes: tuple[int, ...]
    wanted: NDArray[np.int64]
    numbers: AuctionNumbers

    @property
    def state(self) -> Address:
        """Kernels that are given this do nothing if the auction was called off."""
        return self.numbers.state


class Reused:
    """What several auctions of the same tensors can use: tables, and room for draws."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._cuda = kernels
        self._tables: dict[tuple[int, ...], Table] = {}
        self._drawings: dict[tuple[int, ...], Drawing] = {}

    def clear(self) -> None:
        """Frees the memory on the device."""
        self._tables.clear()
        self._drawings.clear()

    def table(self, places: Sequence[TensorPlace], groups: Sequence[Sequence[int]]) -> Table:
        """Returns a table of where merged tensors lie, without their values, with the group of each."""
        key = (len(groups), *(place.tensor for place in places))
        if key not in self._tables:
            group_of = {k: g for g, members in enumerate(groups) for k in members}
            ranges = [TensorRange(place, 0, place.size) for place in places]
            order = [group_of[k] for k in range(len(places))]
            self._tables[key] = Table(ranges, [()] * len(places), order, torch.float32, self._cuda.device)
        return self._tables[key]

    def drawing(self, sizes: tuple[int, ...], tries: int) -> Drawing:
        """Returns room for draws among groups of these sizes, with a window that is wider at every try."""
        key = (*sizes, tries)
        if key not in self._drawings:
            self._drawings[key] = Drawing(self._cuda, sizes, deviations=5.0 * 4**tries)
        return self._drawings[key]


class DeviceAuctioneer(Auctioneer):
    """Orders the auctions of a merge from a GPU. `guard` orders what may call an auction off, given its state."""

    def __init__(
        self,
        kernels: CudaKernels,
        reused: Reused,
        planes: DevicePlanes,
        guard: Callable[[Address], object] | None = None,
    ) -> None:
        self._cuda, self._reused, self._planes, self._guard = kernels, reused, planes, guard
        self.places = planes.places
        self.ordered: Auction | None = None

    def auctions(self, groups: Sequence[Sequence[int]], budgets: NDArray[np.int64], terms: Terms) -> Owners:
        if not self.places:
            return Owners({})
        sizes = tuple(sum(self.places[k].size for k in group) for group in groups)
        wanted = budgets.T.copy()
        table = self._reused.table(self.places, groups)
        plan = Plan(terms, table, sizes, wanted, AuctionNumbers(self._cuda, wanted))
        if self._guard is not None:
            self._guard(plan.state)
        self.ordered = Auction(self._cuda, self._reused, self._planes, plan)
        return self.ordered.result

    def keep_largest(
        self,
        tasks: Sequence[int],
        groups: Sequence[Sequence[int]],
        wanted: Sequence[Sequence[int]],
        spare: SpareRows,
        seed: int,
    ) -> Sequence[int]:
        if not self.places:
            return ()
        cuda, planes = self._cuda, self._planes
        sizes = tuple(sum(self.places[k].size for k in group) for group in groups)
        table = self._reused.table(self.places, groups)
        for tries in range(TRIES):
            state = cuda.zeros(1)
            draws = Draws(cuda, planes, table, self._reused.drawing(sizes, tries), state.data_ptr())
            cuda.open(table, planes.free)
            for row, (t, numbers) in enumerate(zip(tasks, wanted, strict=True)):
                lottery_state = lottery.lottery_state(seed, lottery.TIES_CUT, t + 1)
                counts = cuda.numbers(numbers), cuda.numbers(sizes)
                draws.cut(t, planes.free, counts, planes.row(row), lottery_state)
            if not state.any():
                return range(len(tasks))
        raise ExactnessError(NOT_FOUND)


class Auction:
    """All auctions of a merge, ordered from the device when this is made. `close` waits for them.

    `owners` has the row of what each task owns, which holds when it is closed. Kernels that are given the plan's
    state do nothing if the auction was called off, so what relies on its result may be ordered before it is closed.
    """

    def __init__(self, kernels: CudaKernels, reused: Reused, planes: DevicePlanes, plan: Plan) -> None:
        self._cuda, self._reused, self._planes, self.plan = kernels, reused, planes, plan
        bidders = np.flatnonzero(plan.wanted.any(axis=1))[::-1].tolist()
        first = planes.spare - len(plan.wanted)
        self.owners = {t: first + t if plan.terms.spare.extra else plan.terms.rows[t] for t in bidders}
        self._begin(0)
        # For all tensors: the tasks that own something, and the rows of it [2, owners].
        owning = self._cuda.numbers(np.array(sorted(self.owners.items())).T)
        self.result = Owners({place.tensor: owning for place in planes.places})

    def _begin(self, tries: int) -> None:
        plan, planes, numbers = self.plan, self._planes, self.plan.numbers
        self._draws = Draws(self._cuda, planes, plan.table, self._reused.drawing(plan.sizes, tries), plan.state)
        self._cuda.open(plan.table, planes.free)
        bid = self._bid_by_magnitude if plan.terms.keep == "magnitude" else self._bid_by_lottery
        bid()
        at_once = len(self.owners) <= AT_ONCE
        rows = (numbers.wanted(0), numbers.got(0), numbers.unowned, numbers.portion(0), numbers.remaining(0))
        tasks, groups = plan.wanted.shape
        self._cuda.divide((tasks, groups), rows, at_once, plan.state)
        if at_once:
            self._share_out(sorted(self.owners))
        self._copy = numbers.copy()

    def close(self, mark: Callable[[], object]) -> bool:
        """Waits, and does what could not be ordered in advance; `mark` marks candidates anew.

        Returns whether all went as ordered. If not, what was ordered after the auction was not done.
        """
        for tries in range(1, TRIES + 1):
            numbers = self.plan.numbers
            portions, self.result.leftovers, state = numbers.read(self._copy)
            if state == LEFT_OVER:
                numbers.reopen()
                self._share_out(np.flatnonzero(portions.any(axis=1)).tolist())
                *_, state = numbers.read(numbers.copy())
                if not state:
                    return False
            if not state:
                return tries == 1
            if tries < TRIES:  # a threshold was missed: all over again, with a wider window
                mark()  # the attempt may have written over the marks
                self.plan = replace(self.plan, numbers=AuctionNumbers(self._cuda, self.plan.wanted))
                self._begin(tries)
        raise ExactnessError(NOT_FOUND)

    def _bid_by_lottery(self) -> None:
        """Draws for one task after the other (rules 4 and 5); each draw counts the next task's candidates."""
        planes, owners, terms, numbers = self._planes, self.owners, self.plan.terms, self.plan.numbers
        marked = [*(planes.row(terms.rows[t]) for t in owners), planes.free]
        counted = [*(numbers.candidates(k) for k in range(len(owners))), numbers.unowned]
        self._cuda.count(self.plan.table, marked[0], planes.free, 0, counted[0])
        for k, (t, owned) in enumerate(owners.items()):
            then = Sequel(False, planes.free, marked[k + 1], counted[k + 1])
            state = self._lottery(lottery.KEEP, t)
            won, wanted, got = planes.row(owned), numbers.wanted(t), numbers.got(t)
            self._draws.pick(Pick(marked[k], won, state, wanted, counted[k], then, got))

    def _bid_by_magnitude(self) -> None:
        """Takes the largest magnitudes of one task after the other (rules 4 and 5)."""
        plan, planes, numbers = self.plan, self._planes, self.plan.numbers
        candidates, won = self._cuda.zeros(len(plan.sizes)), 0
        for t, owned in self.owners.items():
            plane, wanted = planes.row(plan.terms.rows[t]), numbers.table[t]
            self._cuda.count(plan.table, plane, planes.free, won, candidates.data_ptr())
            numbers.note(t, torch.minimum(wanted, candidates))
            won = planes.row(owned)
            self._draws.cut(t, plane, (wanted, candidates), won, self._lottery(lottery.KEEP, t))
        self._cuda.count(plan.table, planes.free, planes.free, won, numbers.unowned)

    def _share_out(self, tasks: Sequence[int]) -> None:
        """Gives what nobody owns to these tasks, by lottery (rule 6)."""
        planes, numbers = self._planes, self.plan.numbers
        for t in tasks:
            won, state = planes.row(self.owners[t]), self._lottery(lottery.LEFTOVERS, t)
            then = Sequel(True, planes.free)
            self._draws.pick(Pick(planes.free, won, state, numbers.portion(t), numbers.remaining(t), then))

    def _lottery(self, purpose: int, task: int) -> int:
        return lottery.lottery_state(self.plan.terms.seed, purpose, task + 1)


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws among the groups of a table, which write to `state` if a threshold lies outside its window."""

    cuda: CudaKernels
    planes: DevicePlanes
    table: Table
    drawing: Drawing
    state: Address

    def pick(self, pick: Pick) -> None:
        """Draws by lottery."""
        self.cuda.pick(self.table, self.planes.free, self.drawing, self.state, pick)

    def cut(
        self, task: int, plane: Address, numbers: tuple[Tensor, Tensor], owned: Address, lottery_state: int
    ) -> None:
        """Puts the candidates of largest magnitude into `owned`, equal ones by lottery.

        `numbers` are how many are wanted, and how many candidates there are [groups], which is reset.
        """
        cuda, planes, (wanted, candidates) = self.cuda, self.planes, numbers

        def walk() -> Iterable[Table]:
            return planes.values(self.table.groups)

        ranking = Ranking(walk, task, planes.wide, plane, planes.free, wanted, candidates)
        codes, left = cuda.threshold(ranking)
        left = torch.where(wanted >= candidates, 0, left)
        cuda.cut(ranking, codes, owned, planes.level)
        candidates.zero_()
        cuda.count(self.table, planes.level, planes.free, 0, candidates.data_ptr())
        self.pick(Pick(planes.level, owned, lottery_state, left.data_ptr(), candidates.data_ptr(), Sequel(True)))
