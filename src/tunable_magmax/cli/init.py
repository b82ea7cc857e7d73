"""`tmx init`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.merge_options import Json, Quiet
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, show
from tunable_magmax.errors import InputError
from tunable_magmax.showing import number

if TYPE_CHECKING:
    from tunable_magmax.runs.profile import Profile
    from tunable_magmax.workflows.init import RunPlan


def init(
    run_dir: Path,
    /,
    *,
    base: Path | None = None,
    task: list[str] | None = None,
    data: list[str] | None = None,
    head: Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make a run directory of checkpoints that were trained elsewhere; they stay where they are.

    tmx init run/ --base bert/ --task travel=out/travel --task bank=out/bank
    tmx init run/ --base bert/ --task out/travel --task out/bank --data travel=travel.csv --data bank=bank.csv

    Parameters
    ----------
    run_dir
        The directory to make.
    base
        The pre-trained checkpoint that training began with.
    task
        A task's checkpoint or LoRA adapter, as NAME=DIR; give one --task for each, in training order. Without NAME= the
        folder's name is the task's. In the folder of a training, the model saved at its end is taken, else the newest
        checkpoint-N.
    data
        The data of a task, as NAME=DATA: class folders of images, a .csv or .jsonl of text and label, or parquet. A
        profile is made of it, as by tmx profile.
    head
        The head of a fixed classifier over all classes, which is copied into the run.
    device
        Make profiles there. Default: the GPU if there is one.
    overwrite
        Replace the run.json that is there.
    dry_run
        Read headers only, and say what would be done.
    """
    if base is None:
        raise InputError("which checkpoint did training begin with? Give --base DIR")
    from tunable_magmax.workflows.init import init_run

    with progress_bars(quiet or as_json) as progress, plain_warnings():
        options = {"overwrite": overwrite, "dry_run": dry_run}
        made = init_run(run_dir, base, task or [], data or [], head, device=device, progress=progress, **options)
    if as_json:
        show(json.dumps({**made.to_dict(), "written": not dry_run}, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        show("".join(f"{line}\n" for line in _lines(made, dry_run)))


def _lines(made: RunPlan, dry_run: bool) -> Iterator[str]:
    yield f"{made.path}: {'would be ' * dry_run}a run of {number(len(made.tasks), 'task')} on {made.base.words}"
    width = max(map(len, made.tasks))
    profiles = {profile.task: profile for _, profile in made.profiles}
    for name, found in made.tasks.items():
        if name in profiles:
            profile = f"; {_counted(profiles[name])}"
        else:
            profile = f"; profile of {made.data[name]}" if name in made.data else ""
        yield f"  {name:<{width}}  {found.words}{profile}"
    if dry_run:
        return
    run, first = shlex.quote(str(made.path)), shlex.quote(next(iter(made.tasks)))
    yield "next:"
    if len(profiles) == len(made.tasks):
        yield f"  tmx tailor {run} --inputs SITE -o site-model  # SITE: unlabelled samples of the site"
    else:
        yield f"  tmx profile {run} --data-root DATA  # profiles of DATA/{first}.csv or DATA/{first}/, and so on"
        yield f"  tmx tailor {run} --weights {first}=1 -o site-model  # or by opinion, without profiles"


def _counted(profile: Profile) -> str:
    classes = sum(count > 0 for count in profile.label_counts)
    return f"{number(profile.samples, 'sample')} of {number(classes, 'class', 'classes')}"
