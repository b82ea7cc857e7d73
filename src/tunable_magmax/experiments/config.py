"""An experiment's YAML: a sequence to train, environments to tailor to, and what to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunable_magmax.config import (
    Reader,
    each,
    flag,
    one_of,
    or_none,
    path_here,
    read_section,
    read_value,
    read_yaml,
    real,
    set_value,
    text,
    unknown_keys,
    whole,
)
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.environments import PAPER, VARIANTS, EnvironmentSizes, equal_mixtures, paper_size
from tunable_magmax.experiments.rows import BASELINES, DEFAULTS, PREFERENCES, Row, Scale, plan_rows
from tunable_magmax.training.config import PATHS, TrainConfig

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
    """Read a YAML. `changes`, as "run.model=clip/", replace single values.

    Relative paths in the file count from its directory, those in `changes` from the current one. Of an experiment
    of parts, changes replace the values of each part, but for its own name, setting, about, kinds and only.
    """
    path = Path(path)
    return _checked(_loaded(path), path, changes)


def _loaded(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's mapping, on top of the one that it extends."""
    if path.resolve() in above:
        raise InputError(f"{path} extends itself")
    given = read_yaml(path, "the YAML of an experiment, as in configs/", f"the keys {', '.join(KEYS)}")
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
            set_value(given, change, _PATHS)
    problems = unknown_keys(given, KEYS)
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
    values |= {key: read_value(given[key], read, key, problems) for key, read in _READERS.items() if key in given}
    searched = read_section(given.get("search"), _SEARCH, "search", problems)
    values |= {f"search_{key}": value for key, value in searched.items()}
    tasks = ((given.get("run") or {}).get("benchmark") or {}).get("tasks") if not problems else None
    values["environments"] = _environments(given.get("environments"), tasks, problems)
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
    found = read_section(given, _ENVIRONMENTS, "environments", problems)
    equal, mixtures, size = found.pop("equal", None), found.pop("mixtures", None), found.pop("size", "paper")
    if mixtures in (None, "paper"):
        mixtures = PAPER if equal is None else equal_mixtures(equal)
    if size == "paper":
        size = paper_size(tasks) if isinstance(tasks, int) else None
    return EnvironmentSizes(mixtures, size=None if size == "supply" else size, **found)


def _or_named(*names: str, check: Reader) -> Reader:
    """One of some names, or what `check` takes."""

    def checked(value: Any) -> Any:
        if isinstance(value, str) and value in names:
            return value
        try:
            return check(value)
        except ValueError as error:
            raise ValueError(f"{', '.join(names)} or {error}") from None

    return checked


def _mixtures(value: Any) -> Mapping[str, tuple[float, ...]]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError("a mapping of names to ratios, such as {D1: [0.5, 0.5]}")
    return {str(name): each(_POSITIVE)(ratio) for name, ratio in value.items()}


def _variation(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value or not set(value) <= set(DEFAULTS):
        raise ValueError(f"options of the merge among {', '.join(DEFAULTS)}")
    return dict(value)


_PATHS: dict[str, Reader] = {f"run.{key}": read for key, read in PATHS.items()} | {
    "parts": lambda files: [path_here(file) for file in files] if isinstance(files, list) else files
}
_POSITIVE = real(0, above=True)
_READERS: dict[str, Reader] = {
    "seeds": each(whole(0)),
    "order_from_seed": flag,
    "baselines": each(one_of(*BASELINES)),
    "preferences": each(one_of(*PREFERENCES)),
    "scales": each(_or_named("matched", "best", check=_POSITIVE)),
    "grid": each(_POSITIVE),
    "alphas": each(real(0)),
    "meta_sizes": each(whole(0)),
    "variations": each(_variation),
    "kinds": each(one_of(*KINDS)),
    "only": each(text),
}
_SEARCH: dict[str, Reader] = {"trials": whole(0), "variants": each(whole(0))}
_ENVIRONMENTS: dict[str, Reader] = {
    "mixtures": or_none(_or_named("paper", check=_mixtures)),
    "equal": or_none(each(whole(1))),
    "variants": each(whole(0)),
    "size": or_none(_or_named("paper", "supply", check=whole(1))),
    "most": whole(1),
    "meta": real(0, above=True),
}
