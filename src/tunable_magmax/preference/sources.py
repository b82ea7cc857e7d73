"""What is known of a site, and how its samples are read: options that commands and Python share.

The module imports next to nothing, because `tmx --help` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.data.samples import Samples
    from tunable_magmax.data.source import SampleSource

SAMPLES = ("inputs", "labels", "labelled")


@dataclass(frozen=True)
class Embedding:
    """How inputs are read and embedded."""

    text_column: str | None = None
    """The column of the texts. Default: text, sentence, query, ..."""
    device: str | None = None
    """The device for encoders. Default: the GPU if there is one."""

    def open(self, source: SampleSource) -> Samples:
        """Opens a file, a folder, or samples in memory."""
        from tunable_magmax.data.source import open_samples

        return open_samples(source, text_column=self.text_column)


@dataclass(frozen=True)
class Reading(Embedding):
    """How files of samples with labels are read, the same for every command that reads any."""

    split: str | None = None
    """The split to use, of data that have several; of a benchmark train or test, which is the default."""
    label_column: str | None = None
    """The column of the labels. Default: label, class, intent, ..."""
    max_samples: int | None = None
    """Use at most this many samples (a fixed random draw). Default: 500 inputs of a site, else all samples."""

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < 1:
            raise InputError(f"max_samples is {self.max_samples}, expected at least 1")

    def open(self, source: SampleSource, *, labelled: bool = False) -> Samples:
        """Opens a file, a folder, or samples in memory; refuses those without labels where these are needed."""
        from tunable_magmax.data.source import open_samples

        samples = open_samples(source, self.split, self.text_column, self.label_column)
        if labelled:
            samples.require_labels()
        return samples


@dataclass(frozen=True)
class SiteSources:
    """What is known of a site: samples, in files or in memory (a list, a column, a data set), or a person's word."""

    inputs: Any = None
    """Inputs of the site: an image folder, texts (.txt, .csv, .jsonl) or parquet."""
    labels: Any = None
    """Labels of the site: .txt (one per line), .csv, .jsonl or labelled data. Class names or indices, or task names,
    each of which counts for its task."""
    labelled: Any = None
    """Inputs of the site with labels: class folders of images, a table, or parquet."""
    weights: Any = None
    """How much each task matters, as 3,1,0 or by name as travel=7,bank=3, where other tasks weigh 0."""
    alpha: float | None = None
    """Follow the paper's schedule: above 1 favours early tasks, below 1 late ones."""
    equal: bool = False
    """Give every task the same weight."""

    def __post_init__(self) -> None:
        for name in SAMPLES:
            if not isinstance(value := getattr(self, name), Path | None):
                from tunable_magmax.data.source import as_samples

                object.__setattr__(self, name, as_samples(value, name))
        if isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", {name: _number(w) for name, w in self.weights.items()})
        elif self.weights is not None:
            object.__setattr__(self, "weights", tuple(map(_number, self.weights)))

    def named(self) -> dict[str, Any]:
        """Returns what was given, by name.

        >>> SiteSources(weights=["1/2", "2"], equal=False).named()
        {'weights': (0.5, 2.0)}
        """
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}

    @property
    def samples(self) -> list[str]:
        """The names of the samples that were given."""
        return [name for name in self.named() if name in SAMPLES]


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    from tunable_magmax.merging.budget import read_decimal  # which imports numpy

    return float(read_decimal(value, "a weight"))
