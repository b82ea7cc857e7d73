"""The options of `tmx train`; the module imports next to nothing, because `tmx --help` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Changes = Annotated[Sequence[str], Parameter(name="--set", negative=())]
"""Values of a YAML file, as KEY=VALUE."""


@Parameter(name="*")
@dataclass(frozen=True)
class TrainOptions:
    """The options of `tmx train`."""

    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None
    """Write the run directory here. Default: beside the file, with its name."""
    changes: Changes = ()
    """Replace a value of the file, as train.lr=3e-5; repeatable. Relative paths count from the current directory."""
    device: str | None = None
    """Train on this device. Default: the GPU if there is one."""
    dry_run: bool = False
    """Only say what would be trained: tasks, samples, steps."""
