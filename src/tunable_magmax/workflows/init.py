"""What `tmx init` does: makes a run directory of checkpoints that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError, bulleted, closest
from tunable_magmax.files import Progress
from tunable_magmax.runs.recipe import folder_name, split_name

if TYPE_CHECKING:
    from tunable_magmax.runs.profile import Profile
    from tunable_magmax.runs.trained import TrainedCheckpoint


@dataclass(frozen=True)
class RunPlan:
    """A run that is made, or would be: its directory, checkpoints, and the data of its profiles, by task."""

    path: Path
    base: TrainedCheckpoint
    tasks: Mapping[str, TrainedCheckpoint]
    data: Mapping[str, Path]
    head: Path | None
    profiles: tuple[tuple[Path, Profile], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        files = {profile.task: str(file) for file, profile in self.profiles}
        return {
            "run": str(self.path),
            "base": str(self.base.path),
            "tasks": [
                {
                    "name": name,
                    "checkpoint": str(found.path),
                    "data": None if name not in self.data else str(self.data[name]),
                    "profile": files.get(name),
                }
                for name, found in self.tasks.items()
            ],
            "head": None if self.head is None else str(self.head),
        }


def init_run(
    path: Path,
    base: Path,
    tasks: Sequence[str],
    data: Sequence[str] = (),
    head: Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
) -> RunPlan:
    """Writes the run.json of some checkpoints, which stay where they are, and profiles of the tasks that have data.

    `tasks` in training order and `data` are NAME=PATH, or a path whose name is the task's. A task's path may be the
    folder of a training, of which the model saved at its end or the newest checkpoint-N is taken. What is wrong with
    any of them is told at once, from headers alone; `dry_run` ends there.

    >>> init_run(Path("run"), Path("base"), ["travel=out/travel", "out/bank"]).tasks  # doctest: +SKIP
    """
    plan = _planned(path, base, tasks, data, head, overwrite)
    if dry_run:
        return plan
    from tunable_magmax.runs.claim import remove_unfinished
    from tunable_magmax.runs.run import Run
    from tunable_magmax.workflows.profile import ProfileData, ProfileOptions, profile_tasks

    remove_unfinished((*path.glob(".run.json.*"), *path.glob("profiles/.*.safetensors.*")))
    run = Run.begin(path, plan.base.path)
    for name, found in plan.tasks.items():
        run.enter(name, found.path)
    run.save()
    if head is not None:
        run.register_profiles({}, head, plan.base.path)
    profiles: list[tuple[Path, Profile]] = []
    for name, where in plan.data.items():
        try:
            profiles += profile_tasks(
                path, ProfileData(task=name, data=where), ProfileOptions(device=device), progress=progress
            )
        except InputError as error:
            raise InputError(
                f"{error}\n{path} is there, with {len(profiles)} of {len(plan.data)} profiles; make the others by "
                f"`tmx profile {path} --task {name} --data DATA`"
            ) from None
    return RunPlan(path, plan.base, plan.tasks, plan.data, head, tuple(profiles))


def _planned(
    path: Path, base: Path, tasks: Sequence[str], data: Sequence[str], head: Path | None, overwrite: bool
) -> RunPlan:
    """Finds checkpoints and data; all that prevents the run is one error."""
    from tunable_magmax.runs.run import RUN_FILE, is_run, refuse_run_file

    refuse_run_file(path)
    problems: list[str] = []
    if is_run(path) and not overwrite:
        problems.append(f"{path / RUN_FILE} exists: choose another directory, or replace it with --overwrite")
    elif path.exists() and not path.is_dir():
        problems.append(f"{path} is a file: give a directory")
    if not tasks:
        problems.append("there are no tasks: give one --task NAME=DIR for each, in training order")
    start = _found(base, "base", problems)
    found: dict[str, TrainedCheckpoint] = {}
    for text in tasks:
        name, place = _named(text, problems)
        if name in found:
            problems.append(f"several tasks are called {name!r}: give names that differ, as --task NAME=DIR")
        trained = _found(Path(place), name, problems)
        if trained is not None:
            found[name] = trained
            if start is not None:
                problems += _mismatch(start.path, name, trained.path)
    given: dict[str, Path] = {}
    names = [_named(text, [])[0] for text in tasks]
    for text in data:
        name, place = _named(text, problems)
        if name not in names:
            hint = closest(name, names)
            problems.append(
                f"--data {text}: no task is called {name!r}{hint}; give NAME=DATA with one of {', '.join(names)}"
            )
        elif not Path(place).exists():
            problems.append(f"--data {text}: {place} does not exist")
        elif name in given:
            problems.append(f"--data {text}: {name} has {given[name]} already; put its data into one file or folder")
        given[name] = Path(place)
    if head is not None:
        problems += _head_problem(head)
    if problems:
        listed = problems[0] if len(problems) == 1 else f"no run was made:\n{bulleted(problems)}"
        raise InputError(listed, problems=problems if len(problems) > 1 else ())
    assert start is not None
    return RunPlan(path, start, found, {name: given[name] for name in found if name in given}, head)


def _named(text: str, problems: list[str]) -> tuple[str, str]:
    try:
        name, place = split_name(text)
    except InputError as error:
        problems.append(str(error))
        return text, text
    return name or folder_name(Path(place)), place


def _found(path: Path, name: str, problems: list[str]) -> TrainedCheckpoint | None:
    from tunable_magmax.checkpoints.hub import located
    from tunable_magmax.runs.trained import find_checkpoint

    try:
        return find_checkpoint(located(path))
    except InputError as error:
        problems.append(f"{name}: {error}")
        return None


def _mismatch(base: Path, name: str, task: Path) -> list[str]:
    """Returns one line on why a task cannot be merged into the base, if it cannot."""
    from tunable_magmax.engines.inputs import Inputs, model_type
    from tunable_magmax.merging.methods import read_options

    kinds = [kind for kind in (model_type(base), model_type(task)) if kind is not None]
    if len(set(kinds)) > 1:
        return [f"{name} is another architecture than the base: {kinds[1]}, not {kinds[0]} ({task})"]
    try:
        with Inputs(base, [task], read_options(1)):
            return []
    except InputError as error:
        first, *rest = (line.strip(" -") for line in str(error).splitlines() if line.strip())
        reason = rest[0] if rest and first.endswith(":") else first
        return [f"{name} does not fit the base: {reason}"]


def _head_problem(head: Path) -> list[str]:
    from tunable_magmax.models.head import load_head

    try:
        load_head(head)
    except InputError as error:
        return [f"--head {head}: {error}"]
    return []
