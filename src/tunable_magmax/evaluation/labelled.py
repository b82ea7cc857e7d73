"""Samples with labels in the classes of a head and their tasks, and the accuracy of logits on them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from tunable_magmax.data.arrays import Floats, Ints, choose_rows
from tunable_magmax.data.samples import Samples, by_name, places_of
from tunable_magmax.errors import InputError, closest, shortened, some_of
from tunable_magmax.evaluation.accuracy import Accuracy

if TYPE_CHECKING:
    from tunable_magmax.data.benchmark import Benchmark


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
