"""Estimates from labels of the target: how much of each task's label distribution the target shows."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.preference.estimate import WeightEstimate
from tunable_magmax.preference.uncertainty import RESAMPLING, Resampling, conclude, histogram_replicates

Class: TypeAlias = int | str
Similarity: TypeAlias = Literal["inner", "count"]
OnZero: TypeAlias = Literal["error", "equal"]
# With many classes and few samples the added ones would drown the counts.
MOST_ADDED = 0.2


@dataclass(frozen=True)
class ClassCounts:
    """Samples per class: `tasks` [T, classes] in the tasks, `target` [classes] in the target, over `classes`."""

    classes: tuple[Class, ...]
    tasks: Floats
    target: Floats
    unknown: Mapping[Class, int]


def label_estimate(
    task_label_counts: Sequence[Any],
    labels: Iterable[Any],
    *,
    similarity: Similarity = "inner",
    on_zero: OnZero = "error",
    resampling: Resampling = RESAMPLING,
    method: str | None = None,
) -> WeightEstimate:
    """Returns weights by label similarity.

    `task_label_counts`: per task, a class-to-count mapping or counts by class index. "inner": sum over classes
    of r_c(task) r_c(target), the paper's equation. "count": how many of the target's labels are classes of the task,
    which does not disfavour tasks with many classes.

    >>> label_estimate([{"cat": 5, "dog": 5}, {"car": 10}], ["cat", "dog", "car", "cat"]).weights
    (0.6, 0.4)
    >>> label_estimate([{"cat": 5, "dog": 5}, {"car": 10}], ["cat", "dog", "car", "cat"], similarity="count").weights
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
    if not known and on_zero == "error":
        raise InputError(
            f"all {record['unknown']} labels belong to no task: they are {_some(counts.unknown)}, and the "
            f"tasks' classes are {_some(counts.classes)}; give labels in the tasks' own class names or "
            "indices, or ask for equal weights with on_zero='equal' (--on-zero equal)"
        )
    warn_unknown(counts)
    if not known:
        return WeightEstimate((1.0,) * tasks, name, {**record, "samples": 0, "reason": "no label belongs to a task"})
    table = class_shares(counts.tasks) if similarity == "inner" else (counts.tasks > 0).astype(np.float64)
    similarities = counts.target @ table.T / known
    replicates = weights_from_similarities(histogram_replicates(counts.target, resampling) @ table.T)
    record["similarities"] = similarities.tolist()
    weights = weights_from_similarities(similarities)
    return conclude(name, weights, replicates, round(known), record, resampling)


def warn_unknown(counts: ClassCounts) -> None:
    """Warns of labels that belong to no task."""
    unknown = sum(counts.unknown.values())
    if unknown:
        names = _some(counts.unknown)
        total = round(counts.target.sum()) + unknown
        warnings.warn(f"{unknown} ({names}) of {total} labels belong to no task and were left out", stacklevel=4)


def _some(names: Iterable[Class]) -> str:
    return some_of(names, show=lambda name: shortened(repr(name)))


def class_shares(task_counts: Floats, smoothing: float = 0.0) -> Floats:
    """Returns the share of each class in each task [T, classes], after adding `smoothing` samples to every class.

    All that is added makes up at most a fifth of the task's sample. A task without samples has a row of zeros.

    >>> class_shares(np.array([[7.0, 0.0]]), 0.5).tolist()
    [[0.9375, 0.0625]]
    """
    most = MOST_ADDED * task_counts.sum(axis=1, keepdims=True) / task_counts.shape[1]
    raised = task_counts + np.minimum(smoothing, most)
    totals = raised.sum(axis=1, keepdims=True)
    shares: Floats = raised / np.where(totals > 0, totals, 1.0)
    return shares


def count_classes(task_counts: Sequence[Any], labels: Iterable[Any] | None) -> ClassCounts:
    """Brings tasks and target to one list of classes (those with a sample in some task), in order of appearance.

    `labels`: None if only the tasks are to be counted.
    """
    if isinstance(task_counts, (str, Mapping)) or len(task_counts) == 0:
        raise InputError("the tasks' class counts must be a list with one class-to-count mapping per task")
    tables = [_task_table(counts, t) for t, counts in enumerate(task_counts, 1)]
    given = [] if labels is None else plain_list(labels, "labels")
    seen = Counter(_class(label, "a label") for label in given)
    if not seen and labels is not None:
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
    """Returns one task's class-to-count mapping, without the classes that have no sample."""
    if isinstance(counts, Mapping):
        items: list[tuple[Any, Any]] = list(counts.items())
    else:
        items = list(enumerate(plain_list(counts, f"class counts of task {task}")))
    table: dict[Class, float] = {}
    for key, value in items:
        name = _class(key, f"a class of task {task}")
        try:
            count = float(value)
        except (TypeError, ValueError):
            count = np.nan
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


def weights_from_similarities(similarities: Floats) -> Floats:
    """Returns similarities divided by their sum over the last axis; equal weights where all of them are 0.

    >>> weights_from_similarities(np.array([[3.0, 1.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    """
    total = similarities.sum(axis=-1, keepdims=True)
    tasks = similarities.shape[-1]
    shares: Floats = np.where(total > 0, similarities / np.where(total > 0, total, 1.0), 1.0 / tasks)
    return shares
