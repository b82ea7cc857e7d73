"""Where a merge is done, and what is asked of that place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.files import Progress
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport


@dataclass(frozen=True, slots=True)
class Errand:
    """A merge of opened inputs into an output. `memory` bounds a process; None as shard size means one file."""

    inputs: Inputs
    options: Options
    output: Output
    shard_size: int | None
    memory: int
    progress: Progress | None


class Place(Protocol):
    """Where a merge is done."""

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        """Raise what is wrong with the resources, before anything is touched; bytes on disk beside the weights."""

    def merge(self, errand: Errand) -> MergeReport:
        """Merge and write the weights."""
