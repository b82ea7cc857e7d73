"""What a merge method is: one class. The table of methods, and methods in files of the user's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from tunable_magmax.errors import InputError, closest
from tunable_magmax.merging.kernels import Chunk, Counts, Kernels, Planes
from tunable_magmax.merging.options import MATCHED, Options

if TYPE_CHECKING:
    from tunable_magmax.merging.merged_elements import MergedElements

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

    plane_rows: int = 0
    """Rows of bit planes that the method works in."""

    counts_magnitudes: ClassVar[bool] = False
    """Whether the method asks for the elements of largest magnitude, which takes further walks and some memory."""

    budget: tuple[int, ...] | None = None
    """How many elements each task gives, once that is decided."""

    leftovers: int | None = None
    """How many elements were nobody's candidates; None for methods without an assignment."""

    def __init__(self, options: Options, tasks: int, reusable: bool = False) -> None:
        """With `reusable`, candidates that were marked serve for several merges, if the method marks any."""
        self.options = options
        self.tasks = tasks
        self.reusable = reusable
        self.kept: dict[tuple[int, int], Any] = {}
        """What merges of the same checkpoints share, by tensor and task, if the method is `reusable`."""

    def compared_and_rows(self, tensor: int, size: int) -> tuple[Sequence[bool], Sequence[int]]:
        """For the survey: which tasks are compared, and the plane row that marks each one's candidates (-1: none)."""
        return [False] * self.tasks, [-1] * self.tasks

    def set_element_count(self, elements: int) -> bool:
        """Takes the number of merged elements; returns whether candidates marked before no longer hold."""
        return False

    def expected_budget(self, elements: int) -> tuple[int, ...] | None:
        """Returns the budget if so many elements are merged; None for methods without one."""
        return None

    def decide(self, merged: MergedElements) -> None:
        """Decides what concerns all elements, before the first one is merged. Most methods have nothing to decide."""

    def tasks_read(self, tensor: int, size: int) -> Sequence[int]:
        """Returns the tasks (from 0) whose values `combine` looks at in a tensor; it may be given no others."""
        return range(self.tasks)

    def combine(self, kernels: Kernels, chunk: Chunk, tensor: int, planes: Planes | None, out: Tensor) -> Counts:
        """Writes the merged task vector of a chunk to `out`; returns elements per task where each has an owner."""
        return kernels.apply(chunk, self.vector, out)

    def vector(self, vectors: Sequence[Tensor]) -> Tensor:
        """Returns the merged task vector, of the tasks' vectors in one range of a tensor: an element-wise formula."""
        raise NotImplementedError(f"{type(self).__name__} has neither `vector` nor `combine`")

    def matrix(self, tensor: int, shape: tuple[int, int], vector: Callable[[int], Tensor]) -> Tensor:
        """Returns the merged task vector of a matrix, in its working type or float64, if it `merges_matrices`.

        `vector(t)` returns the vector of task t (from 0), of that shape; it holds until the next one is asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} merges matrices and has no `matrix`")

    def shares(self) -> tuple[Fraction, ...]:
        """Returns the weights, normalised; equal ones where none are given."""
        weights = self.options.weights or (Fraction(1),) * self.tasks
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def factors(self) -> tuple[float, ...]:
        """Returns the weights as plain factors, 1 where none are given."""
        return tuple(float(weight) for weight in self.options.weights or (Fraction(1),) * self.tasks)


METHODS: dict[str, type[Method]] = {}
"""All methods by name. `methods.py` lists its own here; others are added when they are first named."""


def method_named(name: Any) -> str:
    """Returns the name of a method in `METHODS`: given as that name, as one of an entry point, or as a class.

    A file is never run here, for a name may come from a configuration that somebody else has written: `load_method`
    does that, and only where a user names the file.
    """
    if isinstance(name, type):
        own = f"{name.__module__}:{name.__qualname__}"
        METHODS[own] = _checked(name, own)
        return own
    if isinstance(name, str) and name not in METHODS:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            try:
                METHODS[name] = _checked(point.load(), f"the entry point {name!r} ({point.value})")
            except Exception as error:
                raise InputError(f"method {name!r}, the entry point {point.value}: {_said(error)}") from error
    if not isinstance(name, str) or name not in METHODS:
        known = [*METHODS, *(point.name for point in entry_points(group=ENTRY_POINTS) if point.name not in METHODS)]
        raise InputError(f"unknown method {name!r}{closest(str(name), known)}; known: {', '.join(known)}")
    return name


def load_method(name: str) -> str:
    """Returns the name of a method for `merge_checkpoints`; of "FILE.py:Class", runs the file and adds its class.

    The file is run like any program: name only files that you trust.
    """
    file, colon, own = name.rpartition(":")
    if not colon or not file.endswith(".py") or name in METHODS:
        return method_named(name)
    path = Path(file)
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
        raise InputError(f"method {name!r}: {file} can't be run: {_said(error)}") from error
    found = getattr(module, own, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)]
        raise InputError(f"method {name!r}: {file} has no class {own!r}{closest(own, classes)}")
    METHODS[name] = _checked(found, name)
    return name


def _checked(found: Any, name: str) -> type[Method]:
    if not isinstance(found, type) or not issubclass(found, Method):
        raise InputError(f"{name} is no method: expected a subclass of tunable_magmax.Method")
    if found.weights not in ("shares", "factors", "refused"):
        raise InputError(f"{name}: weights is {found.weights!r}, expected 'shares', 'factors' or 'refused'")
    if found.vector is Method.vector and found.combine is Method.combine:
        raise InputError(f"{name} has neither `vector` nor `combine`: write one of them")
    if found.merges_matrices and found.matrix is Method.matrix:
        raise InputError(f"{name} merges matrices and has no `matrix`: write it")
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
