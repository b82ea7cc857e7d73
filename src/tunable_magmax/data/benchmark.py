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
from tunable_magmax.data.samples import Samples, places_of
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

    `classes` are the labels' own names.
    """

    name: str
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    tasks: tuple[Task, ...]
    facts: dict[str, Any]


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
    train, test = split.train, _with_classes_of(split.train, split.test)
    if isinstance(data_set.tasks, Mapping):
        listed = tuple(item for items in data_set.tasks.values() for item in items)
        indices = iter(order_indices(listed, train.classes, data_set.name))
        groups = {name: tuple(next(indices) for _ in items) for name, items in data_set.tasks.items()}
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
    return Benchmark(data_set.name, train.classes, train, test, tasks, facts)


def _with_classes_of(train: Samples, test: Samples) -> Samples:
    """Returns the test samples with the training samples' classes, in their order."""
    train.require_labels()
    complaint = f"{test.origin}: correct labels that are outside the classes of {train.origin}, or add training samples"
    return replace(test, classes=train.classes, labels=tuple(places_of(test.label_names(), train.classes, complaint)))


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
    if empty := sorted({*train.classes} - {*train.present_classes()}):
        raise InputError(
            f"{train.origin}: no training sample of {some_of(empty, show=repr)}; add samples, or remove the class from "
            "the data"
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
    items, origin = (_from_file(order, benchmark), order.file) if isinstance(order, FileOrder) else (order, benchmark)
    named = [names[item] if isinstance(item, int) and 0 <= item < len(names) else item for item in items]
    indices = places_of(named, names, f"{origin}: of {len(names)} classes, which count from 0, none is")
    times = Counter(indices)
    if wrong := [name for k, name in enumerate(names) if times[k] != 1]:
        raise InputError(
            f"{origin}: name each of the {len(names)} classes once; missing or named twice: {some_of(wrong, show=repr)}"
        )
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


def _from_file(order: FileOrder, benchmark: str) -> list[Item]:
    """Reads the items of an order in a JSON file {benchmark: {name: list}}."""
    content = read_json(Path(order.file))
    key = benchmark if benchmark in content else benchmark.replace("-", "_")
    orders = content.get(key)
    items = orders.get(order.name) if isinstance(orders, dict) else None
    if not isinstance(items, list) or not all(type(item) in (str, int) for item in items):
        known = f"{key} has {some_of(orders)}" if isinstance(orders, dict) else f"it has {some_of(content)}"
        raise InputError(f"{order.file}: no order {order.name!r} of {benchmark}, but {known}; it must be {FILE}")
    return items
