"""Finds the checkpoint that a training left in a folder: the model saved at its end, or the newest checkpoint-N."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.checkpoints.source import holds_adapter, open_checkpoint
from tunable_magmax.errors import InputError

STEP = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint, and the folder of a training that it was found in, if it was."""

    path: Path
    folder: Path | None = None

    @property
    def words(self) -> str:
        """What to call it: "out/travel", or "checkpoint-10 of out/travel"."""
        return str(self.path) if self.folder is None else f"{self.path.name} of {self.folder}"


def find_checkpoint(path: Path) -> TrainedCheckpoint:
    """Returns the checkpoint at a path, or else the newest complete checkpoint-N in the folder of a training.

    A model that lies in the folder itself was saved at the end of the training, and goes before these.
    """
    problem = _problem(path)
    if problem is None:
        return TrainedCheckpoint(path)
    numbered = [(int(match[1]), item) for item in _folders(path) if (match := STEP.fullmatch(item.name))]
    for _, item in sorted(numbered, reverse=True):
        if _problem(item) is None:
            return TrainedCheckpoint(item, path)
    if numbered:
        raise InputError(f"{path}: none of its {len(numbered)} folders checkpoint-N holds a complete checkpoint")
    raise problem


def _folders(path: Path) -> list[Path]:
    return [item for item in path.iterdir() if item.is_dir()] if path.is_dir() else []


def _problem(path: Path) -> InputError | None:
    """Returns why there is no checkpoint at a path; an adapter is one."""
    if path.is_dir() and holds_adapter(path):
        return None
    try:
        open_checkpoint(path).close()
    except InputError as error:
        return error
    return None
