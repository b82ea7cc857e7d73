"""Counts right predictions: over all samples, for each task and class, with the task unknown and known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.showing import plural

LEVEL = 0.95
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
ACCURACY_VERSION = 1
ACCURACY_DEFINITIONS = {
    "accuracy": "share of samples whose class has the largest score among all classes of the head (task unknown)",
    "known_accuracy": "share of samples whose class has the largest score among the classes of their own task (task "
    "known); of samples that belong to a task",
    "interval": "Wilson score interval of the share, at the level given",
    "confusion": "rows: the task of the sample; columns: the task of the predicted class; counts",
}


def wilson_interval(right: float, samples: float, level: float) -> tuple[float, float]:
    """Returns Wilson's score interval of a share. The numbers may be fractions, where samples count by weights."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (right + z * z / 2) / (samples + z * z)
    half = z / (samples + z * z) * math.sqrt(right * (samples - right) / samples + z * z / 4)
    low = 0.0 if right == 0 else max(0.0, centre - half)
    high = 1.0 if right == samples else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True, slots=True)
class Share:
    """The share of samples that are right: `right` of `samples`.

    >>> Share(3, 4).value, [round(end, 3) for end in Share(3, 4).interval()]
    (0.75, [0.301, 0.954])
    """

    right: int
    samples: int

    @property
    def value(self) -> float:
        """Returns the share; NaN without samples."""
        return self.right / self.samples if self.samples else math.nan

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Returns Wilson's score interval, which suits few samples and shares near 0 and 1; (0, 1) without samples."""
        return wilson_interval(self.right, self.samples, level) if self.samples else (0.0, 1.0)

    def words(self, level: float = LEVEL) -> str:
        """Returns the share, its interval and the number of samples.

        >>> Share(3, 4).words()
        '75.0% of 4 samples right, 30.1 to 95.4%'
        """
        low, high = self.interval(level)
        count = plural(self.samples, "sample")
        return f"{self.value:.1%} of {count} right, {100 * low:.1f} to {100 * high:.1f}%"


@dataclass(frozen=True, slots=True, repr=False)
class Accuracy:
    """Counts of right predictions. `task_classes` are indices; `tasks` may be empty where they are not known.

    Tasks are disjoint in their classes (class-incremental) or not (domain-incremental): then a predicted class belongs
    to no single task, and `confusion` is None. `known` is None where only predictions were given, not scores.

    >>> found = Accuracy.of([0, 1, 0], [0, 1, 1], ["cat", "dog"])
    >>> found.overall.value, found.by_class["dog"]
    (0.6666666666666666, Share(right=1, samples=2))
    """

    classes: tuple[str, ...]
    class_samples: tuple[int, ...]
    class_right: tuple[int, ...]
    tasks: tuple[str, ...] = ()
    task_classes: tuple[tuple[int, ...], ...] = ()
    task_samples: tuple[int, ...] = ()
    task_right: tuple[int, ...] = ()
    right_within_task: tuple[int, ...] | None = None
    """Of each task's samples, how many are right among the classes of the task."""
    confusion: tuple[tuple[int, ...], ...] | None = None
    """[T, T]: samples of a task (row) that were taken for classes of a task (column)."""
    level: float = LEVEL

    def __repr__(self) -> str:
        tasks = f"; {len(self.tasks)} tasks" if self.tasks else ""
        return f"Accuracy({self.overall.words(self.level)}; {len(self.classes)} classes{tasks})"

    # -- readings --------------------------------------------------------------------------------------------------

    @property
    def overall(self) -> Share:
        """Returns the share of all samples, with the task unknown."""
        return Share(sum(self.class_right), sum(self.class_samples))

    @property
    def known(self) -> Share | None:
        """Returns the share of all samples that belong to a task, with the task known."""
        return None if self.right_within_task is None else Share(sum(self.right_within_task), sum(self.task_samples))

    @property
    def by_task(self) -> dict[str, Share]:
        """Returns the shares with the task unknown."""
        return dict(zip(self.tasks, map(Share, self.task_right, self.task_samples), strict=True))

    @property
    def known_by_task(self) -> dict[str, Share] | None:
        """Returns the shares with the task known."""
        if self.right_within_task is None:
            return None
        return dict(zip(self.tasks, map(Share, self.right_within_task, self.task_samples), strict=True))

    @property
    def by_class(self) -> dict[str, Share]:
        """Returns the shares with the task unknown."""
        return dict(zip(self.classes, map(Share, self.class_right, self.class_samples), strict=True))

    @property
    def elsewhere(self) -> tuple[int, ...] | None:
        """Returns how many samples of each task were taken for classes of no task."""
        if self.confusion is None:
            return None
        return tuple(n - sum(row) for n, row in zip(self.task_samples, self.confusion, strict=True))

    # -- making ----------------------------------------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        predicted: Any,
        labels: Any,
        classes: Sequence[str],
        tasks: Mapping[str, Sequence[int]] | None = None,
        *,
        sample_tasks: Any = None,
        known: Any = None,
        level: float = LEVEL,
    ) -> Accuracy:
        """Counts predicted class indices [n] against labels [n], both indices into `classes`.

        `tasks`: the class indices of each task. `sample_tasks` [n]: each sample's task as an index, -1 for none; needed
        where tasks share classes, else the label tells. `known` [n]: the prediction among the task's own classes.
        """
        if not 0 < level < 1:
            raise InputError(f"the level of intervals is {level}, expected a number between 0 and 1, such as {LEVEL}")
        targets = _indices(labels, len(classes), "labels")
        guess = _indices(predicted, len(classes), "predictions", length=len(targets))
        names, members = tuple(tasks or ()), tuple(tuple(sorted(map(int, group))) for group in (tasks or {}).values())
        home = task_of_class(members, len(classes))
        if sample_tasks is None and home is None:
            raise InputError("tasks share classes, so a label does not tell its task: give the task of each sample")
        given = home[targets] if home is not None and sample_tasks is None else sample_tasks
        owner = _indices(given, len(members), "tasks of samples", -1, len(targets))
        right = guess == targets
        confusion = within = None
        if home is not None and members:
            both = (owner >= 0) & (home[guess] >= 0)
            table = np.zeros((len(members), len(members)), dtype=np.int64)
            np.add.at(table, (owner[both], home[guess[both]]), 1)
            confusion = tuple(tuple(row) for row in table.tolist())
        if known is not None:
            best = _indices(known, len(classes), "predictions with the task known", -1, len(targets))
            within = _counts(owner[(best == targets) & (owner >= 0)], len(members))
        of_class = _counts(targets, len(classes)), _counts(targets[right], len(classes))
        of_task = _counts(owner[owner >= 0], len(members)), _counts(owner[right & (owner >= 0)], len(members))
        return cls(tuple(classes), *of_class, names, members, *of_task, within, confusion, level)

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts, with shares and intervals beside them for the reader."""
        known = self.known_by_task or {}
        tasks = [
            {"name": name, "classes": [self.classes[k] for k in members], **self._record(self.by_task[name])}
            | ({} if self.right_within_task is None else self._record(known[name], "known_"))
            for name, members in zip(self.tasks, self.task_classes, strict=True)
        ]
        return {
            "version": ACCURACY_VERSION,
            "definitions": dict(ACCURACY_DEFINITIONS),
            "level": self.level,
            **self._record(self.overall),
            **({} if self.known is None else self._record(self.known, "known_")),
            "tasks": tasks,
            "confusion": None if self.confusion is None else [list(row) for row in self.confusion],
            "classes": [{"name": name, **self._record(share)} for name, share in self.by_class.items()],
        }

    def _record(self, share: Share, prefix: str = "") -> dict[str, Any]:
        return {
            f"{prefix}samples": share.samples,
            f"{prefix}right": share.right,
            f"{prefix}accuracy": share.value if share.samples else None,
            f"{prefix}interval": list(share.interval(self.level)),
        }


def predict(scores: Floats, owner: Ints, members: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Returns the best class of each row of `scores` [n, classes]: among all, and among the sample's task's.

    `owner` [n]: the task of each sample; without one (-1) the second answer is -1. Equal scores: the first class.
    """
    bad = int((~np.isfinite(scores)).any(axis=1).sum())
    if bad:
        raise InputError(
            f"the scores of {bad} of {len(scores)} samples hold NaN or infinity: the checkpoint's numbers are broken "
            "(training diverged, or the scale is far too large)"
        )
    known = np.full(len(scores), -1, dtype=np.int64)
    for task, group in enumerate(members):
        rows = np.flatnonzero(owner == task)
        own = np.array(sorted(group), dtype=np.int64)
        known[rows] = own[scores[np.ix_(rows, own)].argmax(axis=1)]
    return scores.argmax(axis=1), known


def task_of_class(members: Sequence[Sequence[int]], classes: int) -> Ints | None:
    """Returns the task of each class, -1 for none; None where tasks share classes."""
    home = np.full(classes, -1, dtype=np.int64)
    for task, group in enumerate(members):
        indices = list(group)
        if (home[indices] >= 0).any():
            return None
        home[indices] = task
    return home


def _indices(values: Any, count: int, what: str, least: int = 0, length: int | None = None) -> Ints:
    """Returns values as an array of indices below `count`; refuses another `length` than the labels'."""
    array = np.asarray(values, dtype=np.int64)
    if array.size and (array.min() < least or array.max() >= count):
        raise InputError(f"{what} must be from {least} to {count - 1}, found {array.min()} to {array.max()}")
    if length is not None and len(array) != length:
        raise InputError(f"{len(array)} {what} for {length} labels: give one for each")
    return array


def _counts(indices: Ints, count: int) -> tuple[int, ...]:
    return tuple(np.bincount(indices, minlength=count).tolist())
