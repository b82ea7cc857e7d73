"""The options of `tmx reproduce` and `tmx demo`; the module imports next to nothing: `tmx --help` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of `tmx reproduce`."""

    out: Path = Path("results")
    """Write records, tables and figures into a folder here that is named after the setting."""
    work: Path = Path("work")
    """Keep checkpoints here; they can be removed when the records are complete."""
    changes: Sequence[str] = ()
    """Replace a value of the file, as seeds=[3]; repeatable. Relative paths count from the current directory."""
    device: str | None = None
    """Train and measure on this device. Default: the GPU if there is one."""
    dry_run: bool = False
    """Only say what would be done, and which data and weights are missing for it."""


@dataclass(frozen=True)
class DemoOptions:
    """The options of `tmx demo`."""

    out: Path = Path("demo-out")
    """Write everything here. Started again, it goes on with the training there."""
    seed: int = 0
    """Other seeds give other pictures and another encoder."""
