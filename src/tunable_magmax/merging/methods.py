"""The methods, each a small class behind one interface, and the table of them. To add one: write it and list it.

The engine (`stream.py`) surveys every chunk in a first walk, calls `decide` once, and then asks `combine` for the
merged task vector of each chunk, in any order and in several threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import InputError
from tunable_magmax.merging.auction import Auctioneer, Lot, Ownership, SpareRows, TensorPlace, Terms
from tunable_magmax.merging.budget import split, split_each, whole_numbers
from tunable_magmax.merging.kernels import Chunk, Kernels, Planes
from tunable_magmax.merging.options import Options

Counts = NDArray[np.int64] | None


class Method(ABC):
    """A way to make one task vector of many. Subclasses override what they need."""

    weights: ClassVar[str] = "refused"
    """What weights mean: "shares" (normalised), "factors" (as they are, default 1) or "refused"."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Options beyond weights and scale that shape the result."""

    owns: ClassVar[bool] = False
    """Whether every element has one task as its owner."""

    cuts_by_magnitude: bool = False
    """Whether elements are chosen by magnitude over all of the model or a tensor, which takes further walks."""

    plane_rows: int = 0
    """Rows of bit planes that the method works in."""

    def __init__(self, options: Options, tasks: int) -> None:
        self.options = options
        self.tasks = tasks

    budget: tuple[int, ...] | None = None
    leftovers: int | None = None

    def marks(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        """For the survey: which tasks are compared, and the plane row that marks each one's candidates (-1: none)."""
        return [False] * self.tasks, [-1] * self.tasks

    def assume(self, elements: int) -> bool:
        """Take `elements` as the number that is merged; return whether marks made before no longer hold."""
        return False

    def expected_budget(self, elements: int) -> tuple[int, ...] | None:
        """The budget if `elements` are merged; None for methods without one."""
        return None

    def decide(self, auctioneer: Auctioneer) -> None:  # noqa: B027, most have nothing to decide
        """What has to be settled over all elements before the first one can be merged."""

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        """The tasks (from 0) whose values `combine` looks at in a tensor; it may be given no others."""
        return range(self.tasks)

    @abstractmethod
    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        """Write the merged task vector of a chunk to `out`; return elements per task where each has an owner."""

    def shares(self) -> tuple[Fraction, ...]:
        """The weights, normalised; equal where none are given."""
        weights = self.options.weights or (Fraction(1),) * self.tasks
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def factors(self) -> tuple[float, ...]:
        """The weights as plain factors, 1 where none are given."""
        return tuple(float(weight) for weight in self.options.weights or (Fraction(1),) * self.tasks)


class TunableMagmax(Method):
    """The paper's method: exactly n_t elements from task t, by largest magnitude (rules 3 to 7)."""

    weights = "shares"
    reads = ("scope", "compare", "keep", "seed")
    owns = True

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        """With `reusable`, every task has a plane, in a place that no option moves, and the auction leaves it alone."""
        super().__init__(options, tasks)
        self.reusable = reusable
        self._proportions = whole_numbers(options.weights) if options.weights else (1,) * tasks
        wanted = [reusable or n > 0 for n in options.budget or self._proportions]
        self.rows = [sum(wanted[:t]) if wanted[t] else -1 for t in range(tasks)]
        self.cuts_by_magnitude = options.keep == "magnitude"
        self._spare = SpareRows.after(sum(wanted), reusable or self.cuts_by_magnitude, tasks if reusable else 0)
        self.plane_rows = self._spare.stop
        self._active: list[bool] | None = None
        self._owners: dict[int, Ownership] = {}

    def expected_budget(self, elements: int) -> tuple[int, ...]:
        return self.options.budget or tuple(split(self._proportions, elements))

    def assume(self, elements: int) -> bool:
        before = self._active
        self._active = [n > 0 for n in self.expected_budget(elements)]
        # Only `compare: active` looks at who has a budget, and a tiny weight's share can become nothing as d shrinks.
        return self.options.compare == "active" and self.options.scope == "model" and self._active != before

    def marks(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        if self.options.compare == "all":
            last = max((t for t in range(self.tasks) if self.rows[t] >= 0), default=-1)  # nobody later matters
            return [t <= last for t in range(self.tasks)], self.rows
        active = self._taking_part(size)
        return active, [row if taking_part else -1 for row, taking_part in zip(self.rows, active, strict=True)]

    def _taking_part(self, size: int) -> list[bool]:
        if self.options.scope == "tensor":
            return [n > 0 for n in self.expected_budget(size)]
        assert self._active is not None
        return self._active

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return [t for t, taking_part in enumerate(self._taking_part(size)) if taking_part]

    def groups(self, places: Sequence[TensorPlace]) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Rule 7: which of the merged tensors share a budget, and the budgets [groups, tasks]."""
        elements = sum(place.size for place in places)
        if self.options.budget is not None and sum(self.options.budget) != elements:
            raise InputError(
                f"the budget sums to {sum(self.options.budget):,}, but {elements:,} elements are merged; "
                "make it sum to that, or give weights instead"
            )
        everything = list(range(len(places)))
        groups = [everything] if self.options.scope == "model" else [[k] for k in everything]
        if self.options.budget is not None:
            budgets = np.array([self.options.budget] * len(groups), np.int64).reshape(-1, self.tasks)
        else:
            budgets = split_each(self._proportions, [sum(places[k].size for k in group) for group in groups])
        self.budget = tuple(budgets.sum(axis=0).tolist())
        return groups, budgets

    def decide(self, auctioneer: Auctioneer) -> None:
        groups, budgets = self.groups(auctioneer.places)
        lots = [Lot(tuple(group), tuple(budget)) for group, budget in zip(groups, budgets.tolist(), strict=True)]
        terms = Terms(tuple(self.rows), self._spare, self.options.seed, self.options.keep)
        owners = auctioneer.auctions(lots, terms)
        for group, ownership in zip(groups, owners, strict=True):
            self._owners.update((auctioneer.places[k].tensor, ownership) for k in group)
        self.leftovers = sum(ownership.leftovers for ownership in owners)

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        assert planes is not None
        rows = self._owners[tensor].rows
        kernels.gather(chunk, rows, planes, out)
        stop = chunk.slot + chunk.base.numel()
        owned = [planes.part(row, chunk.slot, stop) if row >= 0 else None for row in rows]
        counts = np.array([0 if plane is None else kernels.tally(plane, plane) for plane in owned], np.int64)
        for row in rows:
            if row >= 0:
                planes.release(row, chunk.slot, stop)
        return counts


class Magmax(Method):
    """Each element from the task that moved it furthest; ties go to the later task."""

    owns = True

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        return kernels.largest(chunk, out)


class LastTask(Method):
    """The last task vector: sequential fine-tuning."""

    owns = True

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return [self.tasks - 1]

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        kernels.difference(chunk.tasks[-1], chunk.base, out)
        counts = np.zeros(self.tasks, np.int64)
        counts[-1] = out.numel()
        return counts


class TaskArithmetic(Method):
    """The sum of the task vectors, each times its factor."""

    weights = "factors"

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return [t for t, factor in enumerate(self.factors()) if factor]

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        kept = self.combined(tensor, out.numel())
        kernels.weighted_sum(_only(chunk, kept), [self.factors()[k] for k in kept], out)
        return None


class Average(TaskArithmetic):
    """The weighted mean of the task vectors (model soup)."""

    weights = "shares"

    def factors(self) -> tuple[float, ...]:
        return tuple(float(share) for share in self.shares())


class RandomMix(Method):
    """Each element from a task drawn by lottery, with the weights as probabilities."""

    weights = "shares"
    reads = ("seed",)
    owns = True

    def __init__(self, options: Options, tasks: int) -> None:
        super().__init__(options, tasks)
        bounds = [0]
        for share_sum in accumulate(self.shares()):
            bounds.append(int(share_sum * 2**64))
        self.drawn = [t for t in range(tasks) if bounds[t + 1] > bounds[t]]
        self.tops = [bounds[t + 1] - 1 for t in self.drawn]

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.drawn

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        lottery_state = lottery.lottery_state(self.options.seed, lottery.RANDOM_MIX, 0)
        counts = np.zeros(self.tasks, np.int64)
        counts[self.drawn] = kernels.draw(_only(chunk, self.drawn), self.tops, lottery_state, out)
        return counts


class Ties(Method):
    """Trim each task vector to its largest elements, elect a sign by sum, take the mean of those that agree."""

    weights = "factors"
    reads = ("density", "seed")
    cuts_by_magnitude = True

    def __init__(self, options: Options, tasks: int) -> None:
        super().__init__(options, tasks)
        self.voters = [t for t, factor in enumerate(self.factors()) if factor]
        self._spare = SpareRows.after(len(self.voters), True)
        self.plane_rows = self._spare.stop
        self._rows: list[int] = []

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.voters

    def decide(self, auctioneer: Auctioneer) -> None:
        kept = int(self.options.density * auctioneer.elements)
        selection = auctioneer.selection(self._spare)
        selection.open()
        for row, t in enumerate(self.voters):
            lottery_state = lottery.lottery_state(self.options.seed, lottery.TIES_CUT, t + 1)
            selection.take_largest(t, selection.free, kept, auctioneer.elements, lottery_state)
            self._rows.append(selection.keep(row))

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        assert planes is not None
        factors = [self.factors()[t] for t in self.voters]
        kernels.elect(_only(chunk, self.voters), factors, self._rows, planes, out)
        for row in self._rows:
            planes.release(row, chunk.slot, chunk.slot + chunk.base.numel())
        return None


METHODS: dict[str, type[Method]] = {
    "tunable_magmax": TunableMagmax,
    "magmax": Magmax,
    "average": Average,
    "random_mix": RandomMix,
    "ties": Ties,
    "task_arithmetic": TaskArithmetic,
    "last_task": LastTask,
}


def _only(chunk: Chunk, tasks: Sequence[int]) -> Chunk:
    return Chunk(chunk.base, [chunk.tasks[t] for t in tasks], chunk.slot, chunk.element)
