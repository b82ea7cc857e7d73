"""The `benchmark` section of run.yaml, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunable_magmax.data.catalog import DATA_SETS
from tunable_magmax.data.orders import Item, Order, is_seed
from tunable_magmax.data.splits import DataOptions
from tunable_magmax.errors import InputError, closest


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(DataOptions):
    """What to learn in which order. `tasks`: how many, or group name -> classes; None: a task for each domain."""

    tasks: int | Mapping[str, tuple[Item, ...]] | None
    order: Order = field(default_factory=Order)
    holdout: float = 0.0
    """The share of each class's training samples that no task is trained on, for choices that need labels."""
    per_class: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any], root: Path) -> BenchmarkOptions:
        """From a mapping as run.yaml holds it. Relative paths count from `root`; all problems are told at once.

        >>> options = BenchmarkOptions.read({"name": "cifar100", "data": "cifar", "tasks": 20}, Path("/data"))
        >>> options.record()["data"], options.record()["order"]
        ('/data/cifar', 'natural')
        """
        name = given.get("name")
        if not isinstance(name, str) or name not in DATA_SETS:
            hint = closest(name, list(DATA_SETS)) if isinstance(name, str) else ""
            raise InputError(f"benchmark: name is {name!r}{hint}, expected one of {', '.join(DATA_SETS)}")
        data_set = DATA_SETS[name]
        problems = [_unknown(key, name) for key in given if key not in data_set.keys]
        scenario = given.get("scenario", "class")
        if scenario not in ("class", "domain"):
            problems.append(f"scenario is {scenario!r}, expected class or domain")
        elif scenario == "domain" and "domain_column" not in data_set.keys:
            others = [other for other, line in DATA_SETS.items() if "domain_column" in line.keys]
            problems.append(f"scenario is 'domain', but {name} has no domains; {' and '.join(others)} may have")
        values: dict[str, Any] = {
            "scenario": scenario,
            "tasks": _tasks(given.get("tasks"), scenario, problems),
            "order": Order.read(given.get("order"), root, problems),
        }
        if isinstance(values["tasks"], Mapping) and given.get("order") not in (None, "natural"):
            problems.append("order is given, but tasks are named groups, which come as they are listed; drop order")
        for key in ("data", "class_names"):
            path = given.get(key)
            if path is not None and not isinstance(path, str | Path):
                problems.append(f"{key} is {path!r}, expected a path")
            elif path is not None:
                values[key] = root / Path(path).expanduser()
        if "data" in data_set.keys and given.get("data") is None:
            problems.append(f"data is missing: where does {name} lie?")
        for key in ("text_column", "label_column", "domain_column"):
            values[key] = given.get(key)
            if values[key] is not None and not isinstance(values[key], str):
                problems.append(f"{key} is {values[key]!r}, expected the name of a column")
        if data_set.kind == "text" and scenario == "domain" and given.get("domain_column") is None:
            problems.append("domain_column is missing: which column names the domain of a text?")
        values["split_seed"] = given.get("split_seed", 0)
        if not is_seed(values["split_seed"]):
            problems.append(f"split_seed is {values['split_seed']!r}, expected a whole number from 0 on")
        share = given.get("test_share", 0.2)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            problems.append(f"test_share is {share!r}, expected a number between 0 and 1, such as 0.2")
        else:
            values["test_share"] = float(share)
        held = given.get("holdout", 0.0)
        if isinstance(held, bool) or not isinstance(held, int | float) or not 0 <= held < 1:
            problems.append(f"holdout is {held!r}, expected a number from 0 to below 1, such as 0.05")
        else:
            values["holdout"] = float(held)
        values["per_class"] = _per_class(given.get("per_class"), problems)
        values["numbers"] = _numbers(given, data_set.numbers, problems)
        if problems:
            raise InputError(f"benchmark: {'; '.join(problems)}")
        return cls(name=name, **values)

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


def _unknown(key: Any, name: str) -> str:
    keys = DATA_SETS[name].keys
    if any(key in data_set.keys for data_set in DATA_SETS.values()):
        return f"{key} does not apply to {name}, which takes {', '.join(keys)}"
    return f"unknown key {key!r}{closest(str(key), keys)}; {name} takes {', '.join(keys)}"


def _tasks(given: Any, scenario: str, problems: list[str]) -> Any:
    if scenario == "domain":
        if given is not None and not _count(given):
            problems.append(f"tasks is {given!r}, but with scenario domain every domain is a task; drop tasks")
        return given
    if _count(given):
        return given
    if not isinstance(given, Mapping):
        said = "missing" if given is None else f"{given!r}"
        problems.append(f"tasks is {said}, expected how many (1 or more), or a mapping of group names to classes")
        return None
    groups: dict[str, tuple[Item, ...]] = {}
    for group, items in given.items():
        odd = not isinstance(items, list | tuple) or not items
        if odd or any(isinstance(item, bool) or not isinstance(item, str | int) for item in items):
            problems.append(f"tasks: the group {group!r} is {items!r}, expected a list of class names or indices")
        else:
            groups[str(group)] = tuple(items)
    if not given:
        problems.append("tasks is an empty mapping, expected group names and their classes")
    return groups


def _per_class(given: Any, problems: list[str]) -> dict[str, int]:
    if given is None:
        return {}
    good = isinstance(given, Mapping) and set(given) <= {"train", "test"} and all(map(_count, given.values()))
    if not good:
        problems.append(f"per_class is {given!r}, expected how many of each class, such as {{train: 100, test: 20}}")
        return {}
    return dict(given)


def _numbers(given: Mapping[str, Any], defaults: Mapping[str, int], problems: list[str]) -> dict[str, int]:
    """The whole numbers that are options of one data set only; what is not given has its default."""
    values = {key: given.get(key, default) for key, default in defaults.items()}
    for key, value in values.items():
        least = 0 if defaults[key] == 0 else 1
        if not is_seed(value) or value < least:
            problems.append(f"{key} is {value!r}, expected a whole number from {least} on")
    return values


def _count(value: Any) -> bool:
    return is_seed(value) and value > 0
