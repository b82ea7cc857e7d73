"""Labels of the site and label counts of the tasks: checked, counted over one list of classes, and compared."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.preference.shares import as_number

Class: TypeAlias = int | str
Similarity: TypeAlias = Literal["inner", "count"]


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
