"""What belongs to a model that is to be evaluated: its head, its run, the tasks and their classes, the test data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.profiling import HEAD_FILE, read_run_profiles
from tunable_magmax.recipes import RUN_FILE, Recipe, read_run

HEAD_FILES = (HEAD_FILE, "head.safetensors")


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


@dataclass(frozen=True)
class Belongings:
    """The head to evaluate with, and the run that says what the tasks are, if there is one."""

    head: Path
    run: TrainedRun | None


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


def find_belongings(model: Path | Recipe, head: Path | None = None, run: Path | None = None) -> Belongings:
    """What was given; else what lies beside the model; else the run that it was merged from, by the merge's log."""
    owner = _run_of(model) if run is None else run
    trained = None if owner is None else read_trained_run(owner)
    if head is None:
        own = None if trained is None else trained.head
        head = (own or _beside(model)) if run is not None else (_beside(model) or own)
    if head is not None:
        return Belongings(head, trained)
    what = str(model) if isinstance(model, Path) else str(model.base)
    if trained is not None:
        raise InputError(
            f"{trained.path / RUN_FILE} names no classifier head: give it with --head, or enter it with "
            f"`tmx profile {trained.path} --classifier HEAD`"
        )
    raise InputError(
        f"{what}: which head turns its embeddings into classes? Give --head FILE{_hint(model)}, or --run RUN_DIR, the "
        f"run it comes from, or put the head beside it as {HEAD_FILES[0]}"
    )


def _beside(model: Path | Recipe) -> Path | None:
    if isinstance(model, Recipe):
        return None
    folder = model if model.is_dir() else model.parent
    return next((folder / name for name in HEAD_FILES if (folder / name).is_file()), None)


def _hint(model: Path | Recipe) -> str:
    """Files that may be meant, by their names."""
    folder = model.base if isinstance(model, Recipe) else model
    found = sorted((folder if folder.is_dir() else folder.parent).glob("*head*.safetensors"))
    return f" (perhaps {found[0]})" if found else ""


def _run_of(model: Path | Recipe) -> Path | None:
    """The run directory whose checkpoints these are, or were merged."""
    if isinstance(model, Recipe):
        return _holder([model.base, *model.tasks])
    from tunable_magmax.verification import logged_inputs

    if (found := _holder([model])) is not None:
        return found
    try:
        known = logged_inputs(model)
    except InputError:  # no merge, or one without its report
        return None
    return None if known is None else _holder([known.base, *known.tasks])


def _holder(checkpoints: list[Path]) -> Path | None:
    """The nearest directory above the first checkpoint whose run.json lists them all."""
    wanted = {path.resolve() for path in checkpoints}
    for folder in checkpoints[0].parents:
        if (folder / RUN_FILE).is_file():
            try:
                recipe = read_run(folder)
            except InputError:
                return None
            listed = {path.resolve() for path in (recipe.base, *recipe.tasks)}
            return folder if wanted <= listed else None
    return None
