"""The data sets that run.yaml can name. Each is a dataclass: the keys of its section, and how it is opened.

A new one is a subclass of `DataSet` with `open`, and a line in `DATA_SETS`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field

from tunable_magmax.config import STRICT, PositiveInt, Proportion, Seed, Text, gather, refuse
from tunable_magmax.data.arrays import SPLIT_STREAM, held_out
from tunable_magmax.data.cifar100 import find_archive, open_archive
from tunable_magmax.data.images import class_folders, image_samples
from tunable_magmax.data.samples import WORDNET_ID, Samples
from tunable_magmax.data.source import TEST_NAMES, TRAIN, find_splits, open_samples
from tunable_magmax.errors import closest

Item: TypeAlias = Annotated[str | int, Field(description="a class name or an index")]


@dataclass(frozen=True)
class SeedOrder:
    """An order drawn by a seed."""

    __pydantic_config__ = STRICT
    seed: Seed


@dataclass(frozen=True)
class FileOrder:
    """The order `name` of a JSON file."""

    __pydantic_config__ = STRICT
    file: Text
    name: Text


OrderSection: TypeAlias = Annotated[
    Literal["natural"] | SeedOrder | FileOrder | tuple[Item, ...],
    Field(
        description="natural, {seed: 3}, {file: class_orders.json, name: A}, or a list of class names or indices "
        "(quote names like yes and no)"
    ),
]
"""`order` in a benchmark section."""

Groups = dict[str, Annotated[tuple[Item, ...], Field(min_length=1)]]
Tasks = Annotated[
    PositiveInt | Annotated[Groups, Field(min_length=1)],
    Field(description="a number of tasks, or a mapping of their names to lists of class names or indices"),
]


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test samples of a data set; `drawn`: which of all are for testing, where a seed decided."""

    train: Samples
    test: Samples
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSet(ABC):
    """What to learn, in which order."""

    __pydantic_config__ = STRICT
    name: Text
    tasks: Tasks
    order: OrderSection = "natural"
    holdout: Proportion = 0.0
    split_seed: Seed = 0

    def __post_init__(self) -> None:
        if isinstance(self.tasks, Mapping) and self.order != "natural":
            raise ValueError("tasks are named, and their classes come as they are listed: leave order out")

    @abstractmethod
    def open(self) -> Split:
        """Opens the training and the test samples."""

    def rooted(self, root: Path) -> Self:
        """Returns the same section, whose relative paths count from `root`."""
        if not isinstance(self.order, FileOrder):
            return self
        return replace(self, order=replace(self.order, file=str(root / Path(self.order.file).expanduser())))


@dataclass(frozen=True, kw_only=True)
class FileDataSet(DataSet):
    """Whatever `open_samples` opens; where it has no splits train and test, `test_share` is drawn for testing."""

    data: Text
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    text_column: Text | None = None
    label_column: Text | None = None

    def rooted(self, root: Path) -> Self:
        return replace(super().rooted(root), data=str(root / Path(self.data).expanduser()))

    def read(self, split: str | None) -> Samples:
        """Opens the samples of one split, or all."""
        return open_samples(self.data, split, self.text_column, self.label_column)

    def open(self) -> Split:
        splits = find_splits(Path(self.data))
        found = next((name for name in TEST_NAMES if TRAIN in splits and name in splits), None)
        if found is not None:
            return Split(self.read(TRAIN), self.read(found))
        samples = self.read(None)
        labels, seed = samples.require_labels(), self.split_seed
        train, test = held_out(range(len(labels)), labels, self.test_share, seed, SPLIT_STREAM, least=1)
        return Split(samples.subset(train), samples.subset(test), tuple(test))


@dataclass(frozen=True, kw_only=True)
class Cifar100(FileDataSet):
    """CIFAR-100 as parquet files or as the official python archive; labels are the fine ones."""

    def open(self) -> Split:
        archive = find_archive(Path(self.data))
        return super().open() if archive is None else Split(*open_archive(archive))


@dataclass(frozen=True, kw_only=True)
class ImageNetR(FileDataSet):
    """ImageNet-R: a folder for each class, named after it, or by its WordNet id if README.txt is beside the folders."""

    def read(self, split: str | None) -> Samples:
        """Reads class folders, by class name and then by file name: both ways to name folders give one order."""
        readme, place = Path(self.data, "README.txt"), Path(self.data, split or "")
        names = wordnet_names(readme.read_text(encoding="utf-8", errors="replace")) if readme.is_file() else {}
        return image_samples(place, sorted((names.get(name, name), images) for name, images in class_folders(place)))


def wordnet_names(content: str) -> dict[str, str]:
    """Maps WordNet ids to names, from the lines of a text that hold just these two; other lines are left out.

    >>> wordnet_names("ImageNet-R\\n\\nn01443537 goldfish\\n")
    {'n01443537': 'goldfish'}
    """
    matches = (re.fullmatch(rf"({WORDNET_ID.pattern})\s+(\S.*?)\s*", line) for line in content.splitlines())
    return {match[1]: match[2].replace(" ", "_") for match in matches if match}


@dataclass(frozen=True, kw_only=True)
class Glyphs(DataSet):
    """Characters drawn on the spot: so many classes, and so many pictures of each for training and testing."""

    classes: PositiveInt = 40
    train: PositiveInt = 100
    test: PositiveInt = 50
    seed: Seed = 0

    def open(self) -> Split:
        opened = resolve_name("tunable_magmax.experiments.glyphs:glyph_samples")
        return Split(*opened(classes=self.classes, train=self.train, test=self.test, seed=self.seed))


DATA_SETS: dict[str, type[DataSet]] = {
    "cifar100": Cifar100,
    "imagenet-r": ImageNetR,
    "clinc150": FileDataSet,
    "images": FileDataSet,
    "texts": FileDataSet,
    "glyphs": Glyphs,
}


def read_section(section: Any, root: Path) -> DataSet:
    """Reads the section as run.yaml holds it. Relative paths count from `root`; all problems are in one error.

    >>> data_set = read_section({"name": "cifar100", "data": "cifar", "tasks": 20}, Path("/data"))
    >>> data_set.data, data_set.order
    ('/data/cifar', 'natural')
    """
    problems: list[str] = []
    data_set = gather_section(section, root, problems)
    refuse(problems, "benchmark")
    assert data_set is not None
    return data_set


def gather_section(section: Any, root: Path, problems: list[str], inside: str = "") -> DataSet | None:
    """Like `read_section`, but adds the problems to a list. `inside`: the keys that lead to the section."""
    name = section.get("name") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name not in DATA_SETS:
        hint = closest(str(name), list(DATA_SETS))
        key = f"{inside}.name" if inside else "name"
        problems.append(f"{key} is {name!r}: must be one of {', '.join(DATA_SETS)}{hint}")
        return None
    data_set = gather(DATA_SETS[name], section, problems, inside)
    return None if data_set is None else data_set.rooted(root)
