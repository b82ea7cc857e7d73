"""What `tmx init` does: makes a run of checkpoints that were trained elsewhere, or adds data to a run that is there."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import Progress
from tunable_magmax.workflows.init_plan import Given, InitOptions, RunPlan, TaskData, planned, with_rows_named

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.runs.profile import Profile
    from tunable_magmax.runs.run import KeptEntry, Run


def init_run(
    path: Path,
    base: Path | None = None,
    tasks: Sequence[str] = (),
    data: Given = (),
    head: Path | None = None,
    *,
    eval_data: Given = (),
    options: InitOptions | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RunPlan:
    """Writes the run.json of some checkpoints, which stay where they are; of tasks that have data, makes profiles and
    keeps samples.

    `tasks` in training order, `data` and `eval_data` (which was not trained on) are NAME=PATH, or a path whose name is
    the task's. A task's path may be the folder of a training, of which the model saved at its end or the newest
    checkpoint-N is taken. Of a run that is there only data and head are given; the rest of it stays. What is wrong with
    any of them is told at once, before anything is written; `dry_run` ends there.

    >>> init_run(Path("run"), Path("base"), ["travel=out/travel", "out/bank"]).tasks  # doctest: +SKIP
    >>> init_run(Path("run"), data=["travel=travel.csv"]).kept  # doctest: +SKIP
    """
    options = options or InitOptions()
    plan = planned(path, base, tasks, data, eval_data, head, options, overwrite)
    if dry_run:
        return plan
    plan = with_rows_named(plan, options)
    run = _written(plan, options)
    profiles: list[tuple[Path, Profile]] = []
    kept: dict[str, KeptEntry | None] = {}
    maker = _Maker(run, options, progress)
    for name, given in plan.data.items():
        try:
            profiles.append(maker.profile(name, given))
            kept[name] = maker.keep(name, given)
        except InputError as error:
            raise InputError(
                f"{error}\n{path} is there, with {len(profiles)} of {len(plan.data)} profiles; make the others by "
                f"`tmx init {path} --data {name}=DATA`"
            ) from None
    kept |= {label: entry for label, entry in zip(run.labels, run.kept, strict=True) if label not in kept}
    missing = tuple(label for label, profile in zip(run.labels, run.profiles, strict=True) if profile is None)
    notes = (*plan.notes, *maker.notes)
    return replace(plan, profiles=tuple(profiles), kept=kept, notes=notes, without_profile=missing)


def _written(plan: RunPlan, options: InitOptions) -> Run:
    """Writes run.json of a new run, or opens the one that is there; enters the head."""
    from tunable_magmax.runs.claim import remove_unfinished
    from tunable_magmax.runs.run import Run

    remove_unfinished((*plan.path.glob(".run.json.*"), *plan.path.glob("profiles/.*.safetensors.*")))
    if plan.is_new:
        run = Run.begin(plan.path, plan.base.path)
        for name, found in plan.tasks.items():
            run.enter(name, found.path)
        run.save()
    else:
        run = Run.open(plan.path)
    if plan.head is not None:
        run.register_profiles({}, plan.head, plan.base.path)
    if options.keep == 0 and not plan.data:
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

        run, options = self.run, self.options
        task = run.labels.index(name)
        self._encoder = load_encoder(run.tasks[task], options.device, assets=run.base)
        how: dict[str, Any] = {"rows": options.rows, "seed": options.seed, "progress": self.progress}
        profile = make_profile(name, given.samples, self._encoder, base=self._base, **how)
        if not options.force:
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
        held_out = given.held_out is not None
        return keep_samples(
            self.run,
            name,
            given.samples if given.held_out is None else given.held_out,
            per_class=KEEP if self.options.keep is None else self.options.keep,
            source="evaluation" if held_out else "training",
            size=self._encoder.picture_size,
            seed=self.options.seed,
        )

    @cached_property
    def _base(self) -> Encoder | None:
        """The run's base, if it can embed."""
        from tunable_magmax.models.encoder import load_encoder

        try:
            return load_encoder(self.run.base, self.options.device)
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
