"""Whether the disk has room for what a merge writes, told before anything is read."""

from __future__ import annotations

import shutil
from pathlib import Path

from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size


def check_space(out: Path, needed: int) -> None:
    """Refuse to write so many bytes where they do not fit, less what an interrupted run has left beside `out`.

    >>> check_space(Path("merged"), 1 << 80)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: ... would be written, but only ... are free at ...
    """
    if problem := space_problem(out.absolute().parent, needed - Output.unfinished_bytes(out)):
        raise InputError(problem)


def space_problem(folder: Path, needed: int) -> str | None:
    """What is wrong with writing so many bytes into a folder that need not exist yet; None if they fit."""
    place = existing_folder(folder)
    usage = shutil.disk_usage(place)
    # Some network file systems do not tell, and say 0 of everything.
    if not usage.total or needed <= usage.free:
        return None
    return (
        f"{show_size(needed)} would be written, but only {show_size(usage.free)} are free at {place}: "
        "free space, or choose another output"
    )


def existing_folder(folder: Path) -> Path:
    """A folder, or what exists of the way to there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
