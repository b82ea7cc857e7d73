"""What a caller adds to the output of a merge before it becomes visible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.merging.report import MergeReport


@dataclass(frozen=True, slots=True)
class AddedFiles:
    """More files of an output directory, by name, and a section at the end of its model card."""

    files: Mapping[str, bytes]
    card: str = ""


@dataclass(frozen=True, slots=True)
class Additions:
    """What a caller adds to an output directory before it becomes visible.

    `make` is called with the folder of the finished weights, still out of sight, and their report. `fingerprint` goes
    to the log beside the output, where the caller can recognise its own work.
    """

    make: Callable[[Path, MergeReport], AddedFiles]
    fingerprint: Mapping[str, Any]
