"""`tmx profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tunable_magmax.cli.terminal import plain_warnings, progress_bars, show
from tunable_magmax.showing import number
from tunable_magmax.workflows.profile import ProfileData, ProfileOptions, profile_tasks

if TYPE_CHECKING:
    from tunable_magmax.runs.profile import Profile


_DATA, _MAKING = ProfileData(), ProfileOptions()


def profile(
    source: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    data: Annotated[ProfileData, Parameter(name="*", group=Group("The task's data", sort_key=1))] = _DATA,
    making: Annotated[ProfileOptions, Parameter(name="*", group=Group("Making it", sort_key=2))] = _MAKING,
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
    notes: list[str] = []
    with progress_bars(quiet or as_json) as progress, plain_warnings():
        made = profile_tasks(source, data, making, out=out, progress=progress, notify=notes.append)
    if as_json:
        records = [_record(path, profile) for path, profile in made]
        show(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        show("".join(f"{_line(path, profile)}\n" for path, profile in made))
        show("".join(f"{text}\n" for text in notes))


def _record(path: Path, profile: Profile) -> dict[str, Any]:
    return {"out": str(path), **profile.to_dict()}


def _line(path: Path, profile: Profile) -> str:
    classes = sum(count > 0 for count in profile.label_counts)
    return (
        f"{path}: task {profile.task}, {number(profile.samples, 'sample')} of {number(classes, 'class', 'classes')}, "
        f"{number(len(profile.features), 'embedding')} of width {profile.width}"
        + ("" if profile.base is None else ", and by the base")
        + ("" if profile.classifier is None else f", predictions over {len(profile.classifier_classes)} classes")
    )
