"""A benchmark: the samples of a data set, whose classes are ordered and divided among tasks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tunable_magmax.data.arrays import held_out, shuffled
from tunable_magmax.data.data_sets import DataSet, FileOrder, Item, OrderSection, SeedOrder
from tunable_magmax.data.samples import Kind, Samples, places_of
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import read_json


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
    >>> from tunable_magmax.data.data_sets import read_section
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


# -- orders and parts of classes ---------------------------------------------------------------------------------------

FILE = "a JSON file with lists of all class names or indices in their order, by name for each benchmark"
"""What a file of class orders is; docs/training.md describes it in full."""


def order_indices(order: OrderSection, names: tuple[str, ...], benchmark: str) -> list[int]:
    """Returns an order as indices into `names`, each exactly once.

    >>> order_indices(("dog", 0), ("cat", "dog"), "images")
    [1, 0]
    """
    if isinstance(order, SeedOrder):
        return shuffled(len(names), order.seed)
    if isinstance(order, str):
        return list(range(len(names)))
    items, origin = (_from_file(order, benchmark), order.file) if isinstance(order, FileOrder) else (order, "order")
    indices = class_indices(items, names, origin)
    missing = [name for k, name in enumerate(names) if k not in set(indices)]
    if missing:
        raise InputError(
            f"{origin}: {some_of(missing, show=repr)} missing in the order of the {len(names)} classes; name each once"
        )
    return indices


def class_indices(items: Sequence[Item], names: tuple[str, ...], origin: str) -> list[int]:
    """Returns class names or indices as indices; each must be known, and may be named once."""
    named = [names[item] if isinstance(item, int) and 0 <= item < len(names) else item for item in items]
    indices = places_of(named, names, f"{origin}: of {len(names)} classes, which count from 0, none is")
    twice = [names[index] for index, count in Counter(indices).items() if count > 1]
    if twice:
        raise InputError(f"{origin}: {some_of(twice, show=repr)} named twice")
    return indices


def equal_parts(order: Sequence[int], tasks: int) -> list[tuple[int, ...]]:
    """Cuts an order into parts whose sizes differ by at most one, the larger first.

    >>> equal_parts([4, 2, 0, 1, 3], 2)
    [(4, 2, 0), (1, 3)]
    """
    if tasks > len(order):
        raise InputError(
            f"tasks is {tasks}, but there are only {len(order)} classes, and every task needs one: give at most "
            f"{len(order)} tasks"
        )
    size, larger = divmod(len(order), tasks)
    cuts = [t * size + min(t, larger) for t in range(tasks + 1)]
    return [tuple(order[start:end]) for start, end in pairwise(cuts)]


def named_groups(groups: Mapping[str, Sequence[Item]], names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns groups of class names as groups of indices. Classes must be known, and in one group at most."""
    indices = iter(class_indices([item for items in groups.values() for item in items], names, "tasks"))
    return {group: tuple(next(indices) for _ in items) for group, items in groups.items()}


def _from_file(order: FileOrder, benchmark: str) -> list[Item]:
    """Reads the items of an order in a JSON file {benchmark: {name: list}}.

    "BENCHMARK_classes" may list the names that indices count in.
    """
    content = read_json(Path(order.file))
    key = benchmark if benchmark in content else benchmark.replace("-", "_")
    orders, classes = content.get(key), content.get(f"{key}_classes")
    items = orders.get(order.name) if isinstance(orders, dict) else None
    if not isinstance(items, list) or not all(type(item) in (str, int) for item in items):
        known = f"{key} has {some_of(orders)}" if isinstance(orders, dict) else f"it has {some_of(content)}"
        raise InputError(f"{order.file}: no order {order.name!r} of {benchmark}, but {known}; it must be {FILE}")
    if isinstance(classes, list):
        items = [classes[x] if isinstance(x, int) and 0 <= x < len(classes) else x for x in items]
    return list(items)
