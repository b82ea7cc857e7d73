"""What `tmx init` does: makes a run of checkpoints that were trained elsewhere, or adds data or a head to a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.workflows.options import Reading

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.files import Progress
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head
    from tunable_magmax.runs.profile import Profile
    from tunable_magmax.runs.run import KeptEntry, Run
    from tunable_magmax.runs.trained import TrainedCheckpoint


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
    templates: Literal["cifar100", "imagenet-r", "clinc150", "plain"] | None = None
    """Sentences to put the class names of --head into. Default: imagenet-r for images, plain for texts."""
    keep: int | None = None
    """Samples of each class that the run keeps as files (texts in a CSV, pictures in folders); 0 for none. Default: 20.
    They never leave the run."""
    classes: str | None = None
    """Only samples of these classes, as cat,dog or 0,1: a task's share of a data set."""
    force: bool = False
    """Take data whose classes are another task's."""
    reading: Reading = Reading()
    overwrite: bool = False
    """Replace the run.json that is there."""
    dry_run: bool = False
    """Read headers and labels only, check everything, and say what would be done."""


@dataclass(frozen=True)
class TaskData:
    """A task's data. `held_out`: samples that were not trained on, if some were given."""

    place: Path
    samples: Samples
    held_out: Samples | None = None


@dataclass(frozen=True)
class InitResult:
    """A run that was made or added to, or would be. `head`: the head file, class names or samples that were given."""

    path: Path
    base: TrainedCheckpoint
    tasks: Mapping[str, TrainedCheckpoint]
    data: Mapping[str, TaskData]
    head: str | None = None
    is_new: bool = True
    profiles: tuple[tuple[Path, Profile], ...] = ()
    kept: Mapping[str, KeptEntry | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    without_profile: tuple[str, ...] = ()
    """The tasks whose data is not known yet."""

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        profiles = {profile.task: {"path": str(file), **profile.to_dict()} for file, profile in self.profiles}
        facts = ("path", "kind", "source", "samples", "per_class", "asked", "bytes")
        tasks = []
        for name, found in self.tasks.items():
            data, kept = self.data.get(name), self.kept.get(name)
            tasks.append(
                {
                    "name": name,
                    "checkpoint": str(found.path),
                    "data": None if data is None else str(data.place),
                    "profile": profiles.get(name),
                    "kept": None if kept is None else {fact: getattr(kept, fact) for fact in facts},
                }
            )
        about = {"run": str(self.path), "new": self.is_new, "base": str(self.base.path), "tasks": tasks}
        return {**about, "head": self.head, "notes": list(self.notes)}


def init_run(path: Path, options: InitOptions, progress: Progress | None = None) -> InitResult:
    """Writes the run.json of some checkpoints, which stay where they are; of tasks that have data, makes profiles and
    keeps samples.

    Of a run that is there only data and a head are given; the rest of it stays. What is wrong with any of them is told
    at once, before anything is written; with `dry_run` nothing is.

    >>> init_run(Path("run"), InitOptions(Path("base"), ["travel=out/travel", "out/bank"])).tasks  # doctest: +SKIP
    >>> init_run(Path("run"), InitOptions(data=["travel=travel.csv"])).kept  # doctest: +SKIP
    """
    from tunable_magmax.workflows.init_checks import checked, with_rows_named

    result = checked(path, options)
    if options.dry_run:
        return result
    result = with_rows_named(result, options)
    run = _written(result, options, progress)
    profiles: list[tuple[Path, Profile]] = []
    kept: dict[str, KeptEntry | None] = {}
    maker = _Maker(run, options, progress)
    for name, given in result.data.items():
        try:
            profiles.append(maker.profile(name, given))
            kept[name] = maker.keep(name, given)
        except InputError as error:
            raise InputError(
                f"{error}\n{path} is there, with {len(profiles)} of {len(result.data)} profiles; make the others by "
                f"`tmx init {path} --data {name}=DATA`"
            ) from None
    kept |= {label: entry for label, entry in zip(run.labels, run.kept, strict=True) if label not in kept}
    missing = tuple(label for label, profile in zip(run.labels, run.profiles, strict=True) if profile is None)
    notes = (*result.notes, *maker.notes)
    return replace(result, profiles=tuple(profiles), kept=kept, notes=notes, without_profile=missing)


def _written(result: InitResult, options: InitOptions, progress: Progress | None) -> Run:
    """Writes run.json of a new run, or opens the one that is there; enters the head."""
    from tunable_magmax.models.head import save_head
    from tunable_magmax.runs.claim import remove_unfinished
    from tunable_magmax.runs.run import HEAD_FILE, Run

    remove_unfinished((*result.path.glob(".run.json.*"), *result.path.glob("profiles/.*.safetensors.*")))
    head = result.head
    made = None
    if head is not None and not is_head_file(head):
        made = make_head(result.base.path, head, options, progress)
    if result.is_new:
        run = Run.begin(result.path, result.base.path)
        for name, found in result.tasks.items():
            run.enter(name, found.path)
        run.save()
    else:
        run = Run.open(result.path)
    if made is not None:
        save_head(made, run.path / HEAD_FILE)
        run.register_profiles({}, run.path / HEAD_FILE, result.base.path)
    elif head is not None:
        run.register_profiles({}, Path(head), result.base.path)
    if options.keep == 0 and not result.data:
        for t in range(len(run.tasks)):
            run.register_kept(t, None)
    return run


class _Maker:
    """Makes profiles of tasks of a run and keeps samples; `notes` is what a user should know of it."""

    def __init__(self, run: Run, options: InitOptions, progress: Progress | None) -> None:
        self.run, self.options, self.progress = run, options, progress
        self.notes: list[str] = []
        self._encoder: Encoder | None = None

    def profile(self, name: str, given: TaskData) -> tuple[Path, Profile]:
        """Makes a task's profile, and enters it."""
        from tunable_magmax.models.encoder import load_encoder
        from tunable_magmax.models.profiling import make_profile
        from tunable_magmax.runs.profile import ROWS

        run, reading = self.run, self.options.reading
        task = run.labels.index(name)
        self._encoder = load_encoder(run.tasks[task], reading.device, assets=run.base)
        how: dict[str, Any] = {"rows": reading.max_samples or ROWS, "batch": reading.batch, "progress": self.progress}
        profile = make_profile(name, given.samples, self._encoder, base=self._base, **how)
        if not self.options.force:
            _refuse_other_task(run, task, profile)
        path = run.profile_path(name)
        if path.exists():
            self.notes.append(f"replaced the profile that was in {path}")
        profile.save(path)
        # After each, so that what was made is kept if a later one fails.
        run.register_profiles({task: path})
        return path, profile

    def keep(self, name: str, given: TaskData) -> KeptEntry | None:
        """Keeps samples of the task that was profiled last; held-out ones, if there are some."""
        from tunable_magmax.runs.kept import KEEP, keep_samples

        assert self._encoder is not None
        return keep_samples(
            self.run,
            name,
            given.samples if given.held_out is None else given.held_out,
            per_class=KEEP if self.options.keep is None else self.options.keep,
            source="training" if given.held_out is None else "evaluation",
            size=self._encoder.picture_size,
        )

    @cached_property
    def _base(self) -> Encoder | None:
        """The run's base, if it can embed."""
        from tunable_magmax.models.encoder import load_encoder

        try:
            return load_encoder(self.run.base, self.options.reading.device)
        except InputError as error:
            warnings.warn(f"no embeddings by the run's base, which estimates from inputs need: {error}", stacklevel=2)
            return None


def _refuse_other_task(run: Run, task: int, profile: Profile) -> None:
    """Refuses a profile that is probably of another task's data.

    That is so if its classes are another task's and not its own, or if its samples are another task's.
    """
    import numpy as np

    table = {name: count for name, count in profile.label_table.items() if count}
    own = run.own_classes(task)
    for t, label in enumerate(run.labels):
        other, theirs = run.profiles[t], run.own_classes(t)
        if t == task or theirs is None:
            continue
        elsewhere = own is not None and table.keys().isdisjoint(own) and table.keys() <= set(theirs)
        rows = None if other is None else other.base_features
        same = rows is not None and profile.base_features is not None and np.array_equal(rows, profile.base_features)
        if elsewhere or same:
            raise InputError(
                f"the data given for {run.labels[task]} looks like that of {label}: its classes are "
                f"{some_of(table)}; give the data of {run.labels[task]}, or --force if this is meant"
            )


# -- a head -----------------------------------------------------------------------------------------------------------


def is_head_file(given: str) -> bool:
    """Returns whether --head names a head file, and not class names or samples."""
    return given.endswith(".safetensors")


def read_names(given: str) -> list[str] | None:
    """Returns class names: the lines of a .txt file, or what stands between commas; None of data.

    >>> read_names("cat, dog")
    ['cat', 'dog']
    """
    path = Path(given)
    if path.exists() and path.suffix != ".txt":
        return None
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


def head_samples(given: str, reading: Reading) -> Samples:
    """Opens the labelled samples whose class means are a head."""
    samples = reading.open(Path(given))
    if samples.labels is None:
        raise InputError(f"{samples.origin} holds no labels: put images into class folders, or add a column 'label'")
    return samples


def make_head(model: Path, given: str, options: InitOptions, progress: Progress | None = None) -> Head:
    """Makes a head for the embeddings of a model from class names or labelled samples."""
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import mean_head, name_head, text_head
    from tunable_magmax.models.prepared import embed_prepared, prepare

    names, reading = read_names(given), options.reading
    encoder = load_encoder(model, reading.device)
    if names is not None and (encoder.is_whole or encoder.tokenizer is None):
        return text_head(encoder, names, options.templates or "imagenet-r")
    if names is not None:
        return name_head(encoder, names, options.templates or "plain")
    samples = head_samples(given, reading)
    prepared = prepare(encoder, samples, progress=progress)
    features = embed_prepared(encoder, prepared, reading.batch, progress=progress)
    return mean_head(features, prepared.labels, samples.classes)
