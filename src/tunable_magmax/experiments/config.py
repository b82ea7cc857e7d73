"""An experiment's YAML: a sequence to train, environments to tailor to, and the rows to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, ValidationError, WrapValidator

from tunable_magmax.config import STRICT, NotNegative, Positive, Reader, gather, read_yaml, refuse, set_value
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.environments import PAPER, VARIANTS, EnvironmentSizes, level_mixtures, paper_size
from tunable_magmax.experiments.rows import Row
from tunable_magmax.training.config import PATHS, TrainConfig

GRID = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
HOLDOUT = 0.05

Item = TypeVar("Item")


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
Mixtures: TypeAlias = Annotated[
    Literal["paper"] | Annotated[dict[str, Annotated[list[Positive], Field(min_length=1)]], Field(min_length=1)],
    _must_be("paper, or a mapping of names to lists of numbers above 0, such as {D1: [0.5, 0.5]}"),
]
Level: TypeAlias = Annotated[Literal["all"] | Count, _must_be("all or a whole number of at least 1")]
Size: TypeAlias = Annotated[
    Literal["paper", "supply"] | Count, _must_be("paper, supply or a whole number of at least 1")
]


def _row_name(name: str) -> str:
    try:
        return Row.parse(name).name
    except InputError as error:
        raise ValueError(str(error)) from None


RowName: TypeAlias = Annotated[str, AfterValidator(_row_name)]


@dataclass(frozen=True)
class SearchOptions:
    """The search for preferences: its trials, and the variants of the environments that it is done for."""

    __pydantic_config__ = STRICT
    trials: Count = 50
    variants: Some[Whole] = VARIANTS[:1]


@dataclass(frozen=True)
class EnvironmentOptions:
    """The environments as a file describes them.

    `levels`: beside the mixtures, equal shares of so many tasks, or of `all`; a sequence leaves out those for which it
    has too few tasks. `variants`: draws of each. `size`: samples of each, at most `most`. `meta`: the known share.
    """

    __pydantic_config__ = STRICT
    mixtures: Mixtures = "paper"
    levels: tuple[Level, ...] = ()
    variants: Some[Whole] = VARIANTS
    size: Size = "paper"
    most: Count = 1000
    meta: Positive = 0.1

    def sizes(self, count: int) -> EnvironmentSizes:
        """Returns the environments of a benchmark with so many tasks."""
        own = PAPER if self.mixtures == "paper" else {name: tuple(ratio) for name, ratio in self.mixtures.items()}
        size = {"paper": paper_size(count), "supply": None}.get(str(self.size), self.size)
        levels = level_mixtures(self.levels, count)
        return EnvironmentSizes(
            own, self.variants, size if isinstance(size, int) else None, self.most, self.meta, levels
        )


@dataclass(frozen=True)
class _Settings:
    """The settings that mean the same in a file and in a checked experiment."""

    name: str = ""
    setting: str = ""
    about: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    seeds: Some[Whole] = (3, 4, 5)
    order_from_seed: bool = False
    rows: tuple[RowName, ...] = ()
    grid: Some[Positive] = GRID
    search: SearchOptions = SearchOptions()
    joint_steps: Count | None = None
    alphas: tuple[NotNegative, ...] = ()
    meta_sizes: tuple[Count, ...] = ()


@dataclass(frozen=True)
class ExperimentFile(_Settings):
    """The YAML of an experiment.

    `setting`: what its records are called, such as minilm/clinc150-15. `run`: what is trained, as in run.yaml. `rows`:
    by name. `grid`: the scales that rows at their best scale choose among. `joint_steps`: of the model that is trained
    on all tasks together, by default as many as the sequence has. `alphas`: of the figure of first against last task.
    `meta_sizes`: numbers of known samples that tailored rows are tried with. `extends`: a file that this one changes.
    """

    __pydantic_config__ = STRICT
    environments: EnvironmentOptions = EnvironmentOptions()
    extends: str | None = None


@dataclass(frozen=True)
class Experiment(_Settings):
    """A checked experiment. `root`: where its relative paths count from."""

    environments: EnvironmentSizes = field(default_factory=EnvironmentSizes)
    root: Path = Path()

    @property
    def planned(self) -> list[Row]:
        """All rows of its tables."""
        return [Row.parse(name) for name in dict.fromkeys(self.rows)]

    @property
    def tasks(self) -> int:
        """How many tasks its sequences have."""
        return _task_count(self.run)

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
        if any(row.scale == "best" for row in self.planned):
            benchmark.setdefault("holdout", HOLDOUT)
        data = {"matrix": False, **self.run, "benchmark": benchmark, "seed": seed}
        return TrainConfig.read(data, self.root, f"experiment {self.name}, run")


def _task_count(run: Mapping[str, Any]) -> int:
    """Returns how many tasks a run.yaml has; they may be a number, or groups of classes by name."""
    tasks = (run.get("benchmark") or {}).get("tasks")
    return tasks if isinstance(tasks, int) else len(tasks or ())


def read_experiment(path: str | Path, changes: Sequence[str] = ()) -> Experiment:
    """Reads a YAML, or one that comes with this package by its name: "glyphs/characters-5".

    `changes`, as "run.model=clip/", replace single values. Relative paths in the file count from its directory, those
    in `changes` from the current one.
    """
    path = find_experiment(path)
    data = _loaded(path)
    for change in changes:
        set_value(data, change, _PATHS)
    problems: list[str] = []
    file = gather(ExperimentFile, data, problems)
    if "run" not in data:
        problems.append("run is missing: what is trained, as in run.yaml")
    refuse(problems, str(path))
    assert file is not None
    name = file.name or path.stem
    own = {each.name: getattr(file, each.name) for each in fields(_Settings)}
    sizes = file.environments.sizes(_task_count(file.run))
    named = own | {"name": name, "setting": file.setting or name}
    experiment = Experiment(**named, environments=sizes, root=path.parent.absolute())
    for seed in experiment.seeds:
        experiment.training(seed)  # tells what is wrong with the run before anything is made
    return experiment


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


_PATHS: dict[str, Reader] = {f"run.{key}": read for key, read in PATHS.items()}
