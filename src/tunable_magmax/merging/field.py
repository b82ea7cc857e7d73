"""What methods decide on: the merged tensors with their planes, and the auctions that may be held there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tunable_magmax.merging.floor import LocalFloor
from tunable_magmax.merging.kernels import Kernels, Planes
from tunable_magmax.merging.ownership import Each, Ownership, Piece, Selection, SpareRows, Stretch, auction


@dataclass(frozen=True, slots=True)
class Lot:
    """A group of merged tensors (places in the field's `stretches`) and the budget of their auction."""

    members: tuple[int, ...]
    budget: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What all auctions of a merge have in common: the tasks' rows, the spare ones, the seed, and who is kept."""

    rows: tuple[int, ...]
    spare: SpareRows
    seed: int
    keep: str


class Field(Protocol):
    """What the survey has found, and what may be done with it."""

    @property
    def stretches(self) -> Sequence[Stretch]:
        """The merged tensors."""

    @property
    def elements(self) -> int:
        """How many elements they have."""

    def selection(self, spare: SpareRows) -> Selection:
        """Selection among all merged tensors."""

    def auctions(self, lots: Sequence[Lot], terms: Terms) -> list[Ownership]:
        """An auction for each lot."""


@dataclass(frozen=True, slots=True)
class LocalField:
    """A `Field` whose planes are in this process."""

    kernels: Kernels
    planes: Planes | None
    stretches: Sequence[Stretch]
    wide: Sequence[bool]
    pair: Callable[[int, Piece], tuple[Tensor, Tensor]]
    chunk: int
    room: int
    """How many elements a selection by magnitude may list."""
    each: Each[Any]

    @property
    def elements(self) -> int:
        return sum(stretch.size for stretch in self.stretches)

    def selection(self, spare: SpareRows) -> Selection:
        everything = range(len(self.stretches))
        return Selection(self.floor(everything, any(self.wide), self.each), spare)

    def auctions(self, lots: Sequence[Lot], terms: Terms) -> list[Ownership]:
        # Many lots share the threads among themselves; a single one uses them all inside.
        inside, outside = (self.each, _one_by_one) if len(lots) == 1 else (_one_by_one, self.each)

        def settle(lot: Lot) -> Ownership:
            floor = self.floor(lot.members, any(self.wide[k] for k in lot.members), inside)
            return auction(Selection(floor, terms.spare), terms.rows, lot.budget, terms.seed, terms.keep)

        return outside(settle, lots)

    def floor(self, members: Sequence[int], wide: bool, each: Each[Any]) -> LocalFloor:
        """Where an auction of some of the merged tensors takes place."""
        assert self.planes is not None
        chosen = [self.stretches[k] for k in members]
        return LocalFloor(self.kernels, self.planes, chosen, each, self.pair, self.chunk, wide, self.room)


def _one_by_one(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [work(item) for item in items]
