"""Auctions whose planes lie on several workers. Counts, histograms and the few undecided lottery numbers travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.engines.crew import Call
from tunable_magmax.engines.parts import Share
from tunable_magmax.engines.worker import Step
from tunable_magmax.merging.auction import Lot, Ownership, Selection, SpareRows, TensorPlace, Terms, auction
from tunable_magmax.merging.local_auction import LEAST_ROOM

if TYPE_CHECKING:
    from tunable_magmax.engines.cluster_merge import Workers

ONLY_TELL = ("tally", "histogram")
"""What leaves the planes as they are: a successor need not do it."""


class ClusterAuctioneer:
    """A `Auctioneer` of several workers; `wide` says of every mergeable tensor whether it is float64."""

    def __init__(
        self, crew: Workers, shares: Sequence[Share], places: Sequence[TensorPlace], wide: Sequence[bool]
    ) -> None:
        self._crew, self.places, self._wide = crew, places, wide
        self._everybody = range(len(shares))
        self._holders: dict[int, list[int]] = {}
        for k, share in enumerate(shares):
            for part in share.parts:
                self._holders.setdefault(part.tensor, []).append(k)
        self._floors: list[ClusterGroupPlanes] = []

    @property
    def elements(self) -> int:
        return sum(place.size for place in self.places)

    def selection(self, spare: SpareRows) -> Selection:
        everything = [place.tensor for place in self.places]
        return Selection(self._floor(everything, self._everybody), spare)

    def auctions(self, lots: Sequence[Lot], terms: Terms) -> list[Ownership]:
        """Lots that are on one worker entirely are left to it; the others are held from here, one after the other."""
        owners: dict[int, Ownership] = {}
        alone: dict[int, list[int]] = {}
        shared: list[tuple[int, list[int]]] = []
        told = [Lot(tuple(self.places[k].tensor for k in lot.members), lot.budget) for lot in lots]
        for place, lot in enumerate(told):
            holders = sorted({k for tensor in lot.members for k in self._holders[tensor]})
            if len(holders) == 1:
                alone.setdefault(holders[0], []).append(place)
            else:
                shared.append((place, holders))
        calls = deque(
            Call.lasting(k, "auctions", [told[place] for place in places], terms) for k, places in alone.items()
        )
        for call, found in self._crew.each(calls):
            owners |= dict(zip(alone[call.worker], found, strict=True))
        for place, holders in shared:
            selection = Selection(self._floor(told[place].members, holders), terms.spare)
            owners[place] = auction(selection, terms.rows, told[place].budget, terms.seed, terms.keep)
        return [owners[place] for place in range(len(lots))]

    def finish(self) -> None:
        """Have everything done that was only noted down."""
        for floor in self._floors:
            floor.finish()

    def _floor(self, tensors: Sequence[int], holders: Sequence[int]) -> ClusterGroupPlanes:
        wide = any(self._wide[k] for k in tensors)
        floor = ClusterGroupPlanes(
            self._crew, holders, tuple(tensors) if len(tensors) < len(self.places) else None, wide
        )
        self._floors.append(floor)
        return floor


class ClusterGroupPlanes:
    """A `GroupPlanes` on several workers. What has no result is noted down and goes with the next question."""

    room = LEAST_ROOM
    """In all: 2.4 MB that travel, and what each worker has memory for, should they all be its own."""

    def __init__(self, crew: Workers, holders: Sequence[int], tensors: tuple[int, ...] | None, wide: bool) -> None:
        self._crew, self._holders, self._tensors, self.wide = crew, holders, tensors, wide
        self._noted: list[Step] = []

    def open(self, free: int) -> None:
        self._noted.append(("open", (free,)))

    def tally(self, row: int, other: int) -> int:
        return sum(self._ask("tally", row, other))

    def claim(self, row: int, free: int, won: int) -> None:
        self._noted.append(("claim", (row, free, won)))

    def retire(self, free: int, won: int) -> None:
        self._noted.append(("retire", (free, won)))

    def unite(self, row: int, more: int) -> None:
        self._noted.append(("unite", (row, more)))

    def histogram(self, task: int, row: int, free: int, shift: int, bits: int, prefix: int) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.sum(self._ask("histogram", task, row, free, shift, bits, prefix), axis=0)
        return counts

    def cut(self, task: int, row: int, free: int, low: int, high: int, won: int, level: int) -> None:
        self._noted.append(("cut", (task, row, free, low, high, won, level)))

    def narrow(
        self, task: int, row: int, free: int, low: int, high: int, won: int, level: int, shift: int, bits: int
    ) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.sum(
            self._ask("narrow", task, row, free, low, high, won, level, shift, bits), axis=0
        )
        return counts

    def sift(
        self, task: int, row: int, free: int, low: int, high: int, won: int, level: int, lottery_state: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        found = self._ask("sift", task, row, free, low, high, won, level, lottery_state)
        return np.concatenate([codes for codes, _ in found]), np.concatenate([numbers for _, numbers in found])

    def award_listed(self, won: int, code: int, highest: int) -> None:
        self._noted.append(("award_listed", (won, code, highest)))

    def look(
        self, row: int, free: int, won: int, lottery_state: int, low: int, high: int
    ) -> tuple[int, NDArray[np.uint64]]:
        found = self._ask("look", row, free, won, lottery_state, low, high)
        return sum(winners for winners, _ in found), np.concatenate([numbers for _, numbers in found])

    def award(self, won: int, highest: int) -> None:
        self._noted.append(("award", (won, highest)))

    def finish(self) -> None:
        """Have everything done that was only noted down."""
        if self._noted:
            self._send(self._noted, self._noted)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        steps = [*self._noted, (name, arguments)]
        return self._send(steps, self._noted if name in ONLY_TELL else steps)

    def _send(self, steps: list[Step], lasting: list[Step]) -> list[Any]:
        self._noted = []
        head = (self._tensors, self.wide)
        replay = (*head, lasting) if lasting else None
        calls = deque(Call(k, "floor", (*head, steps), replay) for k in self._holders)
        return [answer for _, answer in self._crew.each(calls)]
