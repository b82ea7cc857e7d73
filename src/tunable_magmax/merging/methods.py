"""The methods, each a small class behind one interface, and the table of them. To add one: write it and list it.

The engine (`stream.py`) surveys every chunk in a first walk, calls `decide` once, and then asks `combine` for the
merged task vector of each chunk, in any order and in several threads. A method works through the operations of the
kernels and of the auctioneer, which are the same on every device; where none fits, its `vector` is a formula in torch.
A method that is no formula of single elements is given its matrices whole (`whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax import lottery
from tunable_magmax.errors import InputError
from tunable_magmax.merging.auction import Auctioneer, Owners, SpareRows, Terms
from tunable_magmax.merging.budget import split, split_each, whole_numbers
from tunable_magmax.merging.kernels import Counts, TensorPlace, VectorKernels
from tunable_magmax.merging.options import DEFAULTS, MATCHED, Options, one_of
from tunable_magmax.merging.singular import Part, Triples, triples_of, united


class Method:
    """A way to make one task vector of many. Subclasses override what they need; many need `vector` alone.

    >>> import torch
    >>> class LowerMedian(Method):
    ...     def vector(self, vectors):
    ...         return torch.stack(list(vectors)).median(dim=0).values
    """

    weights: ClassVar[str] = "refused"
    """What weights mean: "shares" (normalised), "factors" (as they are, default 1) or "refused"."""

    takes_budget: ClassVar[bool] = False
    """Whether a budget may be given instead of weights."""

    reads: ClassVar[tuple[str, ...]] = ()
    """Options beyond weights and scale that shape the result."""

    owns: ClassVar[bool] = False
    """Whether every element has one task as its owner."""

    default_scale: ClassVar[float | str] = MATCHED
    """The scale of a merge for which none is given."""

    whole: ClassVar[bool] = False
    """Whether matrices are merged whole, by `matrix`, one after the other; other tensors go through `combine`. Such a
    method gives the same result on every machine within a tolerance, not to the bit."""

    cuts_by_magnitude: bool = False
    """Whether elements are chosen by magnitude over all of the model or a tensor, which takes further walks."""

    own_planes: ClassVar[bool] = False
    """Whether the method needs planes that no other merge uses, because it writes over marked candidates."""

    spare: SpareRows | None = None
    """The rows of bit planes behind the method's own; None for methods that need no planes."""

    budget: tuple[int, ...] | None = None

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        """With `reusable`, candidates that were marked serve for several merges, if the method marks any."""
        self.options = options
        self.tasks = tasks
        self.reusable = reusable
        self.kept: dict[tuple[int, int], Any] = {}
        """What merges of the same checkpoints share, by tensor and task, if the method is `reusable`."""

    @property
    def plane_rows(self) -> int:
        """Rows of bit planes that the method works in."""
        return 0 if self.spare is None else self.spare.stop

    @property
    def leftovers(self) -> int | None:
        """How many elements were nobody's candidates; None for methods without an auction."""
        return None

    def marks(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        """For the survey: which tasks are compared, and the plane row that marks each one's candidates (-1: none)."""
        return [False] * self.tasks, [-1] * self.tasks

    def assume(self, elements: int) -> bool:
        """Takes `elements` as the number that is merged; returns whether marks made before no longer hold."""
        return False

    def expected_budget(self, elements: int) -> tuple[int, ...] | None:
        """Returns the budget if `elements` are merged; None for methods without one."""
        return None

    def decide(self, auctioneer: Auctioneer) -> None:
        """Decides what concerns all elements, before the first one is merged. Most methods have nothing to decide."""

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        """Returns the tasks (from 0) whose values `combine` looks at in a tensor; it may be given no others."""
        return range(self.tasks)

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        """Writes the merged task vector of a chunk to `out`; returns elements per task where each has an owner."""
        return kernels.apply(chunk, self.vector, out)

    def vector(self, vectors: Sequence[Tensor]) -> Tensor:
        """Returns the merged task vector, of the tasks' vectors in one range of a tensor: an element-wise formula."""
        raise NotImplementedError(f"{type(self).__name__} has neither `vector` nor `combine`")

    def matrix(self, tensor: int, shape: tuple[int, int], vector: Callable[[int], Tensor]) -> Tensor:
        """Returns the merged task vector of a matrix, in its working type or float64, if the method is `whole`.

        `vector(t)` returns the vector of task t (from 0), of that shape; it holds until the next one is asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} is whole and has no `matrix`")

    def shares(self) -> tuple[Fraction, ...]:
        """Returns the weights, normalised; equal ones where none are given."""
        weights = self.options.weights or (Fraction(1),) * self.tasks
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def factors(self) -> tuple[float, ...]:
        """Returns the weights as plain factors, 1 where none are given."""
        return tuple(float(weight) for weight in self.options.weights or (Fraction(1),) * self.tasks)


class TunableMagmax(Method):
    """The paper's method: exactly n_t elements from task t, by largest magnitude (rules 3 to 7)."""

    weights = "shares"
    takes_budget = True
    reads = ("scope", "compare", "keep", "seed")
    owns = True

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        """With `reusable`, every task has a plane, in a place that no option moves, and the auction leaves it alone."""
        super().__init__(options, tasks, reusable)
        self._proportions = whole_numbers(options.weights) if options.weights else (1,) * tasks
        wanted = [reusable or n > 0 for n in options.budget or self._proportions]
        self.rows = [sum(wanted[:t]) if wanted[t] else -1 for t in range(tasks)]
        self.cuts_by_magnitude = options.keep == "magnitude"
        self.spare = SpareRows.after(sum(wanted), reusable or self.cuts_by_magnitude, tasks if reusable else 0)
        self._active: list[bool] | None = None
        self._owners: Owners | None = None

    @property
    def leftovers(self) -> int | None:
        return None if self._owners is None else self._owners.leftovers

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
        """Returns which of the merged tensors share a budget (rule 7), and the budgets [groups, tasks]."""
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
        assert self.spare is not None
        groups, budgets = self.groups(auctioneer.places)
        terms = Terms(tuple(self.rows), self.spare, self.options.seed, self.options.keep)
        self._owners = auctioneer.auctions(groups, budgets, terms)

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        assert self._owners is not None
        return kernels.gather(chunk, self._owners.rows[tensor], planes, out)


class Magmax(Method):
    """Each element from the task that moved it furthest; ties go to the later task."""

    owns = True

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        return kernels.largest(chunk, out)


class LastTask(Method):
    """The last task vector: sequential fine-tuning."""

    owns = True

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return [self.tasks - 1]

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        return kernels.single(chunk, self.tasks - 1, out)


class TaskArithmetic(Method):
    """The sum of the task vectors, each times its factor."""

    weights = "factors"

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return [t for t, factor in enumerate(self.factors()) if factor]

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
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

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.drawn

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        lottery_state = lottery.lottery_state(self.options.seed, lottery.RANDOM_MIX, 0)
        return kernels.draw(chunk, self.drawn, self.tops, lottery_state, out)


class Ties(Method):
    """Trim each task vector to its largest elements, elect a sign by sum, take the mean of those that agree."""

    weights = "factors"
    reads = ("scope", "density", "normalize", "seed")
    cuts_by_magnitude = True
    own_planes = True

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        super().__init__(options, tasks, reusable)
        self.voters = [t for t, factor in enumerate(self.factors()) if factor]
        self.spare = SpareRows.after(len(self.voters), True)
        self._rows: Sequence[int] = ()

    def combined(self, tensor: int, size: int) -> Sequence[int]:
        return self.voters

    def decide(self, auctioneer: Auctioneer) -> None:
        assert self.spare is not None
        densities, places = self.options.densities(self.tasks), auctioneer.places
        if self.options.scope == "model":
            groups, least = [list(range(len(places)))], 0
        else:
            groups, least = [[k] for k in range(len(places))], 1  # of each tensor something, as mergekit does it
        sizes = [sum(places[k].size for k in group) for group in groups]
        wanted = [
            [max(min(least, size), int(densities[t] * size)) if densities[t] else 0 for size in sizes]
            for t in self.voters
        ]
        self._rows = auctioneer.keep_largest(self.voters, groups, wanted, self.spare, self.options.seed)

    def combine(self, kernels: VectorKernels, chunk: Any, tensor: int, planes: Any, out: Any) -> Counts:
        factors = [self.factors()[t] for t in self.voters]
        shares = {"count": [1.0] * len(factors), "weights": factors, "none": [0.0] * len(factors)}
        kernels.elect(chunk, self.voters, factors, shares[self.options.normalize], self._rows, planes, out)
        return None


class TaskSingularVectors(Average):
    """Of each matrix, the largest singular triples of every task, as many as its share; else the weighted mean."""

    default_scale = 1.0
    whole = True

    def ranks(self, shape: tuple[int, int]) -> list[int]:
        """Returns how many triples each task gives to a matrix: its share of the rank, by rule 3."""
        weights = whole_numbers(self.options.weights) if self.options.weights else (1,) * self.tasks
        return split(weights, min(shape))

    def matrix(self, tensor: int, shape: tuple[int, int], vector: Callable[[int], Tensor]) -> Tensor:
        tall = shape[0] > shape[1]
        short, long = sorted(shape)

        def part(task: int, rank: int) -> Part:
            values = vector(task)
            matrix = (values.mT if tall else values).double()
            return Part(matrix, self._triples(tensor, task, matrix), rank)

        made = united((part(task, rank) for task, rank in enumerate(self.ranks(shape)) if rank), short, long)
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


METHODS: dict[str, type[Method]] = {
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
    name = one_of(given.get("method", DEFAULTS["method"]), "method", tuple(METHODS))
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
    for name in ("scope", "compare", "keep", "density", "normalize", "seed"):
        if getattr(options, name) != getattr(usual, name) and name not in METHODS[options.method].reads:
            readers = ", ".join(known for known, kind in METHODS.items() if name in kind.reads)
            yield f"{name} has no effect with {options.method}; it is for {readers}"
