"""An experiment's YAML: a sequence to train, environments to tailor to, and what to compare."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, Field, ValidationError, WrapValidator

from tunable_magmax.config import STRICT, NotNegative, Positive, Reader, gather, path_here, read_yaml, refuse, set_value
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.environments import (
    PAPER,
    VARIANTS,
    EnvironmentSizes,
    equal_mixtures,
    level_mixtures,
    paper_size,
)
from tunable_magmax.experiments.rows import BASELINES, Baseline, Option, Row, Source, plan_rows
from tunable_magmax.training.config import PATHS, TrainConfig

GRID = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
HOLDOUT = 0.05
# What an experiment of parts says for itself; everything else is its parts'.
OF_PARTS = ("name", "setting", "about", "parts", "kinds", "only")

Item = TypeVar("Item")
Kind: TypeAlias = Literal["sequence", "scale", "row", "alpha", "meta-size"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def _must_be(words: str) -> WrapValidator:
    """One message for a value that may be of several types, instead of one for each type."""

    def checked(value: Any, check: Any) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"must be {words}") from None

    return WrapValidator(checked)


def _not_empty(values: tuple[Item, ...]) -> tuple[Item, ...]:
    # pydantic's own check also complains of lists whose values are wrong.
    if not values:
        raise ValueError("must have at least one value")
    return values


Some: TypeAlias = Annotated[tuple[Item, ...], AfterValidator(_not_empty), Field(json_schema_extra={"minItems": 1})]
Whole: TypeAlias = Annotated[int, Field(ge=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
ScaleRule: TypeAlias = Annotated[Literal["matched", "best"] | Positive, _must_be("matched, best or a number above 0")]
Mixtures: TypeAlias = Annotated[
    Literal["paper"] | Annotated[dict[str, Annotated[list[Positive], Field(min_length=1)]], Field(min_length=1)] | None,
    _must_be("paper, or a mapping of names to lists of numbers above 0, such as {D1: [0.5, 0.5]}"),
]


def _row_name(name: str) -> str:
    try:
        return Row.parse(name).name
    except InputError as error:
        raise ValueError(str(error)) from None


RowName: TypeAlias = Annotated[str, AfterValidator(_row_name)]
Size: TypeAlias = Annotated[
    Literal["paper", "supply"] | Count | None, _must_be("paper, supply or a whole number of at least 1")
]


@dataclass(frozen=True)
class SearchOptions:
    """The search for preferences: its trials, and the variants of the environments that it is done for."""

    __pydantic_config__ = STRICT
    trials: Whole = 50
    variants: Some[Whole] = VARIANTS[:1]


@dataclass(frozen=True)
class EnvironmentOptions:
    """The environments as a file describes them. `equal`: numbers of tasks in equal shares, instead of `mixtures`.

    `levels`: the same beside the mixtures, and `all` tasks; a sequence leaves out those for which it has too few tasks.
    """

    __pydantic_config__ = STRICT
    mixtures: Mixtures = None
    equal: Some[Count] | None = None
    levels: tuple[Annotated[Literal["all"] | Count, _must_be("all or a whole number of at least 1")], ...] = ()
    variants: Some[Whole] = VARIANTS
    size: Size = "paper"
    most: Count = 1000
    meta: Positive = 0.1

    def sizes(self, tasks: Any) -> EnvironmentSizes:
        """Returns the environments of a benchmark with so many tasks, or with groups of classes as its tasks."""
        count = tasks if isinstance(tasks, int) else len(tasks or ())
        mixtures = PAPER if self.equal is None else equal_mixtures(self.equal)
        if isinstance(self.mixtures, dict):
            mixtures = {name: tuple(ratio) for name, ratio in self.mixtures.items()}
        if self.levels:
            mixtures = {**mixtures, **level_mixtures(self.levels, count)}
        size = paper_size(tasks) if self.size == "paper" and isinstance(tasks, int) else self.size
        return EnvironmentSizes(mixtures, self.variants, size if isinstance(size, int) else None, self.most, self.meta)


@dataclass(frozen=True)
class _Settings:
    """The settings that mean the same in a file and in a checked experiment."""

    name: str = ""
    setting: str = ""
    about: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    seeds: Some[Whole] = (3, 4, 5)
    order_from_seed: bool = False
    baselines: Some[Baseline] = BASELINES
    preferences: Some[Source] = ("label", "ot", "cosine", "mmd", "probe", "auto")
    scales: Some[ScaleRule] = (0.5, "matched", "best")
    grid: Some[Positive] = GRID
    variations: tuple[Annotated[dict[Option, str], Field(min_length=1)], ...] = ()
    rows: tuple[RowName, ...] = ()
    joint_steps: Count | None = None
    alphas: tuple[NotNegative, ...] = ()
    meta_sizes: tuple[Whole, ...] = ()
    kinds: Some[Kind] = KINDS
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExperimentFile(_Settings):
    """The YAML of an experiment. `parts`: files of other experiments; then it has no run of its own.

    `rows`: further rows, by name. `joint_steps`: of the model that is trained on all tasks together, by default as many
    as the sequence has. `kinds` and `only` restrict it to some kinds of jobs and some rows. `extends`: a file that this
    one changes.
    """

    __pydantic_config__ = STRICT
    environments: EnvironmentOptions | None = None
    search: SearchOptions | None = None
    parts: Some[str] | None = None
    extends: str | None = None


@dataclass(frozen=True)
class Experiment(_Settings):
    """A checked experiment. `parts`: other experiments whose records it shows together; then it has no run."""

    environments: EnvironmentSizes = field(default_factory=EnvironmentSizes)
    search: SearchOptions = SearchOptions()
    parts: tuple[Experiment, ...] = ()
    root: Path = Path()

    @property
    def planned(self) -> list[Row]:
        """All rows of its tables."""
        rows = plan_rows(self.baselines, self.preferences, self.scales, self.variations, self.rows)
        return [row for row in rows if not self.only or row.name in self.only]

    def joint_training(self, seed: int, steps: int) -> TrainConfig:
        """Returns the training of one model on all tasks together: the same recipe, with so many steps."""
        run = {**self.run, "benchmark": {**(self.run.get("benchmark") or {}), "tasks": 1}}
        run["train"] = {**(self.run.get("train") or {}), "steps": steps}
        return replace(self, run=run).training(seed)

    def training(self, seed: int) -> TrainConfig:
        """Returns what is trained with a seed."""
        benchmark = dict(self.run.get("benchmark") or {})
        if self.order_from_seed:
            benchmark["order"] = {"seed": seed}
        if "best" in self.scales:
            benchmark.setdefault("holdout", HOLDOUT)
        data = {"matrix": False, **self.run, "benchmark": benchmark, "seed": seed}
        return TrainConfig.read(data, self.root, f"experiment {self.name}, run")


def read_experiment(path: str | Path, changes: Sequence[str] = ()) -> Experiment:
    """Reads a YAML, or one that comes with this package by its name: "glyphs/characters-5".

    `changes`, as "run.model=clip/", replace single values.
    Relative paths in the file count from its directory, those in `changes` from the current one. Of an experiment
    of parts, changes replace the values of each part, but for its own name, setting, about, kinds and only.
    """
    path = find_experiment(path)
    return _checked(_loaded(path), path, changes)


def find_experiment(name: str | Path) -> Path:
    """Returns the file of an experiment: a path that exists, or the name of one that comes with this package."""
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    folder = _packaged()
    names = {str(each.relative_to(folder).with_suffix("")): each for each in sorted(folder.glob("*/*.yaml"))}
    wanted = str(path.with_suffix("") if path.suffix == ".yaml" else path).removeprefix("configs/")
    if wanted in names:
        return names[wanted]
    near = get_close_matches(wanted, names, n=3) or [each for each in names if "/common" not in each]
    raise InputError(
        f"{name} does not exist, and no experiment of that name comes with this package; there are {', '.join(near)}"
    )


def _packaged() -> Path:
    """Returns the folder of this package's experiments: inside it when installed, in the root of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def _loaded(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns a file's mapping, on top of the one that it extends."""
    if path.resolve() in above:
        raise InputError(f"{path} extends itself")
    keys = ", ".join(each.name for each in fields(ExperimentFile))
    data = read_yaml(path, "the YAML of an experiment, as in configs/", f"the keys {keys}")
    extended = data.pop("extends", None)
    if extended is None:
        return data
    return _merged(_loaded(path.parent / str(extended), (*above, path.resolve())), data)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges mappings inside mappings; everything else above replaces what is below."""
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = _merged(below[key], above[key])
    return both


def _checked(data: dict[str, Any], path: Path, changes: Sequence[str]) -> Experiment:
    has_parts = data.get("parts") is not None
    for_parts = [change for change in changes if has_parts and re.split("[.=]", change)[0] not in OF_PARTS]
    for change in changes:
        if change not in for_parts:
            set_value(data, change, _PATHS)
    problems: list[str] = []
    file = gather(ExperimentFile, data, problems)
    if not has_parts and "run" not in data:
        problems.append("run is missing: what is trained, as in run.yaml")
    if has_parts and "run" in data:
        problems.append("parts and run are both given: an experiment shows its own run, or others'")
    refuse(problems, str(path))
    assert file is not None
    limits: dict[str, Any] = {key: data[key] for key in ("kinds", "only") if key in data}
    files = [path.parent / part for part in file.parts or ()]
    name = file.name or path.stem
    own = {each.name: getattr(file, each.name) for each in fields(_Settings)}
    experiment = Experiment(
        **own | {"name": name, "setting": file.setting or name},
        environments=(file.environments or EnvironmentOptions()).sizes((file.run.get("benchmark") or {}).get("tasks")),
        search=file.search or SearchOptions(),
        parts=tuple(_checked(_merged(_loaded(part), limits), part, for_parts) for part in files),
        root=path.parent.absolute(),
    )
    for seed in () if files else experiment.seeds:
        experiment.training(seed)  # tells what is wrong with the run before anything is made
    return experiment


_PATHS: dict[str, Reader] = {f"run.{key}": read for key, read in PATHS.items()} | {
    "parts": lambda files: [path_here(file) for file in files] if isinstance(files, list) else files
}
