"""What `tmx init` does: makes a run of checkpoints that were trained elsewhere, or adds data or a head to a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.workflows.init_inputs import InitInputs, InitOptions, read_inputs, with_rows_named

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.files import Progress
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head
    from tunable_magmax.runs.profile import Profile
    from tunable_magmax.runs.run import KeptEntry, Run


@dataclass(frozen=True)
class InitResult:
    """A run that was made or added to, or would be: with the profiles of its data and what it keeps, by task."""

    inputs: InitInputs
    profiles: Mapping[str, tuple[Path, Profile]] = field(default_factory=dict)
    kept: Mapping[str, KeptEntry | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    without_profile: tuple[str, ...] = ()
    """The tasks whose data is not known yet."""

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        facts = ("path", "kind", "source", "samples", "per_class", "asked", "bytes")
        tasks = []
        for name, found in self.inputs.tasks.items():
            data, kept, profile = self.inputs.data.get(name), self.kept.get(name), self.profiles.get(name)
            tasks.append(
                {
                    "name": name,
                    "checkpoint": str(found),
                    "data": None if data is None else str(data.place),
                    "profile": None if profile is None else {"path": str(profile[0]), **profile[1].to_dict()},
                    "kept": None if kept is None else {fact: getattr(kept, fact) for fact in facts},
                }
            )
        about = {"run": str(self.inputs.path), "new": self.inputs.is_new, "base": str(self.inputs.base)}
        return {**about, "tasks": tasks, "notes": list(self.notes)}


def init_run(path: Path, options: InitOptions, progress: Progress | None = None) -> InitResult:
    """Writes the run.json of some checkpoints, which stay where they are; of tasks that have data, makes profiles and
    keeps samples.

    Of a run that is there only data and a head are given; the rest of it stays. What is wrong with any of them is told
    at once, before anything is written; with `dry_run` nothing is.

    >>> init_run(Path("run"), InitOptions(Path("base"), ["travel=out/travel", "out/bank"])).inputs  # doctest: +SKIP
    >>> init_run(Path("run"), InitOptions(data=["travel=travel.csv"])).kept  # doctest: +SKIP
    """
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.profiling import make_profile
    from tunable_magmax.runs.kept import KEEP, keep_samples
    from tunable_magmax.runs.profile import ROWS

    inputs = read_inputs(path, options)
    if options.dry_run:
        return InitResult(inputs)
    inputs = with_rows_named(inputs, options)
    run, reading = _written(inputs, options, progress), options.reading
    how: dict[str, Any] = {"rows": reading.max_samples or ROWS, "batch": reading.batch, "progress": progress}
    base = _base_encoder(run, reading.device) if inputs.data else None
    profiles: dict[str, tuple[Path, Profile]] = {}
    kept: dict[str, KeptEntry | None] = dict(zip(run.labels, run.kept, strict=True))
    notes = list(inputs.notes)
    for name, given in inputs.data.items():
        try:
            encoder = load_encoder(run.checkpoints[name], reading.device, assets=run.base)
            profile, file = make_profile(name, given.samples, encoder, base=base, **how), run.profile_path(name)
            _refuse_other_task(run, name, profile)
            if file.exists():
                notes.append(f"replaced the profile that was in {file}")
            profile.save(file)
            # After each, so that what was made is kept if a later one fails.
            run.register_profile(name)
            profiles[name] = file, profile
            kept[name] = keep_samples(
                run,
                name,
                given.samples if given.held_out is None else given.held_out,
                per_class=KEEP if options.keep is None else options.keep,
                source="training" if given.held_out is None else "evaluation",
                size=encoder.picture_size,
            )
        except InputError as error:
            raise InputError(
                f"{error}\n{path} is there, with {len(profiles)} of {len(inputs.data)} profiles; make the others by "
                f"`tmx init {path} --data {name}=DATA`"
            ) from None
    missing = tuple(label for label, profile in zip(run.labels, run.profiles, strict=True) if profile is None)
    return InitResult(inputs, profiles, kept, tuple(notes), missing)


def _written(inputs: InitInputs, options: InitOptions, progress: Progress | None) -> Run:
    """Writes run.json of a new run, or opens the one that is there; enters the head."""
    from tunable_magmax.files import remove_unfinished
    from tunable_magmax.models.head import save_head
    from tunable_magmax.runs.run import HEAD_FILE, Run

    path, base, head = inputs.path, inputs.base, inputs.head
    remove_unfinished((*path.glob(".run.json.*"), *path.glob("profiles/.*.safetensors.*")))
    made = None if head is None or isinstance(head, Path) else make_head(base, head, options, progress)
    if inputs.is_new:
        run = Run.begin(path, base)
        for name, found in inputs.tasks.items():
            run.enter(name, found)
        run.save()
    else:
        run = Run.open(path)
    if made is not None:
        head = run.path / HEAD_FILE
        save_head(made, head)
    if isinstance(head, Path):
        run.register_head(head, base)
    if options.keep == 0 and not inputs.data:
        for t in range(len(run.tasks)):
            run.register_kept(t, None)
    return run


def _base_encoder(run: Run, device: str | None) -> Encoder | None:
    """Returns the run's base, if it can embed."""
    from tunable_magmax.models.encoder import load_encoder

    try:
        return load_encoder(run.base, device)
    except InputError as error:
        warnings.warn(f"no embeddings by the run's base, which estimates from inputs need: {error}", stacklevel=2)
        return None


def _refuse_other_task(run: Run, name: str, profile: Profile) -> None:
    """Refuses a profile that is probably of another task's data.

    That is so if its classes are another task's and not its own, or if its samples are another task's.
    """
    import numpy as np

    table = {label: count for label, count in profile.label_table.items() if count}
    own = run.own_classes(run.labels.index(name))
    for t, label in enumerate(run.labels):
        other, theirs = run.profiles[t], run.own_classes(t)
        if label == name or theirs is None:
            continue
        elsewhere = own is not None and table.keys().isdisjoint(own) and table.keys() <= set(theirs)
        rows = None if other is None else other.base_features
        same = rows is not None and profile.base_features is not None and np.array_equal(rows, profile.base_features)
        if elsewhere or same:
            raise InputError(
                f"the data given for {name} looks like that of {label}: its classes are {some_of(table)}; give the "
                f"data of {name}, or make the run anew with --overwrite if that of {label} was wrong"
            )


def make_head(model: Path, given: list[str] | Samples, options: InitOptions, progress: Progress | None = None) -> Head:
    """Makes a head for the embeddings of a model from class names or labelled samples."""
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import mean_head, name_head
    from tunable_magmax.models.prepared import embed_prepared, prepare

    encoder = load_encoder(model, options.reading.device)
    if isinstance(given, list):
        return name_head(encoder, given, "imagenet-r" if encoder.is_whole else "plain")
    prepared = prepare(encoder, given, progress=progress)
    features = embed_prepared(encoder, prepared, options.reading.batch, progress=progress)
    return mean_head(features, prepared.labels, given.classes)
