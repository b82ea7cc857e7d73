"""An experiment's YAML: a sequence to train, environments to tailor to, and what to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError, closest
from tunable_magmax.experiments.environments import (
    META,
    PAPER,
    VARIANTS,
    EnvironmentSizes,
    equal_mixtures,
    paper_size,
)
from tunable_magmax.experiments.rows import BASELINES, DEFAULTS, PREFERENCES, Row, Scale, plan_rows
from tunable_magmax.training.config import TrainConfig, set_value
from tunable_magmax.training.values import flag

KEYS = (
    "name",
    "setting",
    "about",
    "run",
    "seeds",
    "order_from_seed",
    "environments",
    "baselines",
    "preferences",
    "scales",
    "grid",
    "variations",
    "search",
    "alphas",
    "meta_sizes",
    "parts",
    "kinds",
    "only",
    "extends",
)
# What an experiment of parts says for itself; everything else is its parts'.
OF_PARTS = ("name", "setting", "about", "parts", "kinds", "only")
KINDS = ("sequence", "scale", "row", "alpha", "meta-size")
ENVIRONMENTS = ("mixtures", "equal", "variants", "size", "most", "meta")
GRID = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
HOLDOUT = 0.05


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. `parts`: other experiments whose records it shows together; then it has no run.

    `kinds` and `only`: the kinds of jobs and the rows it is restricted to.
    """

    name: str
    setting: str
    about: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (3, 4, 5)
    order_from_seed: bool = False
    environments: EnvironmentSizes = field(default_factory=EnvironmentSizes)
    baselines: tuple[str, ...] = BASELINES
    preferences: tuple[str, ...] = ("label", "ot", "cosine", "mmd", "shift", "probe", "auto")
    scales: tuple[Scale, ...] = (0.5, "matched", "best")
    grid: tuple[float, ...] = GRID
    variations: tuple[Mapping[str, Any], ...] = ()
    search_trials: int = 50
    search_variants: tuple[int, ...] = VARIANTS[:1]
    alphas: tuple[float, ...] = ()
    meta_sizes: tuple[int, ...] = ()
    parts: tuple[Experiment, ...] = ()
    kinds: tuple[str, ...] = KINDS
    only: tuple[str, ...] = ()
    root: Path = Path()

    @property
    def rows(self) -> list[Row]:
        rows = plan_rows(self.baselines, self.preferences, self.scales, self.variations)
        return [row for row in rows if not self.only or row.name in self.only]

    def training(self, seed: int) -> TrainConfig:
        """What is trained with a seed."""
        benchmark = dict(self.run.get("benchmark") or {})
        if self.order_from_seed:
            benchmark["order"] = {"seed": seed}
        if "best" in self.scales:
            benchmark.setdefault("holdout", HOLDOUT)
        given = {"matrix": False, **self.run, "benchmark": benchmark, "seed": seed}
        return TrainConfig.read(given, self.root, f"experiment {self.name}, run")


def read_experiment(path: str | Path, changes: Sequence[str] = ()) -> Experiment:
    """Read a YAML; relative paths count from its directory. `changes`, as "run.model=clip/", replace single values.

    Of an experiment of parts they replace those of each part, but for its own name, setting, about, kinds and only.
    """
    path = Path(path)
    return _checked(_loaded(path), path, changes)


def _loaded(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's mapping, on top of the one that it extends."""
    import yaml

    if path.resolve() in above:
        raise InputError(f"{path} extends itself")
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; expected the YAML of an experiment, as in configs/") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: not a readable YAML file: {error}") from None
    if not isinstance(given, dict):
        raise InputError(f"{path}: expected a mapping with the keys {', '.join(KEYS)}")
    extended = given.pop("extends", None)
    if extended is None:
        return given
    return _merged(_loaded(path.parent / str(extended), (*above, path.resolve())), given)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings inside mappings are merged; everything else above replaces what is below."""
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = _merged(below[key], above[key])
    return both


def _checked(given: dict[str, Any], path: Path, changes: Sequence[str]) -> Experiment:
    has_parts = given.get("parts") is not None
    passed_on = [change for change in changes if has_parts and _key(change) not in OF_PARTS]
    for change in changes:
        if change not in passed_on:
            set_value(given, change)
    problems = _unknown(given, KEYS, "")
    values: dict[str, Any] = {"name": str(given.get("name") or path.stem), "root": path.parent.absolute()}
    for key in ("setting", "about"):
        values[key] = given.get(key, "" if key == "about" else values["name"])
    parts = given.get("parts")
    if parts is not None:
        if "run" in given:
            problems.append("parts and run are both given: an experiment shows its own run, or others'")
        limits: dict[str, Any] = {key: given[key] for key in ("kinds", "only") if key in given}
        files = [path.parent / str(part) for part in parts]
        values["parts"] = tuple(_checked(_merged(_loaded(file), limits), file, passed_on) for file in files)
    elif not isinstance(given.get("run"), Mapping):
        problems.append("run is missing: what is trained, as in run.yaml")
    else:
        values["run"] = given["run"]
    readers: dict[str, Callable[[Any], Any]] = {
        "seeds": _each(_integer),
        "order_from_seed": flag,
        "baselines": _each(_one_of(BASELINES)),
        "preferences": _each(_one_of(PREFERENCES)),
        "scales": _each(_scale),
        "grid": _each(_positive),
        "alphas": _each(float),
        "meta_sizes": _each(_integer),
        "variations": _each(_variation),
        "kinds": _each(_one_of(KINDS)),
        "only": _each(str),
    }
    for key, read in readers.items():
        if key in given:
            try:
                values[key] = read(given[key])
            except (ValueError, TypeError) as error:
                problems.append(f"{key}: {error}")
    values |= _search(given.get("search"), problems)
    tasks = ((given.get("run") or {}).get("benchmark") or {}).get("tasks") if not problems else None
    values["environments"] = _environments(given.get("environments") or {}, tasks, problems)
    if problems:
        raise InputError(f"{path}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    experiment = Experiment(**values)
    if not experiment.parts:
        for seed in experiment.seeds:
            experiment.training(seed)  # tells what is wrong with the run before anything is made
    return experiment


def _key(change: str) -> str:
    """The outermost key that a change is about."""
    return change.partition("=")[0].split(".")[0]


def _environments(given: Any, tasks: Any, problems: list[str]) -> EnvironmentSizes:
    if not isinstance(given, Mapping):
        problems.append(f"environments is {given!r}, expected a mapping with some of {', '.join(ENVIRONMENTS)}")
        return EnvironmentSizes(PAPER)
    problems += _unknown(given, ENVIRONMENTS, " in environments")
    mixtures: dict[str, tuple[float, ...]] = dict(PAPER)
    try:
        if given.get("equal") is not None:
            mixtures = equal_mixtures(_each(_integer)(given["equal"]))
        if given.get("mixtures") not in (None, "paper"):
            mixtures = {str(name): _each(_positive)(ratio) for name, ratio in given["mixtures"].items()}
        size = given.get("size", "paper")
        if size == "paper":
            size = paper_size(tasks) if isinstance(tasks, int) else None
        return EnvironmentSizes(
            mixtures,
            _each(_integer)(given.get("variants", list(VARIANTS))),
            None if size in (None, "supply") else _integer(size),
            _integer(given.get("most", 1000)),
            _positive(given.get("meta", META)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        problems.append(f"environments: {error}")
        return EnvironmentSizes(PAPER)


def _search(given: Any, problems: list[str]) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        found: dict[str, Any] = {}
        if "trials" in given:
            found["search_trials"] = _integer(given["trials"])
        if "variants" in given:
            found["search_variants"] = _each(_integer)(given["variants"])
        problems += _unknown(given, ("trials", "variants"), " in search")
        return found
    except (ValueError, TypeError) as error:
        problems.append(f"search: {error}")
        return {}


def _unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> list[str]:
    return [
        f"unknown key {key!r}{where}{closest(str(key), known)}; known: {', '.join(known)}"
        for key in given
        if key not in known
    ]


def _each(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def each(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(f"{values!r} is no list of values")
        return tuple(read(value) for value in values)

    return each


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)


def _scale(value: Any) -> Scale:
    return value if value in ("matched", "best") else _positive(value)


def _one_of(names: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is none of {', '.join(names)}{closest(str(value), names)}")
        return str(value)

    return check


def _variation(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value or not set(value) <= set(DEFAULTS):
        raise ValueError(f"{value!r}: expected options of the merge among {', '.join(DEFAULTS)}")
    return dict(value)
