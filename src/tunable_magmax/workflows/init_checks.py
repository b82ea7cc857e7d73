"""Checks what `tmx init` was given: finds checkpoints, reads labels, and says at once all that is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.errors import InputError, bulleted, closest, some_of
from tunable_magmax.workflows.init import InitOptions, InitResult, TaskData, head_samples, is_head_file, read_names

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.runs.trained import TrainedCheckpoint

AGREEMENT = 2 / 3
"""The share of samples that a classifier without names must put into the classes of their order to be believed."""
TRIED = 10
"""Samples of each class that this is tried on."""


def checked(path: Path, options: InitOptions) -> InitResult:
    """Finds checkpoints and reads the labels of the data; all that is wrong is one error."""
    from tunable_magmax.runs.run import Run, is_run, refuse_run_file
    from tunable_magmax.runs.trained import TrainedCheckpoint

    refuse_run_file(path)
    problems: list[str] = []
    is_new = not is_run(path) or options.base is not None or bool(options.task)
    if options.keep is not None and options.keep < 0:
        problems.append(f"--keep is {options.keep}: give a number of samples of each class, 0 to keep none")
    if options.templates is not None and options.head is None:
        problems.append("--templates are sentences for the class names of --head")
    if is_new:
        start, found = _checkpoints(path, options, problems)
        names = [_named(text, [])[0] for text in options.task]
    else:
        run = Run.open(path)
        start, names = TrainedCheckpoint(run.base), list(run.labels)
        found = {name: TrainedCheckpoint(task) for name, task in run.checkpoints.items()}
        if not options.data and not options.eval_data and options.head is None and options.keep != 0:
            problems.append(
                f"{path} is a run already: give data to add, as --data NAME=DATA with one of {', '.join(names)}; or "
                "--base and --task with --overwrite to make it anew"
            )
    places = _places(options.data, names, "--data", problems)
    held_out = _places(options.eval_data, names, "--eval-data", problems)
    if options.head is not None:
        problems += _head_problem(options.head, options)
    read = {name: _read(place, options, problems) for name, place in {**held_out, **places}.items()}
    apart = {name: _read(place, options, problems) for name, place in held_out.items() if name in places}
    if not problems:
        assert start is not None
        _check_labels(start.path, found, read, apart, options, problems)
    if problems:
        listed = problems[0] if len(problems) == 1 else f"nothing was written:\n{bulleted(problems)}"
        raise InputError(listed, problems=problems if len(problems) > 1 else ())
    assert start is not None
    made = {}
    for name in found:
        samples = read.get(name)
        if samples is not None:
            separate = apart.get(name, samples if name in held_out else None)
            made[name] = TaskData(places.get(name, held_out.get(name, Path())), samples, separate)
    return InitResult(path, start, found, made, options.head, is_new)


def _checkpoints(
    path: Path, options: InitOptions, problems: list[str]
) -> tuple[TrainedCheckpoint | None, dict[str, TrainedCheckpoint]]:
    """Finds the checkpoints of a new run."""
    from tunable_magmax.runs.run import RUN_FILE, is_run

    base, tasks = options.base, options.task
    if is_run(path) and not options.overwrite:
        problems.append(
            f"{path / RUN_FILE} exists: choose another directory, replace it with --overwrite, or leave out --base and "
            "--task to add data to it"
        )
    elif path.exists() and not path.is_dir():
        problems.append(f"{path} is a file: give a directory")
    if base is None:
        problems.append("which checkpoint did training begin with? Give --base DIR")
    if not tasks:
        problems.append("there are no tasks: give one --task NAME=DIR for each, in training order")
    start = None if base is None else _found(base, "base", problems)
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
    return start, found


def _places(given: Sequence[str], names: Sequence[str], option: str, problems: list[str]) -> dict[str, Path]:
    """Returns where the data of which task is."""
    places: dict[str, Path] = {}
    for text in given:
        name, place = _named(text, problems)
        if name not in names:
            hint = closest(name, names)
            problems.append(
                f"{option} {text}: no task is called {name!r}{hint}; give NAME=DATA with one of {', '.join(names)}"
            )
        elif not Path(place).exists():
            problems.append(f"{option} {text}: {place} does not exist")
        elif name in places:
            problems.append(f"{option} {text}: {name} has {places[name]} already; put its data into one file or folder")
        else:
            places[name] = Path(place)
    return places


def _named(text: str, problems: list[str]) -> tuple[str, str]:
    from tunable_magmax.runs.recipe import folder_name, split_name

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
    from tunable_magmax.checkpoints.model_config import model_type
    from tunable_magmax.engines.inputs import Inputs
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


def _head_problem(head: str, options: InitOptions) -> list[str]:
    from tunable_magmax.models.head import load_head

    try:
        if is_head_file(head):
            load_head(head)
        elif read_names(head) is None:
            head_samples(head, options.reading)
    except InputError as error:
        return [f"--head {head}: {error}"]
    return []


# -- labels -----------------------------------------------------------------------------------------------------------


def _read(place: Path, options: InitOptions, problems: list[str]) -> Samples | None:
    try:
        samples = options.reading.open(place)
        if samples.labels is None:
            raise InputError(
                f"{samples.origin} holds no labels, which a profile counts: put images into class folders, or name the "
                "column with --label-column"
            )
        if options.classes is None:
            return samples
        return samples.subset(samples.positions_of([name.strip() for name in options.classes.split(",")]))
    except InputError as error:
        problems.append(re.sub(r"(?<![\w/.-])(text|label)_column(?![\w/.-])", r"--\1-column", str(error)))
        return None


def _present(samples: Samples) -> list[str]:
    """Returns the classes that have samples."""
    return [samples.classes[label] for label in sorted(set(samples.labels or ()))]


def _check_labels(
    base: Path,
    checkpoints: Mapping[str, TrainedCheckpoint],
    read: dict[str, Samples | None],
    apart: dict[str, Samples | None],
    options: InitOptions,
    problems: list[str],
) -> None:
    """Puts the names of the tasks' classifiers in place of indices; finds labels that contradict them."""
    from tunable_magmax.checkpoints.model_config import are_generic
    from tunable_magmax.data.class_names import by_name, with_names
    from tunable_magmax.evaluation.run_models import task_labels
    from tunable_magmax.models.builtin import builtin_labels

    rows = {name: builtin_labels(found.path) for name, found in checkpoints.items()}
    merged = dict(zip(checkpoints, task_labels(base, [found.path for found in checkpoints.values()]), strict=True))
    for given in (read, apart):
        for name, samples in given.items():
            names = rows[name]
            if samples is None or names is None:
                continue
            present = by_name(_present(samples), [names], [()], samples.origin)
            unknown = [label for label in present if label not in names]
            others = [other for other, theirs in rows.items() if other != name and set(present) <= {*(theirs or ())}]
            generic = are_generic(names) and len(unknown) == len(present)
            if generic and len(present) != len(names):
                problems.append(_nameless(name, checkpoints[name].path, samples, names))
            elif not generic and unknown and not options.force and (others or 2 * len(unknown) > len(present)):
                hint = f": they are those of {' and '.join(others)}" if others else ""
                problems.append(
                    f"{samples.origin}: its labels {some_of(present, show=repr)} are not the classes of {name}{hint}; "
                    f"its checkpoint has {some_of(names, show=repr)} (id2label of its config.json). Give the data of "
                    f"{name}, or --force if this is meant"
                )
            if not generic:
                given[name] = with_names(samples, names, merged[name])


def _nameless(task: str, checkpoint: Path, samples: Samples, rows: Sequence[str]) -> str:
    labels, config = some_of(_present(samples), show=repr), checkpoint / "config.json"
    return (
        f"{samples.origin}: which of its labels {labels} is which class of {task}, whose classifier calls them "
        f"{some_of(rows)}? Write their names into id2label of {config}, in the order that training had them"
    )


def with_rows_named(plan: InitResult, options: InitOptions) -> InitResult:
    """Puts the classes of classifiers without names in place of labels, where their order is certain."""
    from tunable_magmax.checkpoints.model_config import are_generic
    from tunable_magmax.evaluation.run_models import task_labels
    from tunable_magmax.models.builtin import builtin_labels

    merged = dict(zip(plan.tasks, task_labels(plan.base.path, [t.path for t in plan.tasks.values()]), strict=True))
    names = {
        name: _present(given.samples)
        for name, given in plan.data.items()
        if are_generic(builtin_labels(plan.tasks[name].path) or ("",))
    }
    data, notes = dict(plan.data), list(plan.notes)
    for name, present in names.items():
        given, checkpoint = plan.data[name], plan.tasks[name].path
        rows, target = builtin_labels(checkpoint), merged[name]
        assert rows is not None
        assert target is not None
        if {*present} & {*rows, *target}:
            continue  # the data has the classifier's own labels
        why = _nameless(name, checkpoint, given.samples, rows)
        same = [other for other in plan.tasks if merged[other] == target and names.get(other) != present]
        if same:
            raise InputError(f"{why}. A merge takes them for the classes of {some_of(same)}, which has the same labels")
        if not _in_order(given.samples, checkpoint, plan.base.path, options):
            raise InputError(f"{why}. Its predictions do not show it")
        place = dict(zip(present, target, strict=True))
        held_out = None if given.held_out is None else _renamed(given.held_out, place)
        data[name] = TaskData(given.place, _renamed(given.samples, place), held_out)
        pairs = some_of(f"{label!r} is {row}" for label, row in zip(present, rows, strict=True))
        notes.append(f"{name}: its classifier has no names, and predicts that {pairs}")
    return replace(plan, data=data, notes=tuple(notes))


def _renamed(samples: Samples, place: Mapping[str, str]) -> Samples:
    return replace(samples, classes=tuple(place.get(name, name) for name in samples.classes))


def _in_order(samples: Samples, checkpoint: Path, base: Path, options: InitOptions) -> bool:
    """Says whether a classifier predicts its k-th row for samples of the k-th class, for each of them."""
    import numpy as np

    from tunable_magmax.data.splits import limited
    from tunable_magmax.models.builtin import count_answers, load_builtin

    assert samples.labels is not None
    chosen = limited(range(len(samples)), samples.labels, TRIED, 0)
    votes = count_answers(load_builtin(checkpoint, options.reading.device, assets=base), samples, chosen)
    votes = votes[sorted(set(samples.labels))]
    certain = bool((votes.argmax(axis=1) == np.arange(len(votes))).all())
    return certain and float(np.trace(votes)) >= AGREEMENT * float(votes.sum())
