"""Labelled data to be evaluated on: which samples, the right class of each in the head's classes, and the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.class_names import by_name
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest
from tunable_magmax.evaluation.accuracy import task_of_class
from tunable_magmax.preference.profile import choose_rows

if TYPE_CHECKING:
    from tunable_magmax.data.benchmark import Benchmark

NAMED = 5


@dataclass(frozen=True, eq=False)
class Labelled:
    """Samples at ascending `positions`; `truth` [n] counts in the head's classes, `tasks` name classes by index.

    `sample_tasks` [n]: each sample's task, -1 for none; None where no tasks are known.
    """

    samples: Samples
    positions: tuple[int, ...]
    truth: NDArray[np.int64]
    tasks: Mapping[str, tuple[int, ...]]
    sample_tasks: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: Sequence[int]) -> Labelled:
        """Some of the samples; `rows` count from 0 and ascend."""
        index = np.asarray(rows, dtype=np.int64)
        owner = None if self.sample_tasks is None else self.sample_tasks[index]
        kept = tuple(self.positions[row] for row in index.tolist())
        return replace(self, positions=kept, truth=self.truth[index], sample_tasks=owner)

    def draw(self, limit: int | None, seed: int = 0) -> Labelled:
        """A seeded draw of at most `limit` samples; all of them if there is no limit or there are fewer."""
        if limit is None or limit >= len(self):
            return self
        if limit < 1:
            raise InputError(f"the limit is {limit}, expected at least 1 sample")
        return self.take(choose_rows(len(self), limit, seed))


def known_labels(
    samples: Samples, classes: Sequence[str], lists: Sequence[tuple[str, ...]] | None = None
) -> tuple[dict[int, int], list[str]]:
    """The index in `classes` of each labelled sample, by position; and, in order, the labels that are none of them.

    Labels go by name; if none is a name and all are numbers, they are indices into the one of `lists` (by default
    `classes`).
    """
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds inputs without labels: put images into class folders, or add a column 'label'"
        )
    given = [samples.classes[label] for label in samples.labels]
    if not given:
        raise InputError(f"{samples.origin}: holds no samples; give at least one")
    names = by_name(given, lists or [tuple(classes)], [tuple(classes)], Path(samples.origin))
    place = {name: index for index, name in enumerate(classes)}
    known = {position: place[name] for position, name in enumerate(names) if name in place}
    return known, [name for name in names if name not in place]


def label_samples(
    samples: Samples,
    classes: Sequence[str],
    tasks: Mapping[str, Sequence[str]] | None = None,
    positions: Sequence[int] | None = None,
) -> Labelled:
    """All samples, or those at `positions`, with their labels in the head's `classes`; an unknown label is an error.

    `tasks`: the class names of each. Where tasks share classes, a sample's task is its domain, if the samples have
    domains that are named as the tasks are; else the tasks are left out.
    """
    known, unknown = known_labels(samples, classes)
    wanted = range(len(samples)) if positions is None else sorted(positions)
    lacking = [position for position in wanted if position not in known]
    if lacking:
        raise InputError(_unknown(samples, classes, unknown, len(lacking), len(wanted)))
    groups = task_indices(tasks or {}, classes)
    truth = np.array([known[position] for position in wanted], dtype=np.int64)
    home = task_of_class(list(groups.values()), len(classes))
    owner: NDArray[np.int64] | None = None
    domains = samples.domains
    if home is None and domains is not None and set(domains) <= set(groups):
        order = {name: t for t, name in enumerate(groups)}
        owner = np.array([order[domains[position]] for position in wanted], dtype=np.int64)
    elif home is not None and groups:
        owner = home[truth]
    return Labelled(samples, tuple(wanted), truth, {} if owner is None else groups, owner)


def label_benchmark(benchmark: Benchmark, classes: Sequence[str], split: Literal["train", "test"] = "test") -> Labelled:
    """The samples of all tasks of a benchmark, with labels and tasks in the head's `classes`."""
    samples = benchmark.test if split == "test" else benchmark.train
    home = {
        position: t
        for t, task in enumerate(benchmark.tasks)
        for position in (task.test if split == "test" else task.train)
    }
    if not home:
        raise InputError(f"{samples.origin}: no task of the benchmark {benchmark.name!r} has {split} samples")
    tasks = {task.name: [benchmark.classes[k] for k in task.classes] for task in benchmark.tasks}
    found = label_samples(samples, classes, None, list(home))
    owner = np.array([home[position] for position in found.positions], dtype=np.int64)
    return replace(found, tasks=task_indices(tasks, classes), sample_tasks=owner)


def task_indices(tasks: Mapping[str, Sequence[str]], classes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The classes of each task as indices; one that the head lacks is an error."""
    place = {name: index for index, name in enumerate(classes)}
    missing = list(dict.fromkeys(name for names in tasks.values() for name in names if name not in place))
    if missing:
        shown = ", ".join(f"{name!r}{closest(name, classes)}" for name in missing[:NAMED])
        raise InputError(
            f"{len(missing)} classes of the tasks are no class of the head: {shown}"
            f"{', ...' if len(missing) > NAMED else ''}; give the head that belongs to these tasks"
        )
    return {task: tuple(place[name] for name in names) for task, names in tasks.items()}


def _unknown(samples: Samples, classes: Sequence[str], unknown: Sequence[str], lacking: int, tried: int) -> str:
    names = list(dict.fromkeys(unknown))
    shown = ", ".join(f"{name!r}{closest(name, classes)}" for name in names[:NAMED])
    return (
        f"{samples.origin}: {lacking} of {tried} labels are no class of the head: {shown}"
        f"{', ...' if len(names) > NAMED else ''}; it knows {len(classes)} classes, such as "
        f"{', '.join(map(repr, classes[:NAMED]))}. Take these samples out, or give a head that knows them"
    )
