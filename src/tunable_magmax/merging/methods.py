"""The methods, each a small class. To add one: write it and list it at the end of this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import InputError
from tunable_magmax.merging.assignment import PlaneRows
from tunable_magmax.merging.budget import split, whole_numbers
from tunable_magmax.merging.kernels import Chunk, Counts, Cut, Kernels, Planes, TensorPlace
from tunable_magmax.merging.merged_elements import MergedElements, Owners
from tunable_magmax.merging.method import METHODS as METHODS
from tunable_magmax.merging.method import Method as Method
from tunable_magmax.merging.method import method_named
from tunable_magmax.merging.options import DEFAULTS, Options
from tunable_magmax.merging.singular import TaskMatrix, Triples, triples_of, united


class TunableMagmax(Method):
    """The paper's method: exactly n_t elements from task t, by largest magnitude (docs/method.md, section 3)."""

    weights = "shares"
    takes_budget = True
    reads = ("scope", "compare", "seed")
    owns = True

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        """With `reusable`, every task has a row in a place that no option moves, and the assignment leaves it alone."""
        super().__init__(options, tasks, reusable)
        self._proportions = whole_numbers(options.weights) if options.weights else (1,) * tasks
        wanted = [reusable or n > 0 for n in options.budget or self._proportions]
        self._rows = PlaneRows.for_tasks(wanted, lasting=reusable)
        self.plane_rows = self._rows.count
        self._active: list[bool] | None = None
        self._owners: Owners | None = None

    def set_element_count(self, elements: int) -> bool:
        before, self._active = self._active, self._with_a_budget(elements)
        # Only `compare: active` looks at who has a budget, and a tiny weight's share can become nothing as d shrinks.
        return self.options.compare == "active" and self.options.scope == "model" and self._active != before

    def expected_budget(self, elements: int) -> tuple[int, ...]:
        return self.options.budget or tuple(split(self._proportions, elements))

    def _with_a_budget(self, elements: int) -> list[bool]:
        return [n > 0 for n in self.expected_budget(elements)]

    def compared_and_rows(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        rows = self._rows.candidates
        if self.options.compare == "all":
            last = max((t for t in range(self.tasks) if rows[t] >= 0), default=-1)  # nobody later matters
            return [t <= last for t in range(self.tasks)], rows
        active = self._taking_part(size)
        return active, [row if taking_part else -1 for row, taking_part in zip(rows, active, strict=True)]

    def _taking_part(self, size: int) -> list[bool]:
        if self.options.scope == "tensor":
            return self._with_a_budget(size)
        assert self._active is not None
        return self._active

    def tasks_read(self, tensor: int, size: int) -> Sequence[int]:
        return [t for t, taking_part in enumerate(self._taking_part(size)) if taking_part]

    def decide(self, merged: MergedElements) -> None:
        places, budget = merged.places, self.options.budget
        if budget is not None and sum(budget) != merged.elements:
            raise InputError(
                f"the budget sums to {sum(budget):,}, but {merged.elements:,} elements are merged; "
                "make it sum to that, or give weights instead"
            )
        groups = _groups(places, self.options.scope)
        budgets = [
            list(budget) if budget is not None else split(self._proportions, sum(places[k].size for k in group))
            for group in groups
        ]
        self.budget = tuple(sum(each) for each in zip(*budgets, strict=True)) or (0,) * self.tasks
        self._owners = merged.assign(groups, budgets, self._rows, self.options.seed)
        self.leftovers = self._owners.leftovers

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        assert self._owners is not None
        assert planes is not None
        return kernels.gather(chunk, self._owners.rows[tensor], planes, out)


def _groups(places: Sequence[TensorPlace], scope: str) -> list[list[int]]:
    """Returns which of the merged tensors share a budget: all, or each has its own."""
    everything = list(range(len(places)))
    return [everything] if scope == "model" else [[k] for k in everything]


class Magmax(Method):
    """Each element from the task that moved it furthest; ties go to the later task."""

    owns = True

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        return kernels.largest(chunk, out)


class LastTask(Method):
    """The last task vector: sequential fine-tuning."""

    owns = True

    def tasks_read(self, tensor: int, size: int) -> Sequence[int]:
        return [self.tasks - 1]

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        return kernels.single(chunk, self.tasks - 1, out)


class TaskArithmetic(Method):
    """The sum of the task vectors, each times its factor."""

    weights = "factors"

    def tasks_read(self, tensor: int, size: int) -> Sequence[int]:
        return [t for t, factor in enumerate(self.factors()) if factor]

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        kept = [(t, factor) for t, factor in enumerate(self.factors()) if factor]
        kernels.weighted_sum(chunk, [t for t, _ in kept], [factor for _, factor in kept], out)
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

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        super().__init__(options, tasks, reusable)
        bounds = [0]
        for share_sum in accumulate(self.shares()):
            bounds.append(int(share_sum * 2**64))
        self.drawn = [t for t in range(tasks) if bounds[t + 1] > bounds[t]]
        self.tops = [bounds[t + 1] - 1 for t in self.drawn]

    def tasks_read(self, tensor: int, size: int) -> Sequence[int]:
        return self.drawn

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        lottery_state = lottery.lottery_state(self.options.seed, lottery.RANDOM_MIX, 0)
        return kernels.draw(chunk, self.drawn, self.tops, lottery_state, out)


class Ties(Method):
    """Trim each task vector to its largest elements, elect a sign by sum, take the mean of those that agree."""

    weights = "factors"
    reads = ("scope", "density", "normalize", "seed")
    counts_magnitudes = True

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        super().__init__(options, tasks, reusable)
        self.voters = [t for t, factor in enumerate(self.factors()) if factor]
        self._cuts: dict[int, list[Cut]] = {}

    def tasks_read(self, tensor: int, size: int) -> Sequence[int]:
        return self.voters

    def decide(self, merged: MergedElements) -> None:
        densities, places = self.options.densities(self.tasks), merged.places
        groups = _groups(places, self.options.scope)
        least = 1 if self.options.scope == "tensor" else 0  # of each tensor something, as mergekit does it
        sizes = [sum(places[k].size for k in group) for group in groups]
        wanted = [
            [max(min(least, size), int(densities[t] * size)) if densities[t] else 0 for t in self.voters]
            for size in sizes
        ]
        cuts = merged.largest(self.voters, groups, wanted, self.options.seed)
        self._cuts = {places[k].tensor: own for group, own in zip(groups, cuts, strict=True) for k in group}

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        factors = [self.factors()[t] for t in self.voters]
        shares = {"count": [1.0] * len(factors), "weights": factors, "none": [0.0] * len(factors)}
        states = [lottery.lottery_state(self.options.seed, lottery.TIES_CUT, t + 1) for t in self.voters]
        kernels.elect(chunk, self.voters, factors, shares[self.options.normalize], self._cuts[tensor], states, out)
        return None


class TaskSingularVectors(Average):
    """Of each matrix, the largest singular triples of every task, as many as its share; else the weighted mean."""

    default_scale = 1.0
    merges_matrices = True

    def ranks(self, shape: tuple[int, int]) -> list[int]:
        """Returns how many triples each task gives to a matrix: its share of the rank."""
        weights = whole_numbers(self.options.weights) if self.options.weights else (1,) * self.tasks
        return split(weights, min(shape))

    def matrix(self, tensor: int, shape: tuple[int, int], vector: Callable[[int], Tensor]) -> Tensor:
        tall = shape[0] > shape[1]
        short, long = sorted(shape)

        def task_matrix(task: int, rank: int) -> TaskMatrix:
            values = vector(task)
            matrix = (values.mT if tall else values).double()
            return TaskMatrix(matrix, self._triples(tensor, task, matrix), rank)

        made = united((task_matrix(task, rank) for task, rank in enumerate(self.ranks(shape)) if rank), short, long)
        if made is None:
            return torch.zeros_like(vector(0))
        return made.mT if tall else made

    def _triples(self, tensor: int, task: int, matrix: Tensor) -> Triples:
        """Returns all triples of a task's matrix: those of an earlier merge if there are any."""
        found = self.kept.get((tensor, task))
        if not isinstance(found, Triples):
            found = triples_of(matrix)
            if self.reusable:
                self.kept[tensor, task] = found
        return found


METHODS |= {
    "tunable_magmax": TunableMagmax,
    "magmax": Magmax,
    "average": Average,
    "random_mix": RandomMix,
    "ties": Ties,
    "task_arithmetic": TaskArithmetic,
    "last_task": LastTask,
    "tsv": TaskSingularVectors,
}


def read_options(tasks: int, **given: Any) -> Options:
    """Checks the options of a merge, which are those of `merge_state_dicts`, as far as that needs no checkpoints.

    >>> read_options(2, method="average", weights=[1, 3]).weights
    (Fraction(1, 1), Fraction(3, 1))
    """
    if given.get("scale") is None:
        given["scale"] = getattr(given.get("weights"), "scale", None)  # that of a preference
    if tasks == 0:
        raise InputError("there are no tasks: a merge needs a base and at least one task checkpoint")
    name = given["method"] = method_named(given.get("method", DEFAULTS["method"]))
    has_weights, has_budget = (given.get(key) is not None for key in ("weights", "budget"))
    if has_weights and has_budget:
        raise InputError("weights and a budget were both given; give one of them")
    if has_weights and METHODS[name].weights == "refused":
        raise InputError(f"method {name!r} takes no weights; leave them out or use tunable_magmax")
    if has_budget and not METHODS[name].takes_budget:
        raise InputError(f"method {name!r} takes no budget; only tunable_magmax does")
    if has_budget and given.get("scope") == "tensor":
        raise InputError(
            "a budget counts elements of the whole model: give weights with scope 'tensor', or use scope 'model'"
        )
    if given.get("scale") is None:
        given["scale"] = METHODS[name].default_scale
    return Options.read(tasks, **given)


def unused_options(options: Options) -> Iterator[str]:
    """Yields warnings about options that were set and that the method does not read.

    >>> list(unused_options(read_options(2, method="magmax", density=0.3)))
    ['density has no effect with magmax; it is for ties']
    """
    usual = Options.read(1)
    for name in ("scope", "compare", "density", "normalize", "seed"):
        if getattr(options, name) != getattr(usual, name) and name not in METHODS[options.method].reads:
            readers = ", ".join(known for known, kind in METHODS.items() if name in kind.reads)
            yield f"{name} has no effect with {options.method}; it is for {readers}"
