"""`tmx profile`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tunable_magmax.cli.progress import plain_warnings, progress_bars
from tunable_magmax.cli.tables import number

if TYPE_CHECKING:
    from tunable_magmax.preference.profile import Profile


@Parameter(name="*", group=Group("The task's data", sort_key=1))
@dataclass(frozen=True)
class TaskData:
    """What the profile is made from."""

    task: Annotated[str | None, Parameter(help="The task's name.")] = None
    data: Annotated[
        Path | None,
        Parameter(help="Class folders of images, a .csv or .jsonl of text and label, parquet, or CLINC150's .json."),
    ] = None
    data_root: Annotated[
        Path | None, Parameter(help="For all tasks of a run: the data of task NAME is in this folder under NAME.")
    ] = None
    features: Annotated[
        Path | None, Parameter(help="Ready embeddings [n, width] instead of data: .npy or .safetensors; with --labels.")
    ] = None
    labels: Annotated[Path | None, Parameter(help="A label for each row of --features: .txt, .csv, .jsonl, .npy.")] = (
        None
    )
    classes: Annotated[
        str | None, Parameter(help="Only samples of these classes, as cat,dog or 0,1: the task's share of a data set.")
    ] = None
    split: Annotated[str | None, Parameter(help="Which part of a data set that has several, such as train.")] = None
    text_column: Annotated[str | None, Parameter(help="Default: text, sentence, query, ...")] = None
    label_column: Annotated[str | None, Parameter(help="Default: label, class, intent, ...")] = None


@Parameter(name="*", group=Group("Making it", sort_key=2))
@dataclass(frozen=True)
class Making:
    """How the profile is made."""

    classifier: Annotated[
        Path | None, Parameter(help="Head of the fixed classifier, whose predictions make --method shift possible.")
    ] = None
    classifier_checkpoint: Annotated[
        Path | None, Parameter(help="Its encoder; one for all tasks. Default in a run: the base.")
    ] = None
    rows: Annotated[int, Parameter(help="The largest number of embeddings kept.")] = 500
    seed: Annotated[int, Parameter(help="Seed of the draw of these embeddings.")] = 0
    device: Annotated[str | None, Parameter(help="Default: the GPU if there is one.")] = None


_DATA, _MAKING = TaskData(), Making()


def profile(
    source: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    data: TaskData = _DATA,
    making: Making = _MAKING,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Make a task's profile: label counts, class names and some embeddings, so that its data is not needed again.

    tmx profile CHECKPOINT --task NAME --data DATA -o profile.safetensors
    tmx profile RUN_DIR --task NAME --data DATA
    tmx profile RUN_DIR --data-root DATA

    In a run directory the profile is kept with the run and entered into its run.json.

    Parameters
    ----------
    source
        The task's checkpoint, or a run directory.
    out
        The profile file; in a run by default profiles/NAME.safetensors.
    quiet
        No progress bars, no summary.
    as_json
        Print what was made as JSON on stdout.
    """
    from tunable_magmax.workflows.profile import ProfileData, ProfileOptions, profile_tasks

    sources = ProfileData(**vars(data))
    with progress_bars(quiet or as_json) as progress, plain_warnings():
        made = profile_tasks(source, sources, ProfileOptions(**vars(making)), out=out, progress=progress)
    if as_json:
        records = [_record(path, profile) for path, profile in made]
        sys.stdout.write(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        sys.stdout.write("".join(f"{_line(path, profile)}\n" for path, profile in made))


def _record(path: Path, profile: Profile) -> dict[str, Any]:
    return {
        "out": str(path),
        "task": profile.task,
        "samples": profile.samples,
        "rows": len(profile.features),
        "width": profile.width,
        "label_counts": {name: count for name, count in profile.label_table.items() if count},
        "encoder": profile.encoder,
        "classifier": profile.classifier,
        "base": profile.base,
    }


def _line(path: Path, profile: Profile) -> str:
    classes = sum(count > 0 for count in profile.label_counts)
    return (
        f"{path}: task {profile.task}, {number(profile.samples, 'sample')} of {number(classes, 'class', 'classes')}, "
        f"{number(len(profile.features), 'embedding')} of width {profile.width}"
        + ("" if profile.base is None else ", and by the base")
        + ("" if profile.classifier is None else f", predictions over {len(profile.classifier_classes)} classes")
    )
