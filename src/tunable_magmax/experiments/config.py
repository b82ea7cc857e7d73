"""An experiment's YAML: a sequence to train, environments to tailor to, and the rows to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field

from tunable_magmax.config import STRICT, NotNegative, Positive, PositiveInt, gather, read_yaml, refuse, set_value
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.environments import EnvironmentOptions, Variants
from tunable_magmax.experiments.rows import Row
from tunable_magmax.training.config import TrainConfig

GRID = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
HOLDOUT = 0.05


def _row_name(name: str) -> str:
    try:
        return Row.parse(name).name
    except InputError as error:
        raise ValueError(str(error)) from None


RowName: TypeAlias = Annotated[str, AfterValidator(_row_name)]


@dataclass(frozen=True)
class Experiment:
    """An experiment as its YAML describes it, which may also have `extends`: a file that this one changes.

    `setting`: what its records are called, such as minilm/clinc150-15. `run`: what is trained, as in run.yaml. `rows`:
    by name. `grid`: the scales that rows at their best scale choose among. `joint_steps`: of the model that is trained
    on all tasks together, by default as many as the sequence has. `alphas`: of the figure of first against last task.
    `name` and `root`, from where relative paths count, are those of the file.
    """

    __pydantic_config__ = STRICT
    run: dict[str, Any]
    name: str = ""
    setting: str = ""
    about: str = ""
    seeds: Variants = (3, 4, 5)
    order_from_seed: bool = False
    environments: EnvironmentOptions = EnvironmentOptions()  # noqa: RUF009  (frozen)
    rows: tuple[RowName, ...] = ()
    grid: Annotated[tuple[Positive, ...], Field(min_length=1)] = GRID
    joint_steps: PositiveInt | None = None
    alphas: tuple[NotNegative, ...] = ()
    root: str = ""

    @property
    def planned(self) -> list[Row]:
        """All rows of its tables that can be measured: some need scikit-learn."""
        rows = [Row.parse(name) for name in dict.fromkeys(self.rows)]
        return [row for row in rows if row.base != "logistic" or find_spec("sklearn") is not None]

    def measures(self, row: Row, environment: str) -> bool:
        """Whether a row is measured in an environment: searches and fewer samples in one draw of each mixing ratio."""
        mixture, _, variant = environment.rpartition("/")
        everywhere = row.preference != "search" and not row.has_less
        return everywhere or (int(variant) == self.environments.variants[0] and mixture in self.environments.ratios)

    @property
    def tasks(self) -> int:
        """How many tasks its sequences have: a number, or groups of classes by name."""
        tasks = (self.run.get("benchmark") or {}).get("tasks")
        return tasks if isinstance(tasks, int) else len(tasks or ())

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
        data = {**self.run, "benchmark": benchmark, "seed": seed}
        return TrainConfig.read(data, Path(self.root), f"experiment {self.name}, run")


def read_experiment(path: str | Path, changes: Sequence[str] = ()) -> Experiment:
    """Reads a YAML, or one that comes with this package by its name: "glyphs/characters-5".

    `changes`, as "run.model=clip/", replace single values. Relative paths in the file count from its directory, those
    in `changes` from the current one if they are there.
    """
    path = find_experiment(path)
    try:
        data = _loaded(path)
    except RecursionError:
        raise InputError(f"{path} extends itself, perhaps by way of other files") from None
    for change in changes:
        set_value(data, change)
    problems: list[str] = []
    file = gather(Experiment, data, problems)
    if file is None and isinstance(data.get("run"), Mapping):
        TrainConfig.gather(data["run"], path.parent, problems, "run")
    refuse(problems, str(path))
    assert file is not None
    setting = file.setting or path.stem
    experiment = replace(file, name=path.stem, setting=setting, root=str(path.parent.absolute()))
    experiment.training(experiment.seeds[0])  # tells what is wrong with the run before anything is made
    return experiment


def find_experiment(name: str | Path) -> Path:
    """Returns the file of an experiment: a path that exists, or the name of one that comes with this package."""
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    folder = Path(__file__).parents[1] / "configs"  # when installed; in a checkout they are in its root
    folder = folder if folder.is_dir() else folder.parents[2] / "configs"
    files = [file for file in sorted(folder.glob("*/*.yaml")) if not file.name.startswith("common-")]
    names = {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    wanted = str(name).removesuffix(".yaml").removeprefix("configs/")
    if wanted not in names:
        near = get_close_matches(wanted, names, n=3) or names
        raise InputError(
            f"{name} does not exist, and no experiment of this name comes with the package; there are {', '.join(near)}"
        )
    return names[wanted]


def _loaded(path: Path) -> dict[str, Any]:
    """Returns a file's mapping, on top of the one that it extends."""
    keys = ", ".join(each.name for each in fields(Experiment))
    data = read_yaml(path, "the YAML of an experiment, as in configs/", f"the keys {keys}")
    extended = data.pop("extends", None)
    return data if extended is None else _merged(_loaded(path.parent / str(extended)), data)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges mappings inside mappings; everything else above replaces what is below."""
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = _merged(below[key], above[key])
    return both
