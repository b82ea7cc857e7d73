"""A run directory: base, tasks in training order, profiles and head."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import write_atomic, write_json
from tunable_magmax.preference.profile import Profile

HEAD_FILE = "classifier-head.safetensors"
RUN_FILE = "run.json"
RUN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base, tasks in training order, and options for `merge_checkpoints`."""

    base: Path
    tasks: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    """What the tasks are called, if the run says so."""

    def with_options(self, **given: Any) -> Recipe:
        """The same with options set; None leaves what the recipe says."""
        chosen = {name: value for name, value in given.items() if value is not None}
        options = {**self.options, **chosen}
        for one, other in (("budget", "weights"), ("weights", "budget")):
            if one in chosen and other not in chosen:
                options.pop(other, None)
        return replace(self, options=options)


def read_run(path: Path) -> Recipe:
    """The checkpoints of a training run, from its run.json."""
    file = path / RUN_FILE
    if not file.is_file():
        raise InputError(
            f"{path} has no {RUN_FILE}, so it is not a run directory: name checkpoints with --base and --task instead"
        )
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{file}: not a JSON file ({error})") from None
    if not isinstance(run, dict) or run.get("version") != RUN_VERSION:
        raise InputError(f"{file}: expected a run of version {RUN_VERSION}")
    base, tasks = run.get("base"), run.get("tasks")
    listed = isinstance(tasks, list) and all(
        isinstance(t, dict) and isinstance(t.get("checkpoint"), str) for t in tasks
    )
    if not isinstance(base, str) or not listed:
        raise InputError(f'{file}: expected "base" (a path) and "tasks" (a list of {{"name", "checkpoint"}})')
    names = tuple(task.get("name") for task in run["tasks"])
    named = all(isinstance(name, str) for name in names)
    checkpoints = tuple(path / task["checkpoint"] for task in run["tasks"])
    return Recipe(path / base, checkpoints, names=names if named else None)


@dataclass(frozen=True)
class RunProfiles:
    """A run directory: base, tasks in training order, and the profile of each task that has one.

    `head` and `classifier_checkpoint`: the run's fixed classifier, where run.json names one.
    """

    path: Path
    base: Path
    tasks: tuple[Path, ...]
    names: tuple[str, ...] | None
    profiles: tuple[Profile | None, ...]
    head: Path | None = None
    classifier_checkpoint: Path | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """What to call the tasks: their names, or task 1, task 2, ..."""
        return self.names or tuple(f"task {t}" for t in range(1, len(self.tasks) + 1))

    def require_profiles(self, why: str) -> list[Profile]:
        """All profiles, or an error that says which tasks lack one and how to make it."""
        lacking = [label for label, profile in zip(self.labels, self.profiles, strict=True) if profile is None]
        if lacking:
            shown = some_of(lacking, show=repr)
            raise InputError(
                f"{self.path}: {why} needs the tasks' profiles, and {shown} {'has' if len(lacking) == 1 else 'have'} "
                f"none; make them with `tmx profile {self.path} --task NAME --data DATA` (or --data-root for all "
                "tasks), or give --weights, --alpha or --equal, which need none"
            )
        return [profile for profile in self.profiles if profile is not None]


def read_run_profiles(path: str | Path) -> RunProfiles:
    """Read a run directory with its profiles; a profile that belongs to another task is refused."""
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a run directory: expected a folder with {RUN_FILE}")
    recipe = read_run(path)
    run = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    if not recipe.tasks:
        raise InputError(f"{path / RUN_FILE}: the run has no tasks")
    if recipe.names is not None and len(set(recipe.names)) < len(recipe.names):
        raise InputError(f"{path / RUN_FILE}: two tasks have one name; task names must differ")
    profiles: list[Profile | None] = []
    for t, task in enumerate(run["tasks"], 1):
        given = task.get("profile")
        if given is not None and not isinstance(given, str):
            raise InputError(f'{path / RUN_FILE}: "profile" of task {t} must be a path, not {given!r}')
        profile = None if given is None else Profile.load(path / given)
        if profile is not None and recipe.names is not None and profile.task != recipe.names[t - 1]:
            raise InputError(
                f"{path / str(given)} is the profile of task {profile.task!r}, but {RUN_FILE} lists it under "
                f"{recipe.names[t - 1]!r}; correct {RUN_FILE}, or make the profile again"
            )
        profiles.append(profile)
    chosen = run.get("classifier") or {}
    if not isinstance(chosen, dict) or not all(isinstance(value, str) for value in chosen.values()):
        raise InputError(f'{path / RUN_FILE}: "classifier" must be an object of paths, "head" and "checkpoint"')
    head, checkpoint = (path / chosen[key] if key in chosen else None for key in ("head", "checkpoint"))
    return RunProfiles(path, recipe.base, recipe.tasks, recipe.names, tuple(profiles), head, checkpoint)


def register_profiles(
    run: Path, profiles: dict[int, Path], head: Path | None = None, checkpoint: Path | None = None
) -> None:
    """Write into run.json where the profiles of some tasks (counting from 0) are, and the classifier behind them."""
    file = run / RUN_FILE
    record = json.loads(file.read_text(encoding="utf-8"))
    for t, path in profiles.items():
        record["tasks"][t]["profile"] = _relative(path, run)
    if head is not None and checkpoint is not None:
        if not head.absolute().is_relative_to(run.absolute()):
            # The run must be whole when it is moved to where it is deployed.
            own = run / HEAD_FILE
            write_atomic(own, head.read_bytes())
            head = own
        record["classifier"] = {"head": _relative(head, run), "checkpoint": _relative(checkpoint, run)}
    write_json(file, record)


def profile_path(run: Path, task: str) -> Path:
    """Where a run keeps the profile of a task.

    >>> profile_path(Path("run"), "birds & bees").as_posix()
    'run/profiles/birds___bees.safetensors'
    """
    return run / "profiles" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.safetensors"


@dataclass(frozen=True)
class TrainedRun:
    """A run directory as evaluation sees it. `classes`: the names of each task's, empty where the run does not say."""

    path: Path
    base: Path
    checkpoints: Mapping[str, Path]
    """By task name, in training order."""
    head: Path | None
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    benchmark: Mapping[str, Any] | None = None


def read_trained_run(path: str | Path) -> TrainedRun:
    """Read run.json. The tasks' classes are what it says, or what the profiles of all tasks counted."""
    run = read_run_profiles(path)
    record = json.loads((run.path / RUN_FILE).read_text(encoding="utf-8"))
    classes: dict[str, tuple[str, ...]] = {}
    for label, task, profile in zip(run.labels, record["tasks"], run.profiles, strict=True):
        told = task.get("classes")
        if isinstance(told, list) and told and all(isinstance(name, str) for name in told):
            classes[label] = tuple(told)
        elif told is not None:
            raise InputError(f'{run.path / RUN_FILE}: "classes" of task {label!r} must be a list of names')
        elif profile is not None:
            classes[label] = tuple(name for name, count in profile.label_table.items() if count)
    if len(classes) < len(run.tasks):
        classes = {}
    benchmark = record.get("benchmark")
    if benchmark is not None and not isinstance(benchmark, dict):
        raise InputError(f'{run.path / RUN_FILE}: "benchmark" must be an object, not {benchmark!r}')
    return TrainedRun(run.path, run.base, dict(zip(run.labels, run.tasks, strict=True)), run.head, classes, benchmark)


def _relative(path: Path, run: Path) -> str:
    """A path that stays right when the run directory is moved, where it lies inside it."""
    absolute, root = path.absolute(), run.absolute()
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else str(absolute)
