"""What `tmx init` is given: finds checkpoints, reads data and a head, and says at once all that is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cyclopts import Parameter

from tunable_magmax.errors import InputError, bulleted, closest, some_of
from tunable_magmax.workflows.options import Reading

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples

AGREEMENT = 2 / 3
"""The share of samples that a classifier without names must put into the classes of their order to be believed."""
TRIED = 10
"""Samples of each class that this is tried on."""
_STEP = re.compile(r"checkpoint-(\d+)")


@Parameter(name="*")
@dataclass(frozen=True)
class InitOptions:
    """The options of `tmx init`."""

    base: Path | None = None
    """The pre-trained checkpoint that training began with."""
    task: Sequence[str] = ()
    """A task's checkpoint or LoRA adapter, as NAME=DIR; give one --task for each, in training order. Without NAME= the
    folder's name is the task's. In the folder of a training, the model saved at its end is taken, else the newest
    checkpoint-N."""
    data: Sequence[str] = ()
    """The data of a task, as NAME=DATA: class folders of images, a .csv or .jsonl of text and label, or parquet. The
    run gets a profile (label counts, class names, embeddings), and keeps some samples."""
    eval_data: Sequence[str] = ()
    """The same, of samples that were not trained on: these are kept then. What they say of a model is not too good."""
    head: str | None = None
    """A frozen head over all classes: a head file, class names as cat,dog or a .txt of them, or labelled samples, whose
    class means are the head."""
    keep: int | None = None
    """Samples of each class that the run keeps as files (texts in a CSV, pictures in folders); 0 for none. Default: 20.
    They never leave the run."""
    reading: Reading = Reading()
    overwrite: bool = False
    """Replace the run.json that is there."""
    dry_run: bool = False
    """Read headers and labels only, check everything, and say what would be done."""


HeadSource: TypeAlias = "Path | list[str] | Samples"
"""A head file, class names, or labelled samples."""


@dataclass(frozen=True)
class TaskData:
    """A task's data. `held_out`: samples that were not trained on; without others they are the `samples`, too."""

    place: Path
    samples: Samples
    held_out: Samples | None

    def changed(self, change: Callable[[Samples], Samples]) -> TaskData:
        """Returns the data with all its samples changed."""
        samples = change(self.samples)
        if self.held_out is None or self.held_out is self.samples:
            return TaskData(self.place, samples, self.held_out and samples)
        return TaskData(self.place, samples, change(self.held_out))


@dataclass(frozen=True)
class InitInputs:
    """A run that is to be made or added to; `head` is None if none was given, `notes` are what a user should know."""

    path: Path
    base: Path
    tasks: Mapping[str, Path]
    data: Mapping[str, TaskData]
    head: HeadSource | None
    is_new: bool
    notes: tuple[str, ...] = ()


def read_inputs(path: Path, options: InitOptions) -> InitInputs:
    """Finds checkpoints and reads the labels of the data; all that is wrong is one error."""
    from tunable_magmax.runs.run import Run, is_run, refuse_run_file

    refuse_run_file(path)
    problems: list[str] = []
    base: Path | None
    tasks: dict[str, Path | None]
    is_new = not is_run(path) or options.base is not None or bool(options.task)
    if options.keep is not None and options.keep < 0:
        problems.append(f"--keep is {options.keep}: give a number of samples of each class, 0 to keep none")
    if is_new:
        base, tasks = _checkpoints(path, options, problems)
    else:
        run = Run.open(path)
        base, tasks = run.base, dict(run.checkpoints)
        if not options.data and not options.eval_data and options.head is None and options.keep != 0:
            problems.append(
                f"{path} is a run already: give data to add, as --data NAME=DATA with one of {', '.join(tasks)}; or "
                "--base and --task with --overwrite to make it anew"
            )
    places = _places(options.data, list(tasks), "--data", problems)
    held_out = _places(options.eval_data, list(tasks), "--eval-data", problems)
    head: HeadSource | None = None
    if options.head is not None:
        with _collected(problems, f"--head {options.head}: "):
            head = _read_head(options.head, options.reading)
    data: dict[str, TaskData] = {}
    for name in [name for name in tasks if name in places or name in held_out]:
        with _collected(problems):
            both = (_read(given[name], options.reading) if name in given else None for given in (places, held_out))
            trained, other = both
            if (samples := trained or other) is not None:
                data[name] = TaskData(places.get(name) or held_out[name], samples, other)
    found = {name: task for name, task in tasks.items() if task is not None}
    if not problems and base is not None:
        data = _with_names(base, found, data, problems)
    if problems or base is None:
        listed = problems[0] if len(problems) == 1 else f"nothing was written:\n{bulleted(problems)}"
        raise InputError(listed, problems=problems if len(problems) > 1 else ())
    return InitInputs(path, base, found, data, head, is_new)


@contextmanager
def _collected(problems: list[str], about: str = "") -> Iterator[None]:
    """Adds an `InputError` to the problems."""
    try:
        yield
    except InputError as error:
        problems.append(f"{about}{error}")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _checkpoints(path: Path, options: InitOptions, problems: list[str]) -> tuple[Path | None, dict[str, Path | None]]:
    """Finds the checkpoints of a new run; None of those that cannot be found or merged."""
    from tunable_magmax.checkpoints.hub import located
    from tunable_magmax.runs.run import RUN_FILE, is_run

    if is_run(path) and not options.overwrite:
        problems.append(
            f"{path / RUN_FILE} exists: choose another directory, replace it with --overwrite, or leave out --base and "
            "--task to add data to it"
        )
    elif path.exists() and not path.is_dir():
        problems.append(f"{path} is a file: give a directory")
    base: Path | None = None
    if options.base is None:
        problems.append("which checkpoint did training begin with? Give --base DIR")
    else:
        with _collected(problems, "base: "):
            base = _find_checkpoint(located(options.base))
    if not options.task:
        problems.append("there are no tasks: give one --task NAME=DIR for each, in training order")
    tasks: dict[str, Path | None] = {}
    for text in options.task:
        with _collected(problems):
            name, place = _named(text)
            if name in tasks:
                problems.append(f"several tasks are called {name!r}: give names that differ, as --task NAME=DIR")
            tasks[name] = None
            with _collected(problems, f"{name}: "):
                tasks[name] = task = _find_checkpoint(located(place))
                if base is not None:
                    _refuse_mismatch(base, task)
    return base, tasks


def _find_checkpoint(path: Path) -> Path:
    """Returns the place of a checkpoint or adapter: a path, or the newest complete checkpoint-N in a training's folder.

    A model that lies in the folder itself was saved at the end of the training, and goes before these.
    """
    problem = _problem(path)
    if problem is None:
        return path
    numbered = [(int(match[1]), item) for item in path.glob("*/") if (match := _STEP.fullmatch(item.name))]
    for _, item in sorted(numbered, reverse=True):
        if _problem(item) is None:
            return item
    if numbered:
        raise InputError(f"{path}: none of its {len(numbered)} folders checkpoint-N holds a complete checkpoint")
    raise problem


def _problem(path: Path) -> InputError | None:
    """Returns why there is no checkpoint at a path."""
    from tunable_magmax.checkpoints.source import holds_adapter, open_checkpoint

    try:
        if not holds_adapter(path):
            open_checkpoint(path).close()
    except InputError as error:
        return error
    return None


def _named(text: str) -> tuple[str, Path]:
    from tunable_magmax.runs.recipe import folder_name, split_name

    name, place = split_name(text)
    return name or folder_name(Path(place)), Path(place)


def _refuse_mismatch(base: Path, task: Path) -> None:
    """Refuses a task that cannot be merged into the base, in one line."""
    from tunable_magmax.checkpoints.companions import model_type
    from tunable_magmax.engines.inputs import Inputs
    from tunable_magmax.merging.methods import read_options

    kinds = [kind for kind in (model_type(base), model_type(task)) if kind is not None]
    if len(set(kinds)) > 1:
        raise InputError(f"it is another architecture than the base: {kinds[1]}, not {kinds[0]} ({task})")
    try:
        with Inputs(base, [task], read_options(1)):
            pass
    except InputError as error:
        first, *rest = (line.strip(" -") for line in str(error).splitlines() if line.strip())
        raise InputError(f"it does not fit the base: {rest[0] if rest and first.endswith(':') else first}") from None


# -- data and head ----------------------------------------------------------------------------------------------------


def _places(given: Sequence[str], names: Sequence[str], option: str, problems: list[str]) -> dict[str, Path]:
    """Returns where the data of which task is."""
    places: dict[str, Path] = {}
    for text in given:
        with _collected(problems, f"{option} {text}: "):
            name, place = _named(text)
            if name not in names:
                hint, known = closest(name, names), ", ".join(names)
                raise InputError(f"no task is called {name!r}{hint}; give NAME=DATA with one of {known}")
            if not place.exists():
                raise InputError(f"{place} does not exist")
            if name in places:
                raise InputError(f"{name} has {places[name]} already; put its data into one file or folder")
            places[name] = place
    return places


def _read(place: Path, reading: Reading) -> Samples:
    samples = reading.open(place)
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels: put images into class folders, or name the column with --label-column"
        )
    return samples


def _read_head(given: str, reading: Reading) -> HeadSource:
    """Returns what --head is: a head file, class names of a .txt or between commas, or labelled samples."""
    from tunable_magmax.models.head import load_head

    path = Path(given)
    if path.suffix == ".safetensors":
        load_head(path)
        return path
    if path.exists() and path.suffix != ".txt":
        return _read(path, reading)
    if path.suffix == ".txt":
        try:
            parts: Sequence[str] = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{given}: not a readable text file ({error})") from None
    elif "," not in given:
        raise InputError(f"{given} does not exist: give a head file, data, or class names as cat,dog")
    else:
        parts = given.split(",")
    return [part.strip() for part in parts if part.strip()]


# -- labels and the names of classifiers ------------------------------------------------------------------------------


def _present(samples: Samples) -> list[str]:
    """Returns the classes that have samples."""
    return [samples.classes[label] for label in sorted(set(samples.labels or ()))]


def _with_names(
    base: Path, tasks: Mapping[str, Path], data: Mapping[str, TaskData], problems: list[str]
) -> dict[str, TaskData]:
    """Puts the names of the tasks' classifiers in place of indices; finds labels that contradict them."""
    from tunable_magmax.checkpoints.companions import are_generic
    from tunable_magmax.data.samples import by_name, with_names
    from tunable_magmax.models.builtin import builtin_labels

    rows = {name: builtin_labels(found) for name, found in tasks.items()}
    merged = _merged_labels(base, tasks)

    def named(name: str, samples: Samples) -> Samples:
        names = rows[name]
        if names is None:
            return samples
        present = by_name(_present(samples), [names], samples.origin)
        unknown = [label for label in present if label not in names]
        others = [other for other, theirs in rows.items() if other != name and set(present) <= {*(theirs or ())}]
        generic = are_generic(names) and len(unknown) == len(present)
        if generic and len(present) != len(names):
            problems.append(_nameless(name, tasks[name], samples, names))
        elif not generic and unknown and (others or 2 * len(unknown) > len(present)):
            hint = f": they are those of {' and '.join(others)}" if others else ""
            problems.append(
                f"{samples.origin}: its labels {some_of(present, show=repr)} are not the classes of {name}{hint}; its "
                f"checkpoint has {some_of(names, show=repr)} (id2label of its config.json). Give the data of {name}, "
                "or write the labels as the checkpoint has them"
            )
        return samples if generic else with_names(samples, names, merged[name])

    return {name: given.changed(partial(named, name)) for name, given in data.items()}


def _merged_labels(base: Path, tasks: Mapping[str, Path]) -> dict[str, tuple[str, ...] | None]:
    """Returns what a merge calls the labels of each task."""
    from tunable_magmax.evaluation.run_models import task_labels

    return dict(zip(tasks, task_labels(base, [*tasks.values()]), strict=True))


def _nameless(task: str, checkpoint: Path, samples: Samples, rows: Sequence[str]) -> str:
    labels, config = some_of(_present(samples), show=repr), checkpoint / "config.json"
    return (
        f"{samples.origin}: which of its labels {labels} is which class of {task}, whose classifier calls them "
        f"{some_of(rows)}? Write their names into id2label of {config}, in the order that training had them"
    )


def with_rows_named(inputs: InitInputs, options: InitOptions) -> InitInputs:
    """Puts the classes of classifiers without names in place of labels, where their order is certain."""
    from tunable_magmax.checkpoints.companions import are_generic
    from tunable_magmax.models.builtin import builtin_labels

    rows = {name: builtin_labels(inputs.tasks[name]) for name in inputs.data}
    nameless = {name: labels for name, labels in rows.items() if labels is not None and are_generic(labels)}
    merged = _merged_labels(inputs.base, inputs.tasks)
    data, notes = dict(inputs.data), list(inputs.notes)
    for name, labels in nameless.items():
        given, checkpoint, target = data[name], inputs.tasks[name], merged[name]
        assert target is not None
        present = _present(inputs.data[name].samples)
        if {*present} & {*labels, *target}:
            continue  # the data has the classifier's own labels
        why = _nameless(name, checkpoint, given.samples, labels)
        known = {other: _present(inputs.data[other].samples) for other in nameless}
        same = [other for other in inputs.tasks if merged[other] == target and known.get(other) != present]
        if same:
            raise InputError(f"{why}. A merge takes them for the classes of {some_of(same)}, which has the same labels")
        if not _in_order(given.samples, checkpoint, inputs.base, options):
            raise InputError(f"{why}. Its predictions do not show it")
        data[name] = given.changed(partial(_renamed, place=dict(zip(present, target, strict=True))))
        pairs = some_of(f"{label!r} is {row}" for label, row in zip(present, labels, strict=True))
        notes.append(f"{name}: its classifier has no names, and predicts that {pairs}")
    return replace(inputs, data=data, notes=tuple(notes))


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
