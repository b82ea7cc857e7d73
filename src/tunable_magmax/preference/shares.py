"""Shares: rules that all weights over tasks follow, counts of classes, and `SitePrior`, how often each class occurs.

As a bias a head adds the prior's logarithm to its logits: logit_c += log((1 - eps) pi_c + eps / C), where C is the
number of the head's classes: eps keeps every class possible.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.merging.budget import read_weights

if TYPE_CHECKING:
    from tunable_magmax.data.arrays import Floats

Class: TypeAlias = int | str
Similarity: TypeAlias = Literal["inner", "count"]
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Intervals: TypeAlias = tuple[tuple[float, float], ...]
PriorSource: TypeAlias = Literal["tasks", "labels"]
HAND_EPS = 0.02
"""The part that is spread evenly where weights say nothing of classes."""
LEAST_EPS = 0.002
"""The part where the posterior's class shares are smooth themselves: for classes of a head that no task has."""


def normalised(weights: Any) -> tuple[float, ...]:
    """Returns `weights` divided by their sum, each rounded once. Weights that sum to 1 already stay as they are.

    As in rule 3, a weight is the decimal number it prints as; rationals neither overflow nor underflow on the way.
    """
    exact = read_shares(weights)
    numbers = tuple(map(float, exact))
    # Rounding each weight once moves their sum by 2 ulp at most; without this a file would change when read and saved.
    if max(numbers) < 2 and abs(math.fsum(numbers) - 1) <= 1e-15:
        return numbers
    whole = sum(exact)
    return tuple(float(number / whole) for number in exact)


def read_shares(weights: Any) -> tuple[Fraction, ...]:
    """Returns `weights` as they print; refuses negative and infinite ones, and weights that are all 0."""
    if not (listed := plain_list(weights, "weights")):
        raise InputError("no weights: give one number per task")
    return read_weights(listed, len(listed)) or ()


def as_number(value: Any) -> float:
    """Returns a number as a float, and NaN, which lies in no range, for anything else.

    >>> as_number(2), as_number("2"), as_number(True)
    (2.0, nan, nan)
    """
    try:
        return float("" if isinstance(value, (str, bytes, bool)) else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def alpha_weights(alpha: float, tasks: int) -> tuple[float, ...]:
    """Returns the paper's schedule alpha^(T - t), t = 1..T, scaled so that the largest is 1: nothing overflows.

    alpha > 1 favours early tasks, alpha < 1 late ones, 0 gives everything to the last.

    >>> alpha_weights(0.5, 3)
    (0.25, 0.5, 1.0)
    >>> alpha_weights(2, 3)
    (1.0, 0.5, 0.25)
    >>> alpha_weights(0, 3)
    (0.0, 0.0, 1.0)
    """
    number = as_number(alpha)
    if not 0 <= number < math.inf:
        raise InputError(f"alpha must be a finite number >= 0, not {alpha!r}; 0 gives everything to the last task")
    tasks = task_count(tasks)
    if number <= 1:
        return tuple(number ** (tasks - t) for t in range(1, tasks + 1))
    return tuple(number ** (1 - t) for t in range(1, tasks + 1))


def task_count(tasks: int) -> int:
    """Returns `tasks` as a positive int, or refuses it."""
    if isinstance(tasks, bool) or not hasattr(tasks, "__index__") or tasks.__index__() < 1:
        raise InputError(f"the number of tasks must be a whole number >= 1, not {tasks!r}")
    return tasks.__index__()


# -- classes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassCounts:
    """Samples per class: `tasks` [T, classes] in the tasks, `site` [classes] at the site, over `classes`."""

    classes: tuple[Class, ...]
    tasks: Floats
    site: Floats
    unknown: Mapping[Class, int]

    @property
    def shares(self) -> Floats:
        """The share of each class in each task [T, classes]; a task without samples has a row of zeros."""
        totals = self.tasks.sum(axis=1, keepdims=True)
        shares: Floats = self.tasks / np.where(totals > 0, totals, 1.0)
        return shares

    @property
    def similarities(self) -> Floats:
        """The paper's inner product of class shares, r(task) r(site), of each task."""
        found: Floats = self.shares @ (self.site / self.site.sum())
        return found

    def require_known(self) -> None:
        """Refuses labels that all belong to no task, and warns of those that do not."""
        unknown, known = sum(self.unknown.values()), round(self.site.sum())
        names = some_of(self.unknown, show=_shown)
        if not known:
            raise InputError(
                f"all {unknown} labels belong to no task: they are {names}, and the tasks' classes are "
                f"{some_of(self.classes, show=_shown)}; give labels in the tasks' own class names or indices"
            )
        if unknown:
            text = f"{unknown} ({names}) of {known + unknown} labels belong to no task and were left out"
            warnings.warn(text, stacklevel=4)


def count_classes(task_counts: Sequence[Any], labels: Iterable[Any] | None = None) -> ClassCounts:
    """Brings tasks and site to one list of classes (those with a sample in some task), in order of appearance.

    `task_counts`: per task, a class-to-count mapping or counts by class index. `labels`: None if only the tasks are to
    be counted.

    >>> counts = count_classes([{"cat": 5, "dog": 5}, {"car": 10}], ["cat", "dog", "car", "cat"])
    >>> counts.classes, counts.similarities.tolist()
    (('cat', 'dog', 'car'), [0.375, 0.25])
    """
    if isinstance(task_counts, (str, Mapping)) or len(task_counts) == 0:
        raise InputError("the tasks' class counts must be a list with one class-to-count mapping per task")
    tables = [_task_table(counts, t) for t, counts in enumerate(task_counts, 1)]
    given = [] if labels is None else plain_list(labels, "labels")
    seen = Counter(_class(label, "a label") for label in given)
    if not seen and labels is not None:
        raise InputError("no labels: give at least one label of the site")
    position = {name: k for k, name in enumerate(dict.fromkeys(name for table in tables for name in table))}
    if not position:
        raise InputError("no task has a class with samples; the tasks' class counts are all 0")
    tasks = np.array([[table.get(name, 0.0) for name in position] for table in tables])
    site = np.array([float(seen[name]) for name in position])
    unknown = {name: seen[name] for name in sorted(seen, key=str) if name not in position}
    return ClassCounts(tuple(position), tasks, site, unknown)


def _task_table(counts: Any, task: int) -> dict[Class, float]:
    """Returns one task's class-to-count mapping, without the classes that have no sample."""
    if isinstance(counts, Mapping):
        items: list[tuple[Any, Any]] = list(counts.items())
    else:
        items = list(enumerate(plain_list(counts, f"class counts of task {task}")))
    table: dict[Class, float] = {}
    for key, value in items:
        name = _class(key, f"a class of task {task}")
        count = as_number(value)
        if not 0 <= count < np.inf:
            raise InputError(f"task {task}: the count of class {name!r} must be a number >= 0, not {value!r}")
        if name in table:
            raise InputError(f"task {task}: class {name!r} is named twice; class names must differ")
        table[name] = count
    return {name: count for name, count in table.items() if count > 0}


def plain_list(values: Any, name: str) -> list[Any]:
    """Returns a flat list of Python values from a list, numpy or torch vector."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise InputError(f"{name}: expected a list, not {values!r}")
    return list(values)


def _class(value: Any, what: str) -> Class:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InputError(f"{what} must be a class name or a class index, not {value!r}")
    return value


def _shown(name: Class) -> str:
    return shortened(repr(name))


@dataclass(frozen=True)
class SitePrior:
    """How often each class occurs at a site. `shares`: by class name, normalised on entry.

    `eps`: the part that is spread evenly over all classes of a head. `source`: "labels" if labels of the site are
    behind the shares, else "tasks".

    >>> SitePrior({"cat": 3, "dog": 1}, eps=0.1).shares["cat"]
    0.75
    """

    shares: Mapping[str, float]
    eps: float = HAND_EPS
    source: PriorSource = "tasks"

    def __post_init__(self) -> None:
        if not isinstance(self.shares, Mapping) or not self.shares or not all(isinstance(c, str) for c in self.shares):
            raise InputError(f"a prior's shares must map class names to numbers, not {self.shares!r}")
        if self.source not in ("tasks", "labels"):
            raise InputError(f"a prior's source must be 'tasks' or 'labels', not {self.source!r}")
        try:
            values = normalised(list(self.shares.values()))
        except InputError as error:
            raise InputError(f"a prior's shares must be numbers >= 0, not all 0: {error}") from None
        object.__setattr__(self, "shares", dict(zip(self.shares, values, strict=True)))
        eps = as_number(self.eps)
        if not 0 < eps <= 1:  # at 0 a class could become impossible
            raise InputError(f"eps of a prior must be a number above 0 and at most 1, not {self.eps!r}")
        object.__setattr__(self, "eps", eps)

    @classmethod
    def of_tasks(cls, weights: Sequence[float], task_label_counts: Sequence[Any], eps: float = HAND_EPS) -> SitePrior:
        """Returns the prior that weights over tasks mean, given each task's class-to-count mapping.

        >>> SitePrior.of_tasks([1, 1], [{"cat": 8}, {"car": 6, "bus": 2}]).shares
        {'cat': 0.5, 'car': 0.375, 'bus': 0.125}
        """
        counts = count_classes(task_label_counts)
        if len(counts.tasks) != len(weights):
            raise InputError(f"{len(weights)} weights for the classes of {len(counts.tasks)} tasks: give one for each")
        shares = np.array(normalised(weights)) @ counts.shares
        if not shares.any():
            raise InputError(
                "all weight is on tasks without a sample, so their classes are not known: profile these tasks with "
                "samples (`tmx init RUN_DIR --data NAME=DATA`), give weight to other tasks, or leave the prior out "
                "(--prior none)"
            )
        return cls(dict(zip(map(str, counts.classes), shares.tolist(), strict=True)), eps)

    def bias(self, classes: Sequence[str]) -> NDArray[np.float32]:
        """Returns what a head of these classes adds to its logits.

        >>> SitePrior({"cat": 1.0}, eps=0.5).bias(["cat", "dog"]).astype(float).round(3).tolist()
        [-0.288, -1.386]
        """
        shares = np.array([self.shares.get(name, 0.0) for name in classes])
        if not shares.any():
            raise InputError(
                f"no class of the prior ({some_of(self.shares, show=repr)}) is a class of the head "
                f"({some_of(classes, show=repr)}): make the profiles again from data whose labels are the head's, give "
                "the head of these tasks, or leave the prior out (--prior none)"
            )
        logs: NDArray[np.float32] = np.log((1 - self.eps) * shares / shares.sum() + self.eps / len(classes))
        return logs.astype(np.float32)
