"""The section `benchmark` of run.yaml, and the tasks that it describes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunable_magmax.config import gather, refuse
from tunable_magmax.data.arrays import held_out
from tunable_magmax.data.data_sets import DATA_SETS, DataSet
from tunable_magmax.data.orders import equal_parts, named_groups, order_indices
from tunable_magmax.data.samples import Kind, Samples, places_of
from tunable_magmax.errors import InputError, closest, some_of


def read_section(section: Any, root: Path) -> DataSet:
    """Reads the section as run.yaml holds it. Relative paths count from `root`; all problems are in one error.

    >>> data_set = read_section({"name": "cifar100", "data": "cifar", "tasks": 20}, Path("/data"))
    >>> data_set.record()["data"], data_set.record()["order"]
    ('/data/cifar', 'natural')
    """
    problems: list[str] = []
    data_set = gather_section(section, root, problems)
    refuse(problems, "benchmark")
    assert data_set is not None
    return data_set


def gather_section(section: Any, root: Path, problems: list[str], inside: str = "") -> DataSet | None:
    """Like `read_section`, but adds the problems to a list. `inside`: the keys that lead to the section."""
    name = section.get("name") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name not in DATA_SETS:
        hint = closest(str(name), list(DATA_SETS))
        key = f"{inside}.name" if inside else "name"
        problems.append(f"{key} is {name!r}: must be one of {', '.join(DATA_SETS)}{hint}")
        return None
    data_set = gather(DATA_SETS[name], section, problems, inside)
    return None if data_set is None else data_set.rooted(root)


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A task of a benchmark. `classes` are indices, `train` and `test` ascending positions in its samples.

    `held`: training samples that are not trained on, if the section holds some out.
    """

    name: str
    classes: tuple[int, ...]
    train: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Samples and the tasks they belong to. `facts` says for JSON what is in which task.

    `classes` are the labels' own names; `prompts`: the templates that suit them, or the name of a set of templates.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    tasks: tuple[Task, ...]
    facts: dict[str, Any]
    prompts: str | tuple[str, ...] | None


def open_benchmark(data_set: DataSet) -> Benchmark:
    """Reads the data, orders the classes, and divides them among tasks.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = [f"text {k},{label}" for label in "abcde" for k in range(5)]
    ...     _ = Path(folder, "all.csv").write_text("\\n".join(["text,label", *rows]))
    ...     data_set = read_section({"name": "texts", "data": "all.csv", "tasks": 2}, Path(folder))
    ...     benchmark = open_benchmark(data_set)
    >>> benchmark.facts["classes"], [len(task.train) for task in benchmark.tasks], len(benchmark.test)
    ({'task-01': ['a', 'b', 'c'], 'task-02': ['d', 'e']}, [12, 8], 5)
    """
    split = data_set.open()
    train, test = split.train, _with_classes_of(split.train, split.test, data_set)
    if isinstance(data_set.tasks, Mapping):
        named = named_groups(data_set.tasks, train.classes)
        place = {index: k for k, index in enumerate(sorted(index for group in named.values() for index in group))}
        train, test = (_restricted(samples, place) for samples in (train, test))
        groups = {name: tuple(place[index] for index in group) for name, group in named.items()}
    else:
        width = max(2, len(str(data_set.tasks)))
        divided = equal_parts(order_indices(data_set.order, train.classes, data_set.name), data_set.tasks)
        groups = {f"task-{t:0{width}d}": classes for t, classes in enumerate(divided, 1)}
    tasks = tuple(_task(name, classes, train, test, data_set) for name, classes in groups.items())
    _require_samples(train, test, tasks)
    divided_samples = [[task.name, task.classes, task.train, task.test] for task in tasks]
    # Equal wherever the data lies; no inputs are read.
    content = json.dumps([train.classes, train.labels, test.labels, split.drawn, divided_samples])
    facts = {
        "classes": {task.name: [train.classes[index] for index in task.classes] for task in tasks},
        "train": {task.name: len(task.train) for task in tasks},
        "test": {task.name: len(task.test) for task in tasks},
        "digest": hashlib.sha256(content.encode()).hexdigest(),
    }
    return Benchmark(data_set.name, train.kind, train.classes, train, test, tasks, facts, data_set.prompts)


def _with_classes_of(train: Samples, test: Samples, data_set: DataSet) -> Samples:
    """Returns the test samples with the training samples' classes, in their order."""
    for samples in (train, test):
        samples.require_labels()
        if samples.kind != data_set.kind:
            raise InputError(
                f"{samples.origin} holds {samples.kind}s, but the benchmark {data_set.name} is of {data_set.kind}s; "
                "choose another name or other data"
            )
    complaint = f"{test.origin}: correct labels that are outside the classes of {train.origin}, or add training samples"
    return replace(test, classes=train.classes, labels=tuple(places_of(test.label_names(), train.classes, complaint)))


def _restricted(samples: Samples, place: Mapping[int, int]) -> Samples:
    """Keeps only samples of the classes in `place`, which maps them to their new indices."""
    kept = samples.subset([position for position, label in enumerate(samples.require_labels()) if label in place])
    names = tuple(samples.classes[index] for index in place)
    return replace(kept, classes=names, labels=tuple(place[label] for label in kept.require_labels()))


def _task(name: str, classes: tuple[int, ...], train: Samples, test: Samples, data_set: DataSet) -> Task:
    """Returns a task with its samples."""
    wanted = set(classes)
    learned, tested = (
        [position for position, label in enumerate(samples.require_labels()) if label in wanted]
        for samples in (train, test)
    )
    kept, held = held_out(learned, train.require_labels(), data_set.holdout, data_set.split_seed)
    return Task(name, classes, tuple(kept), tuple(tested), tuple(held))


def _require_samples(train: Samples, test: Samples, tasks: Sequence[Task]) -> None:
    """Refuses classes without training samples and tasks without test samples."""
    learned = {index for task in tasks for index in task.classes}
    empty = some_of(repr(train.classes[index]) for index in sorted(learned - {*train.require_labels()}))
    if empty:
        raise InputError(
            f"{train.origin}: no training sample of {empty}; add samples, remove the class from the data, or name the "
            "classes to learn as groups under tasks"
        )
    untested = [task.name for task in tasks if not task.test]
    if untested:
        raise InputError(
            f"{test.origin}: no test sample for {some_of(untested, show=repr)} of the {len(tasks)} tasks; "
            "every task needs some: add test samples, raise test_share, or use fewer and larger tasks"
        )
