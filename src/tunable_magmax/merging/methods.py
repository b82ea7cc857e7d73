"""What a merge method is, and the methods, each a small class. To add one: write it and list it in `METHODS`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from importlib.metadata import entry_points
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tunable_magmax.errors import InputError, TmxError, closest
from tunable_magmax.lottery import RANDOM_MIX, TIES_CUT, lottery_state
from tunable_magmax.merging.budget import in_order, split, whole_numbers
from tunable_magmax.merging.kernels import Chunk, Counts, Kernels, PlaneRows, Vote
from tunable_magmax.merging.options import MATCHED, USUAL, Options
from tunable_magmax.merging.owners import MergedElements

if TYPE_CHECKING:
    from tunable_magmax.merging.cuts import Cut

ENTRY_POINTS = "tunable_magmax.methods"
"""The group of entry points by which installed packages add methods."""


class Method:
    """A way to make one task vector of many. A subclass overrides what it needs; many need `vector` alone.

    A method does not know where a merge runs: it works through the operations of the kernels and of `MergedElements`,
    which are the same on every device and on a cluster.

    >>> import torch, tunable_magmax as tmx
    >>> class LowerMedian(Method):
    ...     def vector(self, vectors):
    ...         return torch.stack(list(vectors)).median(dim=0).values
    >>> base, tasks = {"w": torch.zeros(2)}, [{"w": torch.tensor([t, -t])} for t in (1.0, 2.0, 9.0)]
    >>> tmx.merge_state_dicts(base, tasks, method=LowerMedian, scale=1).state_dict["w"]
    tensor([ 2., -2.])
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

    merges_matrices: ClassVar[bool] = False
    """Whether matrices are merged whole, by `matrix`, one after the other; other tensors go through `combine`. Such a
    method gives the same result on every machine within a tolerance, not to the bit."""

    rows: PlaneRows | None = None
    """The rows of bit planes that the method works in; the survey marks candidates in them."""

    counts_magnitudes: ClassVar[bool] = False
    """Whether the method asks for the elements of largest magnitude, which takes further walks and some memory."""

    budget: tuple[int, ...] | None = None
    """How many elements each task gives, once that is decided."""

    elements: int = 0
    """How many elements are merged, as far as it is known."""

    leftovers: int | None = None
    """How many elements were nobody's candidates; None for methods without an assignment."""

    owned: Mapping[int, Sequence[int]] = {}
    """The plane rows that hold what each task owns, by tensor (-1: no row), where the method has decided that. Merged
    vectors are gathered by these; `combine` is for methods without."""

    def __init__(self, options: Options, tasks: int, kept: dict[tuple[int, int], Any] | None = None) -> None:
        """`kept` is what several merges of the same checkpoints share, by tensor and task (their number: all).

        None: there is one merge, and candidates that were marked need not last.
        """
        self.options = options
        self.tasks = tasks
        self.kept = kept

    def compared(self, size: int) -> Sequence[bool]:
        """Returns which tasks are compared in a tensor of this size, for those that are candidates of its elements."""
        return [False] * self.tasks

    def expected_budget(self, elements: int) -> tuple[int, ...] | None:
        """Returns the budget if so many elements are merged; None for methods without one."""
        return None

    def decide(self, merged: MergedElements) -> None:
        """Decides what concerns all elements, before the first one is merged. Most methods have nothing to decide."""

    def tasks_read(self, size: int) -> Sequence[int]:
        """Returns the tasks (from 0) whose values `combine` reads of a tensor of this size; it may get no others."""
        return range(self.tasks)

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, out: Tensor) -> Counts:
        """Writes the merged task vector of a chunk to `out`; returns elements per task where each has an owner."""
        out.copy_(self._checked_vector([values - chunk.base for values in chunk.tasks]))
        return None

    def _checked_vector(self, vectors: Sequence[Tensor]) -> Tensor:
        """Returns what `vector` makes: if it fails, or makes another shape, its author is told."""
        own = f"`vector` of the method {type(self).__name__}"
        try:
            made = self.vector(vectors)
        except (TmxError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InputError(f"{own} fails ({type(error).__name__}: {error}); --debug shows where") from error
        if not isinstance(made, Tensor) or made.shape != vectors[0].shape:
            shape = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise InputError(
                f"{own} returns {shape} of vectors of shape {list(vectors[0].shape)}: return a value for each element"
            )
        return made

    def vector(self, vectors: Sequence[Tensor]) -> Tensor:
        """Returns the merged task vector, of the tasks' vectors in one range of a tensor: an element-wise formula."""
        raise InputError(f"the method {type(self).__name__} has neither `vector` nor `combine`: give it one of them")

    def matrix(self, tensor: int, shape: tuple[int, int], vector: Callable[[int], Tensor]) -> Tensor:
        """Returns the merged task vector of a matrix, new, in its working type or float64, if it `merges_matrices`.

        `vector(t)` returns the vector of task t (from 0), of that shape; it holds until the next one is asked for.
        """
        raise InputError(f"the method {type(self).__name__} merges matrices and has no `matrix`: give it one")

    @cached_property
    def proportions(self) -> tuple[int, ...]:
        """The weights as whole numbers in the same proportion; equal ones where none are given."""
        return whole_numbers(self.options.weights or (Fraction(1),) * self.tasks)

    def shares(self) -> tuple[Fraction, ...]:
        """Returns the weights as exact fractions, normalised."""
        return tuple(Fraction(weight, sum(self.proportions)) for weight in self.proportions)

    def factors(self) -> tuple[float, ...]:
        """Returns the weights as plain factors, 1 where none are given."""
        return tuple(float(weight) for weight in self.options.weights or (Fraction(1),) * self.tasks)


class TunableMagmax(Method):
    """The paper's method: exactly n_t elements from task t, by largest magnitude (docs/method.md, section 3)."""

    weights = "shares"
    takes_budget = True
    reads = ("scope", "compare", "seed")
    owns = True

    def __init__(self, options: Options, tasks: int, kept: dict[tuple[int, int], Any] | None = None) -> None:
        """For several merges, every task has a row that no option moves and that the assignment leaves as it is."""
        super().__init__(options, tasks, kept)
        several = kept is not None
        wanted = [several or n > 0 for n in options.budget or self.proportions]
        self.rows: PlaneRows = PlaneRows.for_tasks(wanted, lasting=several)

    def expected_budget(self, elements: int) -> tuple[int, ...]:
        return self.options.budget or tuple(split(self.proportions, elements))

    def compared(self, size: int) -> Sequence[bool]:
        if self.options.compare == "active":
            return self._taking_part(size)
        last = max((t for t, row in enumerate(self.rows.candidates) if row >= 0), default=-1)  # nobody later matters
        return [t <= last for t in range(self.tasks)]

    def _taking_part(self, size: int) -> list[bool]:
        """Returns which tasks have a budget where a tensor of this size is."""
        elements = size if self.options.scope == "tensor" else self.elements
        return [n > 0 for n in self.expected_budget(elements)]

    def tasks_read(self, size: int) -> Sequence[int]:
        return [t for t, taking_part in enumerate(self._taking_part(size)) if taking_part]

    def decide(self, merged: MergedElements) -> None:
        budget, groups = self.options.budget, merged.groups(self.options.scope)
        elements = sum(group.elements for group in groups)
        if budget is not None and sum(budget) != elements:
            raise InputError(f"the budget sums to {sum(budget):,}, but {elements:,} elements are merged")
        budgets = [self.expected_budget(group.elements) for group in groups]
        self.budget = tuple(map(sum, zip(*budgets, strict=True))) or (0,) * self.tasks
        owners = merged.assign(groups, budgets, self.rows, self.options.seed)
        self.owned = {tensor: own.rows for group, own in zip(groups, owners, strict=True) for tensor in group.tensors}
        self.leftovers = sum(own.leftovers for own in owners)


class Magmax(Method):
    """Each element from the task that moved it furthest; ties go to the later task."""

    owns = True

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, out: Tensor) -> Counts:
        return kernels.largest(chunk, out)


class TaskArithmetic(Method):
    """The sum of the task vectors, each times its factor."""

    weights = "factors"

    @cached_property
    def voters(self) -> list[int]:
        """The tasks whose factor is not 0."""
        return [t for t, factor in enumerate(self.factors()) if factor]

    def tasks_read(self, size: int) -> Sequence[int]:
        return self.voters

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, out: Tensor) -> Counts:
        factors = self.factors()
        kernels.weighted_sum(chunk, self.voters, [factors[t] for t in self.voters], out)
        return None


class Average(TaskArithmetic):
    """The weighted mean of the task vectors (model soup)."""

    weights = "shares"

    def factors(self) -> tuple[float, ...]:
        return tuple(float(share) for share in self.shares())


class LastTask(Method):
    """The last task vector: sequential fine-tuning."""

    owns = True

    def tasks_read(self, size: int) -> Sequence[int]:
        return [self.tasks - 1]

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, out: Tensor) -> Counts:
        torch.sub(chunk.tasks[-1], chunk.base, out=out)
        return np.array([*[0] * (self.tasks - 1), out.numel()])


class RandomMix(Method):
    """Each element from a task drawn by lottery, with the weights as probabilities."""

    weights = "shares"
    reads = ("seed",)
    owns = True

    @cached_property
    def tops(self) -> dict[int, int]:
        """The largest key by which each task is drawn; none for a task that no key draws."""
        bounds = [int(share_sum * 2**64) for share_sum in accumulate(self.shares(), initial=Fraction(0))]
        return {t: top - 1 for t, (bound, top) in enumerate(pairwise(bounds)) if top > bound}

    def tasks_read(self, size: int) -> Sequence[int]:
        return list(self.tops)

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, out: Tensor) -> Counts:
        start = lottery_state(self.options.seed, RANDOM_MIX, 0)
        return kernels.draw(chunk, list(self.tops), list(self.tops.values()), start, out)


class Ties(TaskArithmetic):
    """Trim each task vector to its largest elements, elect a sign by sum, take the mean of those that agree."""

    reads = ("scope", "density", "normalize", "seed")
    counts_magnitudes = True

    def decide(self, merged: MergedElements) -> None:
        densities, scope, seed = self.options.densities(self.tasks), self.options.scope, self.options.seed
        least = 1 if scope == "tensor" else 0  # of each tensor something, as mergekit does it
        self._votes: dict[int, list[Vote]] = {}
        for group in merged.groups(scope):
            size = group.elements
            kept = {t: max(min(least, size), int(densities[t] * size)) if densities[t] else 0 for t in self.voters}
            cuts = merged.largest(group, kept, seed)
            votes = [self._vote(t, cuts[t]) for t in self.voters]
            self._votes |= dict.fromkeys(group.tensors, votes)

    def _vote(self, task: int, cut: Cut) -> Vote:
        factor = self.factors()[task]
        share = {"count": 1.0, "weights": factor, "none": 0.0}[self.options.normalize]
        return Vote(task, factor, share, cut, lottery_state(self.options.seed, TIES_CUT, task + 1))

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, out: Tensor) -> Counts:
        kernels.elect(chunk, self._votes[tensor], out)
        return None


class TaskSingularVectors(Average):
    """Of each matrix, the largest singular triples of every task, as many as its share; else the weighted mean."""

    default_scale = 1.0
    merges_matrices = True

    def ranks(self, shape: tuple[int, int]) -> list[int]:
        """Returns how many triples each task gives to a matrix: its share of the rank."""
        return split(self.proportions, min(shape))

    def matrix(self, tensor: int, shape: tuple[int, int], vector: Callable[[int], Tensor]) -> Tensor:
        from tunable_magmax.merging.singular import Triples, triples_of, united

        ranks, tall = self.ranks(shape), shape[0] > shape[1]
        kept: dict[tuple[int, int], Any] = {} if self.kept is None else self.kept
        latest: tuple[list[int], Tensor] | None = kept.get((tensor, self.tasks))
        if latest is not None and latest[0] == ranks:  # a merge with another scale had the same
            return latest[1].clone()

        def part(task: int, rank: int) -> tuple[Tensor, Triples]:
            values = vector(task)
            matrix = (values.mT if tall else values).double()
            triples = kept.get((tensor, task)) or triples_of(matrix)
            if self.kept is not None:
                self.kept[tensor, task] = triples
            return matrix, triples.largest(rank)

        made = united((part(task, rank) for task, rank in enumerate(ranks) if rank), *sorted(shape))
        merged = torch.zeros_like(vector(0)) if made is None else (made.mT if tall else made).to(vector(0).dtype)
        if self.kept is not None:
            self.kept[tensor, self.tasks] = ranks, merged.clone()
        return merged


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
"""All methods of this package by name."""
_ADDED: dict[str, type[Method]] = {}
"""Methods of users, by the names that reports give them; each is added when it is first named."""


def method_class(name: str) -> type[Method]:
    """Returns a method by its name, whether it is of this package or a user's."""
    return METHODS.get(name) or _ADDED[method_named(name)]


def method_named(name: Any, others: Sequence[str] = ()) -> str:
    """Returns the name that `method_class` knows a method by: given as that name, as an entry point's, or as a class.

    A file is never run here, for a name may come from a configuration that somebody else has written: `load_method`
    does that, and only where a user names the file. `others`: what else might have been meant by an unknown name.
    """
    if isinstance(name, type):
        return _added(name, f"{name.__module__}:{name.__qualname__}")
    if isinstance(name, str) and (name in METHODS or name in _ADDED):
        return name
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if isinstance(name, str) and name in points:
        try:
            return _added(points[name].load(), name)
        except Exception as error:
            raise InputError(f"method {name!r}, the entry point {points[name].value}: {error!r}") from error
    known = [*others, *METHODS, *points]
    if names_file(name):
        hint = f": it is in a file, which only you can have run: --method FOLDER/{name}"
    elif str(name).endswith(".py"):
        hint = f": name the class in the file, too: --method {name}:CLASS"
    else:
        hint = closest(str(name), known)
    raise InputError(f"unknown method {name!r}{hint}; known: {', '.join(known)}")


def files_of_method(name: str) -> list[Path]:
    """Returns the file of a user's method, whose changes make other merges of it; none for those of this package."""
    module = sys.modules.get(_ADDED[name].__module__) if name in _ADDED else None
    file = getattr(module, "__file__", None)
    return [] if file is None else [Path(file)]


def place_of_method(name: str) -> str:
    """Returns what `load_method` takes in another process: of a method in a file with the path, of others the name."""
    return f"{files_of_method(name)[0].parent}/{name}" if names_file(name) else name


def names_file(name: Any) -> bool:
    """Returns whether a method is given, or reported, as a class in a file, "FILE.py:Class"."""
    return isinstance(name, str) and name.rpartition(":")[0].endswith(".py")


def load_method(name: str, others: Sequence[str] = ()) -> str:
    """Returns the name of a method for `merge_checkpoints`; of "FILE.py:Class", runs the file and adds its class.

    The file is run like any program: name only files that you trust. The name that is returned, and reported, has no
    folder: equal merges give equal bytes wherever the file lies.
    """
    if not names_file(name):
        return method_named(name, others)
    file, _, own = name.rpartition(":")
    path = Path(file).resolve()
    known = f"{path.name}:{own}"
    if known in _ADDED and (name == known or files_of_method(known) == [path]):
        return known
    if not path.is_file():
        raise InputError(f"method {name!r}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"tunable_magmax_method_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"method {name!r}: {file} can't be run: {type(error).__name__}: {error}") from error
    found = getattr(module, own, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)]
        raise InputError(f"method {name!r}: {file} has no class {own!r}{closest(own, classes)}")
    return _added(found, known)


def _added(found: Any, name: str) -> str:
    """Returns a name by which a user's method is known from now on, if it is one."""
    if not isinstance(found, type) or not issubclass(found, Method):
        raise InputError(f"{name} is no method: expected a subclass of tunable_magmax.Method")
    if found.weights not in ("shares", "factors", "refused"):
        raise InputError(f"{name}: weights is {found.weights!r}, expected 'shares', 'factors' or 'refused'")
    if found.vector is Method.vector and found.combine is Method.combine:
        raise InputError(f"{name} has neither `vector` nor `combine`: write one of them")
    if found.merges_matrices and found.matrix is Method.matrix:
        raise InputError(f"{name} merges matrices and has no `matrix`: write it")
    _ADDED[name] = found
    return name


def read_options(tasks: int, names: Sequence[str] | None = None, **given: Any) -> Options:
    """Checks the options of a merge, which are those of `merge_state_dicts`, as far as that needs no checkpoints.

    Weights and budget may be by name if the tasks have names.

    >>> read_options(2, method="average", weights=[1, 3]).weights
    (Fraction(1, 1), Fraction(3, 1))
    """
    if given.get("scale") is None:
        given["scale"] = getattr(given.get("weights"), "scale", None)  # that of a preference
    for shares in ("weights", "budget"):
        given[shares] = in_order(given.get(shares), names, shares)
    if tasks == 0:
        raise InputError("there are no tasks: a merge needs a base and at least one task checkpoint")
    name = given["method"] = method_named(given.get("method") or USUAL["method"])
    has_weights, has_budget = (given.get(key) is not None for key in ("weights", "budget"))
    if has_weights and has_budget:
        raise InputError("weights and a budget were both given; give one of them")
    if has_weights and method_class(name).weights == "refused":
        raise InputError(f"method {name!r} takes no weights; leave them out or use tunable_magmax")
    if has_budget and not method_class(name).takes_budget:
        raise InputError(f"method {name!r} takes no budget; only tunable_magmax does")
    if has_budget and given.get("scope") == "tensor":
        raise InputError("a budget needs the scope 'model': give weights with scope 'tensor'")
    if given.get("scale") is None:
        given["scale"] = method_class(name).default_scale
    return Options.read(tasks, **given)


def unused_options(options: Options) -> Iterator[str]:
    """Yields warnings about options that were set and that the method does not read.

    >>> list(unused_options(read_options(2, method="magmax", density=0.3)))
    ['density has no effect with magmax; it is for ties']
    """
    usual = Options.read(1)
    for name in ("scope", "compare", "density", "normalize", "seed"):
        if getattr(options, name) != getattr(usual, name) and name not in method_class(options.method).reads:
            readers = ", ".join(known for known, kind in METHODS.items() if name in kind.reads)
            yield f"{name} has no effect with {options.method}; it is for {readers}"
