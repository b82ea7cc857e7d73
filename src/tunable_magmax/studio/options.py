"""The options of `tmx studio`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.errors import InputError


@dataclass(frozen=True)
class StudioOptions:
    """What the studio begins with, and where it listens and writes."""

    out: Path | None = None
    """A folder for models, preferences and uploaded samples. Default: RUN_DIR-studio."""
    data: Path | None = None
    """Labelled samples of the site to measure on. The run's test data are used as well, where they are found."""
    inputs: Path | None = None
    """Samples of the site to begin with, without labels."""
    labelled: Path | None = None
    """Samples of the site with labels to begin with."""
    preference: Path | None = None
    """A preference file to begin with."""
    samples: int = 400
    """Measure on at most this many samples (a fixed random draw)."""
    port: int = 0
    """Listen on this port. Default: any that is free."""
    no_browser: bool = False
    """Print the address, and open no browser."""
    device: str | None = None
    """The device for encoders. Default: the GPU if there is one."""

    def __post_init__(self) -> None:
        if self.inputs is not None and self.labelled is not None:
            raise InputError("--inputs and --labelled are both samples of the site: give one of them")
        if self.samples < 1:
            raise InputError(f"--samples is {self.samples}, expected at least 1")
