"""`Reading`: how files of samples are read, the same for every command that reads any."""

from __future__ import annotations

from dataclasses import dataclass

from tunable_magmax.data.given import Source
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError

BATCH = 64


@dataclass(frozen=True)
class Reading:
    """How files of samples are read."""

    split: str | None = None
    """The split to use, of data that have several; of a benchmark train or test, which is the default."""
    text_column: str | None = None
    """The column of the texts. Default: text, sentence, query, ..."""
    label_column: str | None = None
    """The column of the labels. Default: label, class, intent, ..."""
    max_samples: int | None = None
    """Use at most this many samples (a fixed random draw). Default: 500 inputs of a site, else all samples."""
    batch: int = BATCH
    """Batch size."""
    device: str | None = None
    """The device for encoders. Default: the GPU if there is one."""

    def __post_init__(self) -> None:
        for name in ("max_samples", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, expected at least 1")

    def open(self, source: Source) -> Samples:
        """Opens a file, a folder, or samples in memory."""
        return open_samples(source, self.split, self.text_column, self.label_column)
