"""`tmx init`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import Json, Quiet
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, show, tell
from tunable_magmax.files import show_size
from tunable_magmax.showing import plural
from tunable_magmax.workflows.init import init_run
from tunable_magmax.workflows.init_plan import InitOptions, RunPlan

_OPTIONS = InitOptions()


def init(
    run_dir: Path,
    /,
    *,
    base: Path | None = None,
    task: list[str] | None = None,
    data: list[str] | None = None,
    eval_data: list[str] | None = None,
    head: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    options: Annotated[InitOptions, Parameter(name="*", group=Group("The data", sort_key=1))] = _OPTIONS,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make a run directory of checkpoints that were trained elsewhere, or add data to one; checkpoints stay in place.

    tmx init run/ --base bert/ --task travel=out/travel --task bank=out/bank
    tmx init run/ --base bert/ --task out/travel --task out/bank --data travel=travel.csv --data bank=bank.csv
    tmx init run/ --data travel=travel.csv

    Parameters
    ----------
    run_dir
        The directory to make, or a run without --base and --task: then data and head are added to it.
    base
        The pre-trained checkpoint that training began with.
    task
        A task's checkpoint or LoRA adapter, as NAME=DIR; give one --task for each, in training order. Without NAME= the
        folder's name is the task's. In the folder of a training, the model saved at its end is taken, else the newest
        checkpoint-N.
    data
        The data of a task, as NAME=DATA: class folders of images, a .csv or .jsonl of text and label, or parquet. The
        run gets a profile (label counts, class names, embeddings), and keeps some samples.
    eval_data
        The same, of samples that were not trained on: these are kept then. What they say of a model is not too good.
    head
        The head of a fixed classifier over all classes, which is copied into the run.
    overwrite
        Replace the run.json that is there.
    dry_run
        Read headers and labels only, and say what would be done.
    """
    with progress_bars(quiet or as_json) as progress, plain_warnings():
        made = init_run(
            run_dir,
            base,
            task or [],
            data or [],
            head,
            eval_data=eval_data or [],
            options=options,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        show(json.dumps({**made.to_dict(), "written": not dry_run}, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        show("".join(f"{line}\n" for line in _lines(made, dry_run)))
    if not dry_run and not quiet:
        tell("".join(f"{line}\n" for line in (*made.notes, *_kept(made))))


def _lines(made: RunPlan, dry_run: bool) -> Iterator[str]:
    yield f"{made.path}: {'would be ' * dry_run}a run of {plural(len(made.tasks), 'task')} on {made.base.words}"
    width = max(map(len, made.tasks))
    profiles = {profile.task: profile for _, profile in made.profiles}
    for name, found in made.tasks.items():
        data = ""
        if name in profiles:
            classes = sum(count > 0 for count in profiles[name].label_counts)
            data = f"; {plural(profiles[name].samples, 'sample')} of {plural(classes, 'class', 'classes')}"
        elif name in made.data:
            data = f"; profile of {made.data[name].place}"
        yield f"  {name:<{width}}  {found.words}{data}"
    if dry_run:
        return
    run, first = shlex.quote(str(made.path)), shlex.quote(next(iter(made.tasks)))
    missing = made.without_profile
    yield "next:"
    if missing:
        yield f"  tmx init {run} --data {shlex.quote(missing[0])}=DATA  # {plural(len(missing), 'task')} to go"
        yield f"  tmx tailor {run} --weights {first}=1 -o site-model  # or by opinion, without data"
    else:
        yield f"  tmx tailor {run} --inputs SITE -o site-model  # SITE: unlabelled samples of the site"


def _kept(made: RunPlan) -> Iterator[str]:
    kept = [entry for name in made.data if (entry := made.kept.get(name)) is not None]
    if not kept:
        return
    samples = f"{plural(sum(entry.samples for entry in kept), 'sample')}, {show_size(sum(e.bytes for e in kept))}"
    least, asked = min(entry.per_class for entry in kept), max(entry.asked for entry in kept)
    each = f"at most {least} of each class" + f" (no room for {asked})" * (least < asked)
    yield f"kept {samples}, {each}, in {made.path / 'kept'}: they stay in the run; --keep 0 keeps none"
