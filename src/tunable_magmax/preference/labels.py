"""Preferences from labels of the target: how much of each task's label distribution the target shows."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.preference.arrays import Floats
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.similarity import weights_from_similarities
from tunable_magmax.preference.uncertainty import DEFAULT, Resampling, conclude, histogram_replicates

Class: TypeAlias = int | str
Similarity: TypeAlias = Literal["inner", "count"]
OnZero: TypeAlias = Literal["error", "equal"]


@dataclass(frozen=True)
class ClassCounts:
    """Samples per class: `tasks` [T, classes] in the tasks, `target` [classes] in the target, over `classes`."""

    classes: tuple[Class, ...]
    tasks: Floats
    target: Floats
    unknown: Mapping[Class, int]


def label_preference(
    task_label_counts: Sequence[Any],
    labels: Iterable[Any],
    *,
    similarity: Similarity = "inner",
    on_zero: OnZero = "error",
    resampling: Resampling = DEFAULT,
    method: str | None = None,
) -> Preference:
    """Weights by label similarity. `task_label_counts`: per task, a class-to-count mapping or counts by class index.

    "inner": sum over classes of r_c(task) r_c(target), the paper's equation. "count": how many of the target's labels
    are classes of the task, which does not disfavour tasks with many classes.

    >>> label_preference([{"cat": 5, "dog": 5}, {"car": 10}], ["cat", "dog", "car", "cat"]).weights
    (0.6, 0.4)
    >>> label_preference([{"cat": 5, "dog": 5}, {"car": 10}], ["cat", "dog", "car", "cat"], similarity="count").weights
    (0.75, 0.25)
    """
    if similarity not in ("inner", "count"):
        raise InputError(f"similarity must be 'inner' or 'count', not {similarity!r}")
    if on_zero not in ("error", "equal"):
        raise InputError(f"on_zero must be 'error' or 'equal', not {on_zero!r}")
    counts = count_classes(task_label_counts, labels)
    tasks = len(counts.tasks)
    name = method or ("label" if similarity == "inner" else "label-count")
    record: dict[str, Any] = {"similarity": similarity, "unknown": sum(counts.unknown.values())}
    known = counts.target.sum()
    if counts.unknown:
        message = f"{_naming(counts.unknown)} of {round(known) + record['unknown']} labels belong to no task"
        if not known and on_zero == "error":
            raise InputError(
                f"{message}, so nothing is left to compare{_kinds(counts)}; give labels in the tasks' own class names "
                "or indices, or ask for equal weights with on_zero='equal' (--on-zero equal)"
            )
        warnings.warn(f"{message} and were left out", stacklevel=3)
    if not known:
        return Preference((1.0,) * tasks, name, {**record, "samples": 0, "reason": "no label belongs to a task"})
    table = emission_table(counts.tasks) if similarity == "inner" else (counts.tasks > 0).astype(np.float64)
    similarities = counts.target @ table.T / known
    replicates = weights_from_similarities(histogram_replicates(counts.target, resampling) @ table.T)
    record["similarities"] = similarities.tolist()
    weights = weights_from_similarities(similarities)
    return conclude(name, weights, replicates, round(known), record, resampling)


def emission_table(task_counts: Floats) -> Floats:
    """r_c(D_t): each task's counts divided by their sum, [T, classes]; a task without samples has a row of zeros."""
    totals = task_counts.sum(axis=1, keepdims=True)
    table: Floats = task_counts / np.where(totals > 0, totals, 1.0)
    return table


def count_classes(task_counts: Sequence[Any], labels: Iterable[Any]) -> ClassCounts:
    """Bring tasks and target to one list of classes (those with a sample in some task), in order of appearance."""
    if isinstance(task_counts, (str, Mapping)) or len(task_counts) == 0:
        raise InputError("the tasks' class counts must be a list with one class-to-count mapping per task")
    tables = [_task_table(counts, t) for t, counts in enumerate(task_counts, 1)]
    seen = Counter(_class(label, "a label") for label in _plain(labels, "labels"))
    if not seen:
        raise InputError("no labels: give at least one label of the target")
    position = {name: k for k, name in enumerate(dict.fromkeys(name for table in tables for name in table))}
    if not position:
        raise InputError("no task has a class with samples; the tasks' class counts are all 0")
    tasks = np.zeros((len(tables), len(position)))
    for row, table in zip(tasks, tables, strict=True):
        for name, count in table.items():
            row[position[name]] = count
    target = np.zeros(len(position))
    for name, count in seen.items():
        if name in position:
            target[position[name]] = count
    unknown = {name: seen[name] for name in sorted(seen, key=str) if name not in position}
    return ClassCounts(tuple(position), tasks, target, unknown)


def _task_table(counts: Any, task: int) -> dict[Class, float]:
    """One task's class-to-count mapping, without the classes that have no sample."""
    if isinstance(counts, Mapping):
        items: list[tuple[Any, Any]] = list(counts.items())
    else:
        items = list(enumerate(_plain(counts, f"class counts of task {task}")))
    table: dict[Class, float] = {}
    for key, value in items:
        name = _class(key, f"a class of task {task}")
        try:
            count = float(value)
        except (TypeError, ValueError):
            raise InputError(f"task {task}: the count of class {name!r} must be a number, not {value!r}") from None
        if not 0 <= count < np.inf:
            raise InputError(f"task {task}: the count of class {name!r} is {count}; expected a number >= 0")
        if name in table:
            raise InputError(f"task {task}: class {name!r} is named twice; class names must differ")
        table[name] = count
    return {name: count for name, count in table.items() if count > 0}


def _plain(values: Any, name: str) -> list[Any]:
    """A flat list of python values from a list, numpy or torch vector."""
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


def _naming(unknown: Mapping[Class, int]) -> str:
    names = some_of(unknown, show=repr)
    return f"{sum(unknown.values())} ({names})"


def _kinds(counts: ClassCounts) -> str:
    """A hint when one side uses names and the other indices."""
    kinds = {isinstance(name, str) for name in counts.classes}, {isinstance(name, str) for name in counts.unknown}
    if kinds == ({True}, {False}):
        return " (the labels are indices, the tasks' classes are names)"
    if kinds == ({False}, {True}):
        return " (the labels are names, the tasks' classes are indices)"
    return ""
