"""Labels samples in a head's classes, and counts right predictions: of tasks, of classes, and along a sequence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, Ints, choose_rows
from tunable_magmax.data.samples import Samples, by_name, places_of
from tunable_magmax.errors import InputError, closest, plural, shortened, some_of

if TYPE_CHECKING:
    from tunable_magmax.data.benchmark import Benchmark

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Share:
    """The share of samples that are right: `right` of `samples`, fractions where samples count by weights.

    >>> Share(3, 4).value, [round(end, 3) for end in Share(3, 4).interval()]
    (0.75, [0.301, 0.954])
    """

    right: float
    samples: float

    @property
    def value(self) -> float:
        """Returns the share; NaN without samples."""
        return self.right / self.samples if self.samples else math.nan

    def interval(self) -> tuple[float, float]:
        """Returns Wilson's score interval, which suits few samples and shares near 0 and 1; (0, 1) without samples."""
        right, samples = self.right, self.samples
        if not samples:
            return 0.0, 1.0
        z = NormalDist().inv_cdf((1 + LEVEL) / 2)
        centre = (right + z * z / 2) / (samples + z * z)
        half = z / (samples + z * z) * math.sqrt(right * (samples - right) / samples + z * z / 4)
        return 0.0 if right == 0 else max(0.0, centre - half), 1.0 if right == samples else min(1.0, centre + half)

    def to_dict(self, prefix: str = "") -> dict[str, Any]:
        """Returns counts, share and interval for JSON; the share of no samples is null."""
        accuracy = self.value if self.samples else None
        record = {"samples": self.samples, "right": self.right, "accuracy": accuracy, "interval": [*self.interval()]}
        return {f"{prefix}{name}": value for name, value in record.items()}

    def words(self) -> str:
        """Returns the share, its interval and the number of samples.

        >>> Share(3, 4).words()
        '75.0% of 4 samples right, 30.1 to 95.4%'
        """
        low, high = self.interval()
        count = plural(round(self.samples), "sample")
        return f"{self.value:.1%} of {count} right, {100 * low:.1f} to {100 * high:.1f}%"


@dataclass(frozen=True, slots=True, repr=False)
class Accuracy:
    """Counts of right predictions: of each class, and of each task where tasks are known.

    `known_by_task`: right among the classes of the task alone, which `task_classes` names.

    >>> found = Accuracy.of(np.array([[2.0, 1.0], [0.0, 1.0], [2.0, 1.0]]), np.array([0, 1, 1]), ["cat", "dog"])
    >>> found.overall.value, found.by_class["dog"]
    (0.6666666666666666, Share(right=1, samples=2))
    """

    by_class: Mapping[str, Share]
    by_task: Mapping[str, Share]
    known_by_task: Mapping[str, Share]
    task_classes: Mapping[str, tuple[str, ...]]

    def __repr__(self) -> str:
        tasks = f"; {len(self.by_task)} tasks" if self.by_task else ""
        return f"Accuracy({self.overall.words()}; {len(self.by_class)} classes{tasks})"

    @property
    def overall(self) -> Share:
        """Returns the share of all samples, with the task unknown."""
        return _sum(self.by_class)

    @property
    def known(self) -> Share:
        """Returns the share of all samples that belong to a task, with the task known."""
        return _sum(self.known_by_task)

    @classmethod
    def of(
        cls,
        scores: NDArray[Any],
        labels: Ints,
        classes: Sequence[str],
        tasks: Mapping[str, Sequence[int]] | None = None,
        sample_tasks: Ints | None = None,
    ) -> Accuracy:
        """Counts where `scores` [n, classes] are largest against labels [n]; of equal scores the first class counts.

        `tasks`: the class indices of each task; `sample_tasks` [n]: each sample's task as an index, -1 for none.
        """
        bad = int((~np.isfinite(scores)).any(axis=1).sum())
        if bad:
            raise InputError(
                f"the scores of {bad} of {len(scores)} samples hold NaN or infinity: the checkpoint's numbers are "
                "broken (training diverged, or the scale is far too large)"
            )
        members = {name: sorted(map(int, group)) for name, group in (tasks or {}).items()}
        owner = np.full(len(labels), -1) if sample_tasks is None else sample_tasks
        within = np.zeros(len(labels), dtype=bool)
        for task, group in enumerate(members.values()):
            rows, among = np.flatnonzero(owner == task), np.array(group)
            within[rows] = among[scores[np.ix_(rows, among)].argmax(axis=1)] == labels[rows]
        right, owned = scores.argmax(axis=1) == labels, owner >= 0
        named = {name: tuple(classes[k] for k in group) for name, group in members.items()}
        by_task, known_by_task = (_shares(members, owner[owned], each[owned]) for each in (right, within))
        return cls(_shares(classes, labels, right), by_task, known_by_task, named)

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts, with shares and intervals beside them for the reader."""
        tasks = [
            {"name": name, "classes": [*self.task_classes[name]], **share.to_dict()}
            | self.known_by_task[name].to_dict("known_")
            for name, share in self.by_task.items()
        ]
        return {
            "level": LEVEL,
            **self.overall.to_dict(),
            **(self.known.to_dict("known_") if tasks else {}),
            "tasks": tasks,
            "classes": [{"name": name, **share.to_dict()} for name, share in self.by_class.items()],
        }


def _shares(names: Collection[str], owners: Ints, right: NDArray[np.bool_]) -> dict[str, Share]:
    """Returns the share of right samples of each name; `owners` [n]: which of the names a sample is of."""
    counts = (np.bincount(each, minlength=len(names)).tolist() for each in (owners[right], owners))
    return dict(zip(names, map(Share, *counts), strict=True))


def _sum(shares: Mapping[str, Share]) -> Share:
    return Share(sum(share.right for share in shares.values()), sum(share.samples for share in shares.values()))


# -- labelled samples --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Labelled:
    """Samples at ascending `positions`; `targets` [n] and the classes of `tasks` are indices into the head's classes.

    `sample_tasks` [n]: each sample's task, -1 for none; None where no tasks are known. `unknown`: how many samples were
    left out because their labels are no class of the head.
    """

    samples: Samples
    positions: tuple[int, ...]
    targets: Ints
    tasks: Mapping[str, tuple[int, ...]]
    sample_tasks: Ints | None
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: Sequence[int]) -> Labelled:
        """Returns some of the samples; `rows` count from 0 and ascend."""
        index = np.asarray(rows, dtype=np.int64)
        owner = None if self.sample_tasks is None else self.sample_tasks[index]
        kept = tuple(self.positions[row] for row in index.tolist())
        return replace(self, positions=kept, targets=self.targets[index], sample_tasks=owner)

    def readable(self, positions: Sequence[int]) -> Labelled:
        """Returns the samples at these positions, which could be read."""
        row = {position: k for k, position in enumerate(self.positions)}
        return self.take([row[position] for position in positions])

    def accuracy(self, logits: Floats, classes: Sequence[str]) -> Accuracy:
        """Returns the accuracy of logits [n, classes]: among all classes, and among those of the sample's own task."""
        return Accuracy.of(logits, self.targets, classes, self.tasks, self.sample_tasks)

    def draw(self, limit: int | None) -> Labelled:
        """Draws at most `limit` samples, always the same; returns all if there is no limit or there are fewer."""
        return self if limit is None or limit >= len(self) else self.take(choose_rows(len(self), limit, 0))


def mostly_known(known: int, total: int) -> bool:
    """Whether so many labels are known that the others may be left out: an accuracy on fewer would mislead."""
    return 2 * known >= total > 0


def known_labels(samples: Samples, classes: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """Returns the index in `classes` of each sample, by position; and the labels that are not among them.

    Labels go by name; if none is a name and all are numbers, they are indices into `classes`.
    """
    names = by_name(samples.label_names(), [tuple(classes)], samples.origin)
    place = {name: index for index, name in enumerate(classes)}
    known = {position: place[name] for position, name in enumerate(names) if name in place}
    return known, [name for name in names if name not in place]


def label_samples(
    samples: Samples,
    classes: Sequence[str],
    tasks: Mapping[str, Sequence[str]] | None = None,
    positions: Sequence[int] | None = None,
) -> Labelled:
    """Labels all samples, or those at `positions`, in the head's `classes`.

    Samples with unknown labels are left out with a warning. They are an error if they are more than half, and among
    `positions`. `tasks`: the class names of each. Where tasks share classes, the tasks are left out.
    """
    known, unknown = known_labels(samples, classes)
    wanted = range(len(samples)) if positions is None else sorted(positions)
    lacking = [position for position in wanted if position not in known]
    if lacking:
        shown = some_of(dict.fromkeys(unknown), show=lambda name: f"{shortened(name)!r}{closest(name, classes)}")
        told = f"{samples.origin}: {len(lacking)} of {len(wanted)} labels are no class of the head"
        if positions is not None or not mostly_known(len(known), len(wanted)):
            raise InputError(
                f"{told}: {shown}; it knows {len(classes)} classes, such as {some_of(classes, show=repr)}. "
                "Take these samples out, or give a head that knows them"
            )
        warnings.warn(f"{told}, and these samples are left out: {shown}", stacklevel=2)
        wanted = sorted(known)
    groups = task_indices(tasks or {}, classes)
    targets = np.array([known[position] for position in wanted], dtype=np.int64)
    home = np.full(len(classes), -1)
    for task, group in enumerate(groups.values()):
        home[list(group)] = task
    apart = sum(map(len, groups.values())) == (home >= 0).sum()
    owner = home[targets] if groups and apart else None
    return Labelled(samples, tuple(wanted), targets, {} if owner is None else groups, owner, len(lacking))


def label_benchmark(benchmark: Benchmark, classes: Sequence[str], split: Literal["train", "test"] = "test") -> Labelled:
    """Labels the samples of all tasks of a benchmark in the head's `classes`."""
    samples = getattr(benchmark, split)
    home = {position: t for t, task in enumerate(benchmark.tasks) for position in getattr(task, split)}
    tasks = {task.name: [benchmark.classes[k] for k in task.classes] for task in benchmark.tasks}
    labelled = label_samples(samples, classes, None, list(home))
    owner = np.array([home[position] for position in labelled.positions], dtype=np.int64)
    return replace(labelled, tasks=task_indices(tasks, classes), sample_tasks=owner)


def task_indices(tasks: Mapping[str, Sequence[str]], classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the classes of each task as indices; one that the head lacks is an error."""
    complaint = "give the head that belongs to these tasks; this one lacks classes"
    return {task: tuple(places_of(names, classes, complaint)) for task, names in tasks.items()}


# -- sequences of tasks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class AccuracyMatrix:
    """The matrix R of a sequence of tasks: R[i, j] is the accuracy after task i on task j, NaN without samples.

    `base`: the row of the base, before any task; `samples`: how many samples of each task stand behind a column.

    >>> r = AccuracyMatrix(("birds", "cars"), ((0.9, 0.1), (0.6, 0.8)), base=(0.5, 0.4))
    >>> {name: round(value, 3) for name, value in r.metrics().items()}
    {'average accuracy': 0.7, 'forgetting': 0.3, 'backward transfer': -0.3, 'forward transfer': -0.3}
    """

    tasks: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    base: tuple[float, ...] | None = None
    samples: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        known = ", ".join(f"{name} {value:.1%}" for name, value in self.metrics().items() if value is not None)
        return f"AccuracyMatrix({len(self.tasks)} tasks; {known})"

    def metrics(self) -> dict[str, float | None]:
        """Returns what the sequence gained and forgot, as means over tasks; None of what is not known.

        T is the last task that was trained, so a run that is not finished has metrics of the tasks so far.

        | metric | definition |
        | --- | --- |
        | average accuracy | over j <= T of R[T, j] |
        | forgetting | over j < T of max over i < T of R[i, j], less R[T, j] (Chaudhry et al. 2018); positive is worse |
        | backward transfer | over j < T of R[T, j] - R[j, j] (Lopez-Paz and Ranzato 2017); negative is worse |
        | forward transfer | over 1 < j <= T of R[j - 1, j] - R[0, j], where R[0] is the base |
        """
        r, last = np.array(self.rows, dtype=np.float64), len(self.rows)
        earlier = r[:-1, : last - 1]
        values: dict[str, float | None] = {
            "average accuracy": _mean(r[-1, :last]),
            "forgetting": _mean(earlier.max(axis=0) - r[-1, : last - 1]) if last > 1 else None,
            "backward transfer": _mean(r[-1, : last - 1] - r.diagonal()[: last - 1]),
        }
        if self.base is not None:
            values["forward transfer"] = _mean(r.diagonal(1)[: last - 1] - np.array(self.base)[1:last])
        return values

    def to_dict(self) -> dict[str, Any]:
        """Returns the matrix and the metrics."""
        base = None if self.base is None else _nulls(self.base)
        about = {"tasks": list(self.tasks), "samples": None if self.samples is None else list(self.samples)}
        return {**about, "base": base, "matrix": [_nulls(row) for row in self.rows], "metrics": self.metrics()}


def _mean(values: NDArray[np.float64]) -> float | None:
    return None if not values.size or np.isnan(values).any() else float(values.mean())


def _nulls(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
