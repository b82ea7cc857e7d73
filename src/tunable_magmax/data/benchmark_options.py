"""The `benchmark` section of run.yaml, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tunable_magmax.config import STRICT, PositiveInt, Proportion, Seed, Text, gather, refuse
from tunable_magmax.data.catalog import DATA_SETS
from tunable_magmax.data.orders import Item, Order, OrderSection
from tunable_magmax.data.splits import DataOptions, Scenario

Groups = dict[str, Annotated[tuple[Item, ...], Field(min_length=1)]]


@dataclass(frozen=True, kw_only=True)
class _Section:
    """What to learn, in which order."""

    __pydantic_config__ = STRICT
    tasks: (
        Annotated[
            PositiveInt | Annotated[Groups, Field(min_length=1)],
            Field(description="a number of tasks, or a mapping of group names to lists of class names or indices"),
        ]
        | None
    ) = None
    order: OrderSection | None = None
    scenario: Scenario = "class"
    holdout: Proportion = 0.0
    split_seed: Seed = 0
    data: Text | None = None
    per_class: dict[Literal["train", "test"], PositiveInt] | None = None
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    class_names: Text | None = None
    text_column: Text | None = None
    label_column: Text | None = None
    domain_column: Text | None = None


def _section_type() -> Any:
    """Adds what the table of data sets says: the names, and the numbers that are options of some of them."""
    own = {key: default for data_set in DATA_SETS.values() for key, default in data_set.numbers.items()}
    fields: list[Any] = [("name", Literal[tuple(DATA_SETS)])]
    fields += [(key, Annotated[int, Field(ge=min(default, 1))] | None, None) for key, default in own.items()]
    about = {"__doc__": _Section.__doc__}
    return make_dataclass("BenchmarkSection", fields, bases=(_Section,), namespace=about, frozen=True, kw_only=True)


BenchmarkSection: Any = _section_type()
"""Describes the section as it is written in run.yaml."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(DataOptions):
    """What to learn in which order. `tasks`: how many, or group name -> classes; None: a task for each domain."""

    tasks: int | Mapping[str, tuple[Item, ...]] | None
    order: Order = field(default_factory=Order)
    holdout: float = 0.0
    """The share of each class's training samples that no task is trained on, for choices that need labels."""
    per_class: Mapping[str, int] = field(default_factory=dict)

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
        checked: Any = gather(BenchmarkSection, section, problems, inside)
        name = section.get("name") if isinstance(section, Mapping) else None
        if isinstance(name, str) and name in DATA_SETS:
            problems += [prefix + problem for problem in _contradictions(section, name)]
        if len(problems) > before:
            return None
        own = DATA_SETS[checked.name].numbers
        values = {key: getattr(checked, key) for key in cls.__dataclass_fields__ if key != "numbers"}
        for key in ("data", "class_names"):
            values[key] = None if values[key] is None else root / Path(values[key]).expanduser()
        values["order"] = Order.of(checked.order, root)
        values["per_class"] = checked.per_class or {}
        return cls(**values, numbers={key: section.get(key, default) for key, default in own.items()})

    def record(self) -> dict[str, Any]:
        """Everything in effect, as JSON can hold it; `read` takes it back."""
        tasks = {k: list(v) for k, v in self.tasks.items()} if isinstance(self.tasks, Mapping) else self.tasks
        values = {
            **{key: getattr(self, key) for key in DATA_SETS[self.name].keys if key not in self.numbers},
            **dict(self.numbers),
            "tasks": tasks,
            "order": self.order.record(),
        }
        if "per_class" in values:
            values["per_class"] = dict(self.per_class)
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


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
