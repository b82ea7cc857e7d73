"""Rules 4 to 6 on a GPU: all groups of tensors at once, and the host looks at the result alone.

A draw decides lottery numbers against a window around the expected threshold. A threshold outside the window is
noticed, and everything is drawn again with a wider one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.kernels.cuda import Address, CudaKernels, Drawing, Segment, Sequel, Table, row_of
from tunable_magmax.merging.methods import Ties, TunableMagmax
from tunable_magmax.merging.ownership import Piece, Stretch

SPARE = 2
"""Rows of the planes beyond the tasks': what is free, and equal magnitudes."""
TRIES = 4

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


class Auctions:
    """Holds auctions, and keeps what the next one of the same tensors can use again."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._cuda = kernels
        self._tables: dict[tuple[int, int], Table] = {}
        self._drawings: dict[tuple[int, ...], Drawing] = {}

    def clear(self) -> None:
        """Let go of memory on the device."""
        self._tables.clear()
        self._drawings.clear()

    def geometry(self, stretches: Sequence[Stretch], groups: Sequence[Sequence[int]]) -> Table:
        """Where merged tensors lie, without their values, with the group of each."""
        key = (len(groups), len(stretches))
        if key not in self._tables:
            group_of = {k: g for g, members in enumerate(groups) for k in members}
            segments = [segment_of(Piece(s, 0, s.size), (), group_of[k]) for k, s in enumerate(stretches)]
            self._tables[key] = Table(segments, torch.float32, self._cuda.device)
        return self._tables[key]

    def hold(self, method: TunableMagmax, floor: Floor, mark: Callable[[], object]) -> dict[int, int]:
        """All auctions of a method; the row of what each task owns. `mark` marks candidates anew."""
        groups, budgets = method.groups(floor.stretches)
        method.leftovers = 0
        if not floor.stretches:
            return {}
        table = self.geometry(floor.stretches, groups)
        sizes = [sum(floor.stretches[k].size for k in group) for group in groups]
        wanted = np.array(budgets, np.int64).T.copy()
        for tries in range(TRIES):
            attempt = _Attempt(self._cuda, floor, table, self._drawing(sizes, tries))
            owners, counts, unowned, missed = attempt.bid(method, wanted)
            method.leftovers = int(unowned.sum())
            if method.leftovers and not missed:
                attempt.share_out(method.options.seed, owners, wanted - counts, unowned)
                missed = attempt.missed
            if not missed:
                return owners
            mark()  # the attempt may have written over the marks
        raise ExactnessError("the lottery's threshold was not found; please report this")

    def trim(self, method: Ties, floor: Floor) -> None:
        """Keep each task's largest elements."""
        if not floor.stretches:
            return
        table = self.geometry(floor.stretches, [range(len(floor.stretches))])
        wanted = self._cuda.numbers([int(method.options.density * floor.elements)])
        for tries in range(TRIES):
            attempt = _Attempt(self._cuda, floor, table, self._drawing([floor.elements], tries))
            self._cuda.open(table, floor.free)
            for t in method.voters:
                drum = lottery.drum(method.options.seed, lottery.TIES_CUT, t + 1)
                attempt.cut(t, floor.free, wanted, self._cuda.numbers([floor.elements]), floor.row(t), drum)
            if not attempt.missed:
                return
        raise ExactnessError("the lottery's threshold was not found; please report this")

    def _drawing(self, sizes: Sequence[int], tries: int) -> Drawing:
        key = (*sizes, tries)
        if key not in self._drawings:
            self._drawings[key] = Drawing(self._cuda, sizes, deviations=5.0 * 4**tries)
        self._drawings[key].failed.zero_()
        return self._drawings[key]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An auction with windows of a given width: it may miss a threshold."""

    cuda: CudaKernels
    floor: Floor
    table: Table
    drawing: Drawing

    @property
    def missed(self) -> bool:
        return bool(self.drawing.failed)

    def bid(
        self, method: TunableMagmax, wanted: NDArray[np.int64]
    ) -> tuple[dict[int, int], NDArray[np.int64], NDArray[np.int64], bool]:
        """Rules 4 and 5: the rows of owned elements, how many each task has [tasks, groups], how many nobody has
        [groups], and whether a draw has missed."""
        tasks, groups = wanted.shape
        asked = self.cuda.numbers(wanted)
        # What the host looks at is in one table: the counts, what is left, and whether a draw has missed.
        told = self.cuda.zeros(tasks + 2, groups)
        bidders = [t for t in reversed(range(tasks)) if wanted[t].any()]
        owners = {t: self.floor.spare - tasks + t if method.reusable else method.rows[t] for t in bidders}
        self.cuda.open(self.table, self.floor.free)
        bid = self._bid_by_magnitude if method.options.keep == "magnitude" else self._bid_by_lottery
        bid(method, owners, asked, told)
        told[-1] = self.drawing.failed
        found = told.cpu().numpy()
        return owners, found[:-2], found[-2], bool(found[-1].any())

    def _bid_by_lottery(self, method: TunableMagmax, owners: Mapping[int, int], asked: Tensor, told: Tensor) -> None:
        """Draw for one task after the other; each draw also counts the next task's candidates, or what is left."""
        cuda, floor = self.cuda, self.floor
        planes = [*(floor.row(method.rows[t]) for t in owners), floor.free]
        candidates = cuda.zeros(2, asked.shape[1])
        counted = [*(row_of(candidates, k % 2) for k in range(len(owners))), row_of(told, len(asked))]
        cuda.count(self.table, planes[0], floor.free, 0, counted[0])
        for k, (t, owned) in enumerate(owners.items()):
            drum = lottery.drum(method.options.seed, lottery.KEEP, t + 1)
            sequel = Sequel(False, floor.free, planes[k + 1], counted[k + 1])
            wish, got = row_of(asked, t), row_of(told, t)
            self._pick(planes[k], floor.row(owned), drum, wish, counted[k], got, sequel)

    def _bid_by_magnitude(self, method: TunableMagmax, owners: Mapping[int, int], asked: Tensor, told: Tensor) -> None:
        """Take the largest magnitudes for one task after the other."""
        cuda, floor = self.cuda, self.floor
        candidates, won = cuda.zeros(asked.shape[1]), 0
        for t, owned in owners.items():
            drum = lottery.drum(method.options.seed, lottery.KEEP, t + 1)
            plane = floor.row(method.rows[t])
            cuda.count(self.table, plane, floor.free, won, candidates.data_ptr())
            told[t] = torch.minimum(asked[t], candidates)
            won = floor.row(owned)
            self.cut(t, plane, asked[t], candidates, won, drum)
        cuda.count(self.table, floor.free, floor.free, won, row_of(told, len(asked)))

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
        self._pick(floor.level, owned, drum, left.data_ptr(), candidates.data_ptr(), 0, Sequel(True))

    def share_out(
        self, seed: int, owners: Mapping[int, int], left: NDArray[np.int64], unowned: NDArray[np.int64]
    ) -> None:
        """Rule 6: what nobody owns, by lottery, to the tasks with budget left."""
        floor = self.floor
        portions, remaining = [], [unowned]
        for rest in left:
            portions.append(np.minimum(rest, remaining[-1]))
            remaining.append(remaining[-1] - portions[-1])
        asked, candidates = self.cuda.numbers(portions), self.cuda.numbers(remaining)
        for t, portion in enumerate(portions):
            if portion.any():
                drum = lottery.drum(seed, lottery.LEFTOVERS, t + 1)
                wish, counted = row_of(asked, t), row_of(candidates, t)
                self._pick(floor.free, floor.row(owners[t]), drum, wish, counted, 0, Sequel(True, floor.free))

    def _pick(
        self,
        plane: Address,
        won: Address,
        drum: int,
        wanted: Address,
        candidates: Address,
        counts: Address,
        then: Sequel,
    ) -> None:
        self.cuda.pick(self.table, plane, self.floor.free, won, drum, self.drawing, wanted, candidates, counts, then)


def segment_of(piece: Piece, values: Sequence[Tensor], group: int = 0) -> Segment:
    """A piece of a tensor, as the kernels' tables list it."""
    stretch, start = piece.stretch, piece.start
    return Segment(values, piece.stop - start, stretch.slot + start, stretch.element + start, stretch.tensor, group)
