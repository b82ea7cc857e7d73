"""The section `benchmark` of run.yaml, and the tasks that it describes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tunable_magmax.config import gather, refuse
from tunable_magmax.data.data_sets import DATA_SETS, open_split
from tunable_magmax.data.options import DataOptions, Scenario, Section
from tunable_magmax.data.orders import (
    FileOrder,
    SeedOrder,
    equal_parts,
    named_groups,
    order_indices,
    rooted,
    sizes_sentence,
)
from tunable_magmax.data.samples import Kind, Samples
from tunable_magmax.data.splits import held_out, limited
from tunable_magmax.errors import InputError, some_of


def section_type() -> Any:
    """Describes the section as it is written in run.yaml, for `config.check`.

    The table of data sets adds their names, and the numbers that are options of some of them.
    """
    own = {key: default for data_set in DATA_SETS.values() for key, default in data_set.numbers.items()}
    fields: list[Any] = [("name", Literal[tuple(DATA_SETS)])]
    fields += [(key, Annotated[int, Field(ge=min(default, 1))] | None, None) for key, default in own.items()]
    about = {"__doc__": Section.__doc__}
    return make_dataclass("BenchmarkSection", fields, bases=(Section,), namespace=about, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(DataOptions):
    """A checked section: relative paths count from where it was read, and everything in effect can be recorded."""

    @classmethod
    def read(cls, section: Any, root: Path) -> BenchmarkOptions:
        """From a mapping as run.yaml holds it. Relative paths count from `root`; all problems are in one error.

        >>> options = BenchmarkOptions.read({"name": "cifar100", "data": "cifar", "tasks": 20}, Path("/data"))
        >>> options.record()["data"], options.record()["order"]
        ('/data/cifar', 'natural')
        """
        problems: list[str] = []
        options = cls.gather(section, root, problems)
        refuse(problems, "benchmark")
        assert options is not None
        return options

    @classmethod
    def gather(cls, section: Any, root: Path, problems: list[str], inside: str = "") -> BenchmarkOptions | None:
        """Like `read`, but adds the problems to a list. `inside`: the keys that lead to the section."""
        before = len(problems)
        prefix = f"{inside}." if inside else ""
        checked: Any = gather(section_type(), section, problems, inside)
        name = section.get("name") if isinstance(section, Mapping) else None
        if isinstance(name, str) and name in DATA_SETS:
            problems += [prefix + problem for problem in _contradictions(section, name)]
        if len(problems) > before:
            return None
        own = DATA_SETS[checked.name].numbers
        values = {key: getattr(checked, key) for key in cls.__dataclass_fields__ if key != "numbers"}
        for key in ("data", "class_names"):
            values[key] = None if values[key] is None else str(root / Path(values[key]).expanduser())
        values["order"] = rooted(checked.order, root)
        values["per_class"] = checked.per_class or {}
        return cls(**values, numbers={key: section.get(key, default) for key, default in own.items()})

    def record(self) -> dict[str, Any]:
        """Everything in effect, as JSON can hold it; `read` takes it back."""
        values = {key: getattr(self, key) for key in DATA_SETS[self.name].keys if key not in self.numbers}
        values |= self.numbers
        if isinstance(self.order, SeedOrder | FileOrder):
            values["order"] = {key: value for key, value in vars(self.order).items() if value is not None}
        record: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return record


def _contradictions(section: Mapping[str, Any], name: str) -> list[str]:
    """Lists what does not fit together: keys of other data sets, and values that exclude or need each other."""
    data_set, takes = DATA_SETS[name], DATA_SETS[name].keys
    tasks, by_domain = section.get("tasks"), section.get("scenario") == "domain"
    known = {key for other in DATA_SETS.values() for key in other.keys}
    problems = [
        f"{key} does not apply to {name}, which takes {', '.join(takes)}"
        for key in section
        if key in known and key not in takes
    ]
    if by_domain and "domain_column" not in takes:
        others = [other for other, line in DATA_SETS.items() if "domain_column" in line.keys]
        problems.append(f"scenario is 'domain', but {name} has no domains; {' and '.join(others)} may have")
    if by_domain and isinstance(tasks, Mapping):
        problems.append("tasks names groups, but with scenario domain every domain is a task; leave tasks out")
    if not by_domain and tasks is None:
        problems.append("tasks is missing: give a number of tasks, or named groups of classes")
    if isinstance(tasks, Mapping) and section.get("order") not in (None, "natural"):
        problems.append("order is given, but tasks are named groups, which come as they are listed; leave order out")
    if "data" in takes and section.get("data") is None:
        problems.append(f"data is missing: where is {name}?")
    if by_domain and data_set.kind == "text" and section.get("domain_column") is None:
        problems.append("domain_column is missing: which column names the domain of a text?")
    return problems


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A task of a benchmark. `classes` are indices, `train` and `test` ascending positions in its samples.

    `held`: training samples that are not trained on, if the options hold some out.
    """

    name: str
    classes: tuple[int, ...]
    train: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    domain: str | None = None
    held: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Samples and the tasks they belong to. `facts` records what was chosen, drawn and left out, for JSON.

    `classes` are the labels' own names; `prompts`: the templates that suit them, or the name of a set of templates.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    tasks: tuple[Task, ...]
    scenario: Scenario
    facts: dict[str, Any]
    prompts: str | tuple[str, ...] | None


def open_benchmark(options: BenchmarkOptions) -> Benchmark:
    """Reads the data, orders the classes, and divides them among tasks.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = [f"text {k},{label}" for label in "abcde" for k in range(5)]
    ...     _ = Path(folder, "all.csv").write_text("\\n".join(["text,label", *rows]))
    ...     options = BenchmarkOptions.read({"name": "texts", "data": "all.csv", "tasks": 2}, Path(folder))
    ...     benchmark = open_benchmark(options)
    >>> benchmark.facts["sizes"], [len(task.train) for task in benchmark.tasks], len(benchmark.test)
    ('5 classes in 2 tasks: 1 of 3 and 1 of 2', [12, 8], 5)
    """
    split = open_split(options)
    train, test = split.train, split.test
    facts: dict[str, Any] = dict(split.facts)
    if options.scenario == "domain":
        empty = _domains(options, train, test)
    elif isinstance(options.tasks, Mapping):
        groups = named_groups(options.tasks, train.classes)
        kept = sorted(index for group in groups.values() for index in group)
        facts["left_out"] = [name for k, name in enumerate(train.classes) if k not in set(kept)]
        place = {index: k for k, index in enumerate(kept)}
        train, test = (_restricted(samples, place) for samples in (train, test))
        empty = [Task(name, tuple(place[index] for index in group)) for name, group in groups.items()]
    else:
        assert options.tasks is not None
        order = order_indices(options.order, train.classes, options.name)
        width = max(2, len(str(options.tasks)))
        divided = equal_parts(order, options.tasks)
        empty = [Task(f"task-{t:0{width}d}", classes) for t, classes in enumerate(divided, 1)]
    _require_samples(train, empty)
    tasks = tuple(_filled(task, train, test, options) for task in empty)
    _require_tests(test, tasks, facts)
    facts |= _record(options, train, tasks)
    facts["digest"] = _digest(train, test, tasks, split.drawn)
    prompts = DATA_SETS[options.name].prompts
    return Benchmark(options.name, train.kind, train.classes, train, test, tasks, options.scenario, facts, prompts)


def _domains(options: BenchmarkOptions, train: Samples, test: Samples) -> list[Task]:
    """Returns a task for each domain, yet without samples."""
    names = tuple(sorted(set(train.domains or ())))
    strange = sorted(set(test.domains or ()) - set(names))
    if strange:
        raise InputError(f"{test.origin}: no training sample is of the domain {some_of(strange, show=repr)}")
    if options.tasks is not None and options.tasks != len(names):
        raise InputError(
            f"tasks is {options.tasks}, but with scenario domain every domain is a task, and {train.origin} has "
            f"{len(names)} ({some_of(names)}); drop tasks"
        )
    everything = tuple(range(len(train.classes)))
    order = order_indices(options.order, names, options.name, "domain")
    return [Task(names[index], everything, domain=names[index]) for index in order]


def _restricted(samples: Samples, place: Mapping[int, int]) -> Samples:
    """Keeps only samples of the classes in `place`, which maps them to their new indices."""
    labels = samples.labels or ()
    kept = samples.subset([position for position, label in enumerate(labels) if label in place])
    names = tuple(samples.classes[index] for index in place)
    return replace(kept, classes=names, labels=tuple(place[label] for label in kept.labels or ()))


def _require_samples(train: Samples, tasks: Sequence[Task]) -> None:
    present = set(train.labels or ())
    empty = sorted({index for task in tasks for index in task.classes} - present)
    if empty:
        names = some_of(repr(train.classes[index]) for index in empty)
        raise InputError(
            f"{train.origin}: no training sample of {len(empty)} of the {len(train.classes)} classes: {names}; "
            "add samples, remove the class from the data or the list of classes, or name the classes to learn as "
            "groups under tasks"
        )


def _filled(task: Task, train: Samples, test: Samples, options: BenchmarkOptions) -> Task:
    """Returns a task with its samples."""
    classes = set(task.classes)

    def positions(samples: Samples, most: int | None) -> list[int]:
        labels = samples.labels or ()
        if task.domain is None:
            own = [position for position, label in enumerate(labels) if label in classes]
        else:
            own = [position for position, domain in enumerate(samples.domains or ()) if domain == task.domain]
        return own if most is None else limited(own, labels, most, options.split_seed)

    most: Mapping[str, int] = options.per_class or {}  # type: ignore[assignment]
    tested, learned = positions(test, most.get("test")), positions(train, most.get("train"))
    kept, held = held_out(learned, train.labels or (), options.holdout, options.split_seed)
    return replace(task, train=tuple(kept), test=tuple(tested), held=tuple(held))


def _require_tests(test: Samples, tasks: Sequence[Task], facts: dict[str, Any]) -> None:
    """Refuses tasks without test samples, which could not be evaluated; records classes without any in `facts`."""
    untested = [task.name for task in tasks if not task.test]
    if untested:
        raise InputError(
            f"{test.origin}: no test sample for {some_of(untested, show=repr)} of the {len(tasks)} tasks; "
            "every task needs some: add test samples, raise test_share, or use fewer and larger tasks"
        )
    labels = test.labels or ()
    seen = {labels[position] for task in tasks for position in task.test}
    learned = {index for task in tasks for index in task.classes}
    facts["untested"] = [test.classes[index] for index in sorted(learned - seen)]


def _record(options: BenchmarkOptions, train: Samples, tasks: Sequence[Task]) -> dict[str, Any]:
    by_domain = options.scenario == "domain"
    sizes = [len(task.classes) for task in tasks]
    sentence = f"{len(tasks)} domains of {len(train.classes)} classes" if by_domain else sizes_sentence(sizes)
    return {
        "name": options.name,
        "scenario": options.scenario,
        "options": options.record(),
        "classes": list(train.classes),
        "order": [task.name for task in tasks]
        if by_domain
        else [train.classes[index] for task in tasks for index in task.classes],
        "sizes": sentence,
        "task_sizes": sizes,
        "tasks": [
            {
                "name": task.name,
                "classes": [train.classes[index] for index in task.classes],
                "train": len(task.train),
                "test": len(task.test),
                "absent": _absent(task, train),
            }
            for task in tasks
        ],
    }


def _absent(task: Task, train: Samples) -> list[str]:
    """Returns the classes of a task that have no training sample in it, which is possible with domains."""
    labels = train.labels or ()
    counts = Counter(labels[position] for position in task.train)
    return [train.classes[index] for index in task.classes if not counts[index]]


def _digest(train: Samples, test: Samples, tasks: Sequence[Task], drawn: Sequence[int]) -> str:
    """Returns the SHA-256 of classes, labels, split and tasks: equal wherever the data lies. Reads no inputs."""
    divided = [[task.name, task.classes, task.train, task.test, task.domain] for task in tasks]
    content = json.dumps([train.classes, train.labels, test.labels, drawn, divided])
    return hashlib.sha256(content.encode()).hexdigest()
