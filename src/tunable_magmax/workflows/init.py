"""What `tmx init` does: makes a run of checkpoints that were trained elsewhere, or adds data or a head to a run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.checkpoints.companions import MODEL_CONFIG, ModelConfig, are_generic
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.source import holds_adapter, open_checkpoint
from tunable_magmax.data.samples import Samples, by_name, with_names
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.errors import InputError, bulleted, closest, some_of
from tunable_magmax.evaluation.run_models import task_labels, warn_of_unseen_classes
from tunable_magmax.files import Progress, remove_unfinished
from tunable_magmax.merging.methods import read_options
from tunable_magmax.models.builtin import builtin_labels, load_builtin, rows_by_answers
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head, load_head, mean_head, name_head, save_head
from tunable_magmax.models.prepared import embed_prepared, prepare, profile_task
from tunable_magmax.runs.kept import KEEP
from tunable_magmax.runs.profile import ROWS, Profile
from tunable_magmax.runs.recipe import folder_name, split_name
from tunable_magmax.runs.run import HEAD_FILE, RUN_FILE, KeptEntry, Run, is_run, refuse_run_file
from tunable_magmax.workflows.options import InitOptions, Reading

STEP = re.compile(r"checkpoint-(\d+)")
Labels: TypeAlias = Mapping[str, tuple[str, ...] | None]
"""The labels of each task's classifier, None of those without one."""
HeadSource: TypeAlias = Path | list[str] | Samples
"""A head file, class names, or labelled samples."""


@dataclass(frozen=True)
class InitInputs:
    """A run that is to be made or added to.

    `data`: samples of tasks; `held_out`: those that were not trained on. `nameless`: the labels of the classifiers
    whose order of classes only their predictions can show.
    """

    path: Path
    is_new: bool
    base: Path
    tasks: Mapping[str, Path]
    data: dict[str, Samples]
    held_out: dict[str, Samples]
    nameless: Mapping[str, tuple[str, ...]]
    head: HeadSource | None


@dataclass(frozen=True)
class InitResult:
    """A run that was made or added to; `run` is None of one that would be."""

    inputs: InitInputs
    run: Run | None = None
    notes: tuple[str, ...] = ()

    def task(self, name: str) -> tuple[Profile | None, KeptEntry | None]:
        """Returns the profile of a task, and what is kept of it."""
        if self.run is None:
            return None, None
        place = self.run.names.index(name)
        return self.run.profiles[place], self.run.kept[place]

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        tasks = []
        for name, checkpoint in self.inputs.tasks.items():
            profile, kept = self.task(name)
            about = {"profile": profile and profile.to_dict(), "kept": kept and asdict(kept)}
            tasks.append({"name": name, "checkpoint": str(checkpoint), **about})
        run = {"run": str(self.inputs.path), "new": self.inputs.is_new, "base": str(self.inputs.base)}
        return {**run, "tasks": tasks, "notes": list(self.notes)}


def init_run(path: Path, options: InitOptions, progress: Progress | None = None) -> InitResult:
    """Writes the run.json of some checkpoints, which stay where they are; of tasks that have data, makes profiles and
    keeps samples.

    Of a run that is there only data and a head are given; the rest of it stays. What is wrong with any of them is told
    at once, before anything is written; with `dry_run` nothing is.

    >>> init_run(Path("run"), InitOptions(Path("base"), ["travel=out/travel", "out/bank"])).inputs  # doctest: +SKIP
    >>> init_run(Path("run"), InitOptions(data=["travel=travel.csv"])).run.kept  # doctest: +SKIP
    """
    inputs = _read_inputs(path, options)
    if options.dry_run:
        return InitResult(inputs)
    reading, data, held_out = options.reading, inputs.data, inputs.held_out
    notes = [_name_by_prediction(name, inputs, reading.device) for name in inputs.nameless]
    run = _written(inputs, options, progress)
    base: Encoder | None = None
    for done, (name, samples) in enumerate(data.items()):
        try:
            encoder = load_encoder(run.checkpoints[name], reading.device, assets=run.base)
            base = base or load_encoder(run.base, reading.device)
            rows, keep = reading.max_samples or ROWS, KEEP if options.keep is None else options.keep
            held = held_out.get(name)
            facts = profile_task(run, name, encoder, base, samples, held, keep=keep, rows=rows, progress=progress)
            run.register(name, **facts)  # after each, so that what was made is kept if a later one fails
        except InputError as error:
            command = run.how_to_add("--data", f"{name}=DATA")
            error.add_note(f"{path} is there, with {done} of {len(data)} profiles; make the others by {command}")
            raise
    warn_of_unseen_classes(run, data)
    return InitResult(inputs, run, tuple(notes))


def _written(inputs: InitInputs, options: InitOptions, progress: Progress | None) -> Run:
    """Writes run.json of a new run, or opens the one that is there; enters the head."""
    path, head = inputs.path, inputs.head
    remove_unfinished((*path.glob(".run.json.*"), *path.glob("profiles/.*.safetensors.*")))
    made = None if head is None or isinstance(head, Path) else _make_head(inputs.base, head, options.reading, progress)
    if inputs.is_new:
        run = Run.begin(path, inputs.base)
        for name, checkpoint in inputs.tasks.items():
            run.enter(name, checkpoint)
        run.save()
    else:
        run = Run.open(path)
    if made is not None:
        head = run.path / HEAD_FILE
        save_head(made, head)
    if isinstance(head, Path):
        run.register_head(head)
    if options.keep == 0 and not inputs.data:
        for name in run.names:
            run.register(name, kept=None)
    return run


def _make_head(model: Path, given: list[str] | Samples, reading: Reading, progress: Progress | None) -> Head:
    """Makes a head for the embeddings of a model from class names or labelled samples."""
    encoder = load_encoder(model, reading.device)
    if isinstance(given, list):
        return name_head(encoder, given, "imagenet-r" if encoder.is_whole else "plain")
    prepared = prepare(encoder, given, progress=progress)
    labels = [given.require_labels()[k] for k in prepared.positions]
    return mean_head(embed_prepared(encoder, prepared, progress=progress), labels, given.classes)


# -- what is given ----------------------------------------------------------------------------------------------------


def _read_inputs(path: Path, options: InitOptions) -> InitInputs:
    """Finds checkpoints and reads the labels of the data; all that is wrong is one error."""
    refuse_run_file(path)
    problems, named = list[str](), options.base is not None or bool(options.task)
    if options.keep is not None and options.keep < 0:
        problems.append(f"--keep is {options.keep}: give a number of samples of each class, 0 to keep none")
    run = Run.open(path) if is_run(path) and not (named and options.overwrite) else None
    base, tasks = _checkpoints(path, options, problems) if named or run is None else (run.base, run.checkpoints)
    if named and run is not None and (base is None or not _is_of(run, base, tasks)):
        problems.append(
            f"{path / RUN_FILE} exists: choose another directory, replace it with --overwrite, or leave out --base and "
            "--task to add data to it"
        )
        run = None  # of other tasks than those that were given
    elif run is not None and not (options.data or options.eval_data) and options.head is None and options.keep != 0:
        problems.append(
            f"{path} is a run already: give data to add, as --data NAME=DATA with one of {', '.join(tasks)}; or "
            "--base and --task with --overwrite to make it anew"
        )
    head: HeadSource | None = None
    if options.head is not None:
        with _collected(problems, f"--head {options.head}: "):
            head = _read_head(options.head, options.reading)
    names = [*tasks] if run is not None else [_named(text)[0] for text in options.task]
    held_out = _read_data("--eval-data", options.eval_data, names, options.reading, problems)
    data = held_out | _read_data("--data", options.data, names, options.reading, problems)
    if run is not None:
        with suppress(InputError):  # of a profile that is missing or damaged, and may be made again now
            problems += _data_of_others(run, data)
    nameless: dict[str, tuple[str, ...]] = {}
    if not problems and base is not None:
        nameless = _match_labels(base, tasks, data, held_out, problems)
    if problems or base is None:
        problems = list(dict.fromkeys(problems))
        listed = problems[0] if len(problems) == 1 else f"nothing was written:\n{bulleted(problems)}"
        raise InputError(listed, problems=problems if len(problems) > 1 else ())
    ordered = {name: data[name] for name in tasks if name in data}
    return InitInputs(path, run is None, base, tasks, ordered, held_out, nameless, head)


@contextmanager
def _collected(problems: list[str], about: str = "") -> Iterator[None]:
    """Adds an `InputError` to the problems."""
    try:
        yield
    except InputError as error:
        problems.append(f"{about}{error}")


def _checkpoints(path: Path, options: InitOptions, problems: list[str]) -> tuple[Path | None, dict[str, Path]]:
    """Finds the checkpoints of a new run, but for those that cannot be found or merged."""
    if path.exists() and not path.is_dir():
        problems.append(f"{path} is a file: give a directory")
    base: Path | None = None
    if options.base is None or not options.task:
        problems.append("a run has a base and tasks: give --base DIR, and one --task NAME=DIR for each task, in order")
    if options.base is not None:
        with _collected(problems, "base: "):
            base = _find_checkpoint(located(options.base))
    tasks: dict[str, Path] = {}
    for name, place in map(_named, options.task):
        if name in tasks:
            problems.append(f"several tasks are called {name!r}: give names that differ, as --task NAME=DIR")
        with _collected(problems, f"{name}: "):
            tasks[name] = _find_checkpoint(located(place))
            if base is not None:
                _refuse_mismatch(base, tasks[name])
    return base, tasks


def _is_of(run: Run, base: Path, tasks: Mapping[str, Path]) -> bool:
    """Returns whether a run consists of these checkpoints: then the command that made it, given again, goes on."""
    given = [(name, place.resolve()) for name, place in tasks.items()]
    return base.resolve() == run.base.resolve() and given == [(n, p.resolve()) for n, p in run.checkpoints.items()]


def _find_checkpoint(path: Path) -> Path:
    """Returns the place of a checkpoint or adapter: a path, or the newest complete checkpoint-N in a training's folder.

    A model that lies in the folder itself was saved at the end of the training, and goes before these.
    """
    if path.is_file() and (path.parent / MODEL_CONFIG).is_file():
        raise InputError(f"{path} is no more than the weights of a model: give its folder, {path.parent}")
    steps = sorted((int(match[1]), item) for item in path.glob("*/") if (match := STEP.fullmatch(item.name)))
    problem: InputError | None = None
    for place in (path, *(item for _, item in reversed(steps))):
        try:
            if not holds_adapter(place):
                open_checkpoint(place).close()
            return place
        except InputError as error:
            problem = problem or error
    raise InputError(f"{problem}{f'; nor in its {len(steps)} folders checkpoint-N' if steps else ''}")


def _named(text: str) -> tuple[str, Path]:
    name, place = split_name(text)
    return name or folder_name(Path(place)), Path(place)


def _refuse_mismatch(base: Path, task: Path) -> None:
    """Refuses a task that cannot be merged into the base, in one line."""
    kinds = [config.model_type for path in (base, task) if (config := ModelConfig.of(path)) and config.model_type]
    if len(set(kinds)) > 1:
        raise InputError(f"it is another architecture than the base: {kinds[1]}, not {kinds[0]} ({task})")
    try:
        with Inputs(base, [task], read_options(1)):
            pass
    except InputError as error:
        first, *rest = (line.strip(" -") for line in str(error).splitlines() if line.strip())
        raise InputError(f"it does not fit the base: {rest[0] if rest and first.endswith(':') else first}") from None


def _read_data(
    option: str, given: Sequence[str], names: Sequence[str], reading: Reading, problems: list[str]
) -> dict[str, Samples]:
    """Reads the data of tasks, NAME=DATA."""
    read: dict[str, Samples] = {}
    for text in given:
        with _collected(problems, f"{option} {text}: "):
            name, place = _named(text)
            if name not in names:
                hint, known = closest(name, names), ", ".join(names)
                raise InputError(f"no task is called {name!r}{hint}; give NAME=DATA with one of {known}")
            if name in read:
                raise InputError(f"{name} has {read[name].origin} already; put its data into one file or folder")
            read[name] = reading.open(place, labelled=True)
    return read


def _read_head(given: str, reading: Reading) -> HeadSource:
    """Returns what --head is: a head file, class names of a .txt or between commas, or labelled samples."""
    path = Path(given)
    if path.suffix == ".safetensors":
        load_head(path)
        return path
    if path.suffix == ".txt":
        try:
            parts: Sequence[str] = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{given}: not a readable text file ({error})") from None
    elif path.exists():
        return reading.open(path, labelled=True)
    elif "," in given:
        parts = given.split(",")
    else:
        raise InputError(f"{given} does not exist: give a head file, data, or class names as cat,dog")
    return [part.strip() for part in parts if part.strip()]


# -- labels and the names of classifiers ------------------------------------------------------------------------------


def _data_of_others(run: Run, data: Mapping[str, Samples]) -> Iterator[str]:
    """Yields what is probably the data of another task: its classes are known to be that task's, and not its own."""
    known = {name: run.own_classes(t) for t, name in enumerate(run.names)}
    for name, samples in data.items():
        present, own = set(samples.present_classes()), known[name]
        for other, theirs in known.items():
            if own and theirs and present.isdisjoint(own) and present <= set(theirs):
                yield (
                    f"the data given for {name} looks like that of {other}, with {some_of(sorted(present))}; "
                    f"give the data of {name}, or make the run anew with --overwrite if that of {other} was wrong"
                )


def _match_labels(
    base: Path,
    tasks: Mapping[str, Path],
    data: dict[str, Samples],
    held_out: dict[str, Samples],
    problems: list[str],
) -> dict[str, tuple[str, ...]]:
    """Gives samples the names that a merge calls the classes of their task's classifier, and finds contradictions.

    Returns the labels of the classifiers with data that have no names.
    """
    labels = {name: builtin_labels(task) for name, task in tasks.items()}
    merged = dict(zip(tasks, task_labels(base, list(tasks.values())), strict=True))
    nameless: dict[str, tuple[str, ...]] = {}
    for part in (data, held_out):
        for name, samples in part.items():
            if (rows := labels[name]) is None:
                continue
            present = by_name(samples.present_classes(), [rows], samples.origin)
            if are_generic(rows) and not {*present} & {*rows, *(merged[name] or ())}:
                nameless[name] = rows
                continue
            if not are_generic(rows):
                problems += _contradictions(name, samples.origin, present, labels)
            part[name] = with_names(samples, rows, merged[name])
    known = {name: data[name].present_classes() for name in nameless}
    for name, rows in nameless.items():
        same = [other for other in tasks if merged[other] == merged[name] and known.get(other) != known[name]]
        if same or len(known[name]) != len(rows):
            taken = f". Without names, a merge takes them for the classes of {some_of(same)}" if same else ""
            problems.append(f"{_unclear(data[name], tasks[name], rows)}{taken}")
    return nameless


def _contradictions(name: str, origin: str, present: Sequence[str], labels: Labels) -> Iterator[str]:
    """Yields that the labels of data are not those of a task's classifier; warns of a few that are none."""
    rows = labels[name] or ()
    if not (unknown := [label for label in present if label not in rows]):
        return
    others = [other for other, theirs in labels.items() if other != name and set(present) <= {*(theirs or ())}]
    if others or 2 * len(unknown) > len(present):
        hint = f": they are those of {' and '.join(others)}" if others else ""
        yield (
            f"{origin}: its labels {some_of(present, show=repr)} are not the classes of {name}{hint}; its checkpoint "
            f"has {some_of(rows, show=repr)} (id2label of its config.json). Give the data of {name}, or write the "
            "labels as the checkpoint has them"
        )
    else:
        warnings.warn(
            f"{origin}: no class of {name}: {some_of(unknown, show=repr)}; samples labelled so are left out when a "
            f"head is fitted. The checkpoint has {some_of(rows, show=repr)}",
            stacklevel=2,
        )


def _unclear(samples: Samples, checkpoint: Path, rows: Sequence[str]) -> str:
    labels = some_of(samples.present_classes(), show=repr)
    return (
        f"{samples.origin} has the labels {labels}, and {checkpoint} calls its classes {some_of(rows)}: which is "
        f"which? Write the names into id2label of {checkpoint / 'config.json'}, in the order of the training"
    )


def _name_by_prediction(name: str, inputs: InitInputs, device: str | None) -> str:
    """Gives samples what a merge calls the classes of a classifier without names, if it predicts them in order.

    Returns what a user should know of that.
    """
    samples, checkpoint, rows = inputs.data[name], inputs.tasks[name], inputs.nameless[name]
    answered = rows_by_answers(load_builtin(checkpoint, device, assets=inputs.base), samples)
    if [answered.get(label) for label in samples.present_classes()] != list(range(len(rows))):
        raise InputError(f"{_unclear(samples, checkpoint, rows)}. Its predictions do not show it")
    merged = task_labels(inputs.base, list(inputs.tasks.values()))[list(inputs.tasks).index(name)]
    names = dict(zip(samples.present_classes(), merged or rows, strict=True))
    for part in (inputs.data, inputs.held_out):
        if name in part:
            part[name] = replace(part[name], classes=tuple(names.get(label, label) for label in part[name].classes))
    pairs = some_of(f"{label!r} is {row}" for label, row in zip(names, rows, strict=True))
    return (
        f"{name}: its classifier has no names, and predicts that {pairs}. Models of this run answer "
        f"{some_of(names.values(), show=repr)}; to have your labels instead, write them into id2label of "
        f"{checkpoint / 'config.json'} first, and run this again with --overwrite"
    )
