"""The data sets that run.yaml can name. Each is a dataclass: the keys of its section, and how it is opened.

A new one is a subclass of `DataSet` with `name`, `kind` and `open`, and a line in `DATA_SETS`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from tunable_magmax.config import STRICT, PositiveInt, Proportion, Seed, Text
from tunable_magmax.data.cifar100 import open_cifar100
from tunable_magmax.data.imagenet_r import open_imagenet_r
from tunable_magmax.data.orders import FileOrder, Item, OrderSection, rooted
from tunable_magmax.data.samples import Kind, Samples
from tunable_magmax.data.source import Split, open_samples, open_split
from tunable_magmax.data.splits import split_all, split_groups
from tunable_magmax.errors import InputError, closest, some_of

Groups = dict[str, Annotated[tuple[Item, ...], Field(min_length=1)]]
Tasks = Annotated[
    PositiveInt | Annotated[Groups, Field(min_length=1)],
    Field(description="a number of tasks, or a mapping of group names to lists of class names or indices"),
]
Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class DataSet(ABC):
    """What to learn, in which order.

    `kind`: what the inputs are. `prompts`: the name of the templates that suit the class names (`models/prompts.py`),
    or templates.
    """

    __pydantic_config__ = STRICT
    kind: ClassVar[Kind]
    prompts: ClassVar[str | tuple[str, ...] | None] = None
    name: str
    tasks: Tasks
    order: OrderSection = "natural"
    holdout: Proportion = 0.0
    split_seed: Seed = 0

    def __post_init__(self) -> None:
        if isinstance(self.tasks, Mapping) and self.order != "natural":
            raise ValueError("tasks are named groups, which come as they are listed: leave order out")

    @abstractmethod
    def open(self) -> Split:
        """Opens the training and the test samples."""

    def rooted(self, root: Path) -> Self:
        """Returns the same section, whose relative paths count from `root`."""
        return replace(self, order=rooted(self.order, root))

    def record(self) -> dict[str, Any]:
        """Returns all keys in effect, as JSON can hold them; `benchmark.read_section` takes them back."""
        record: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        if isinstance(self.order, FileOrder) and self.order.name is None:
            del record["order"]["name"]
        return record


@dataclass(frozen=True, kw_only=True)
class FileDataSet(DataSet):
    """A data set in files. `data`: the file or folder."""

    data: Text

    def rooted(self, root: Path) -> Self:
        changes: dict[str, Any] = {"data": str(root / Path(self.data).expanduser()), "order": rooted(self.order, root)}
        return replace(self, **changes)

    @property
    def path(self) -> Path:
        """Returns `data` as a path that exists."""
        if not Path(self.data).exists():
            raise InputError(f"benchmark {self.name}: {self.data} does not exist; 'data' says where the data lies")
        return Path(self.data)


@dataclass(frozen=True, kw_only=True)
class Cifar100(FileDataSet):
    """CIFAR-100 as parquet files or as the official python distribution; labels are the fine ones."""

    kind = "image"
    prompts = "cifar100"
    name: Literal["cifar100"] = "cifar100"

    def open(self) -> Split:
        return open_cifar100(self.path)


@dataclass(frozen=True, kw_only=True)
class Clinc150(FileDataSet):
    """CLINC150: data_full.json, or the folder that holds it."""

    kind = "text"
    prompts = "clinc150"
    name: Literal["clinc150"] = "clinc150"

    def open(self) -> Split:
        path = self.path / "data_full.json" if self.path.is_dir() else self.path
        is_json = path.is_file() and path.suffix.lower() == ".json"
        split = open_split(path, lambda part: open_samples(path, part)) if is_json else None
        if split is None:
            raise InputError(f"{path}: expected data_full.json of CLINC150; other tables are read by name: texts")
        return split


@dataclass(frozen=True, kw_only=True)
class DrawnDataSet(FileDataSet):
    """A data set that may be one whole, of which a share is drawn for testing."""

    test_share: Share = 0.2

    def opened(self, text_column: str | None, label_column: str | None) -> Split:
        """Opens the splits train and test, or draws from the whole."""

        def read(part: str | None) -> Samples:
            return open_samples(self.path, part, text_column, label_column)

        return open_split(self.path, read) or self.drawn(read(None))

    def drawn(self, samples: Samples, by_class: bool = True) -> Split:
        """Draws samples for testing: the same share of each class, or a share of all samples."""
        labels, share, seed = require_labels(samples), self.test_share, self.split_seed
        train, test = split_groups(labels, share, seed) if by_class else split_all(len(samples), share, seed)
        how = "drawn from each class" if by_class else "drawn from all"
        facts = {"split": how, "test_share": share, "split_seed": seed}
        return Split(samples.subset(train), samples.subset(test), facts, tuple(test))


@dataclass(frozen=True, kw_only=True)
class ImageNetR(DrawnDataSet):
    """ImageNet-R: a folder for each class, named after it or by its WordNet id."""

    kind = "image"
    prompts = "imagenet-r"
    name: Literal["imagenet-r"] = "imagenet-r"

    def open(self) -> Split:
        return open_imagenet_r(self.path, lambda samples: self.drawn(samples, by_class=False))


@dataclass(frozen=True, kw_only=True)
class Images(DrawnDataSet):
    """A folder of class folders, or parquet with images; with splits train and test, or one whole."""

    kind = "image"
    name: Literal["images"] = "images"
    label_column: Text | None = None

    def open(self) -> Split:
        return self.opened(None, self.label_column)


@dataclass(frozen=True, kw_only=True)
class Texts(DrawnDataSet):
    """A table of texts, a folder with train and test tables, parquet, or JSON as CLINC150's."""

    kind = "text"
    name: Literal["texts"] = "texts"
    text_column: Text | None = None
    label_column: Text | None = None

    def open(self) -> Split:
        return self.opened(self.text_column, self.label_column)


@dataclass(frozen=True, kw_only=True)
class Glyphs(DataSet):
    """Characters drawn on the spot: so many classes, and so many pictures of each for training and testing."""

    kind = "image"
    name: Literal["glyphs"] = "glyphs"
    classes: PositiveInt = 40
    train: PositiveInt = 100
    test: PositiveInt = 50
    seed: Seed = 0

    def open(self) -> Split:
        opened = imported("tunable_magmax.experiments.glyphs:glyph_samples")
        train, test = opened(classes=self.classes, train=self.train, test=self.test, seed=self.seed)
        return Split(train, test, {"split": "drawn apart"})


DATA_SETS: dict[str, type[DataSet]] = {
    "cifar100": Cifar100,
    "imagenet-r": ImageNetR,
    "clinc150": Clinc150,
    "images": Images,
    "texts": Texts,
    "glyphs": Glyphs,
}


def imported(reference: str) -> Callable[..., Any]:
    """Returns a function called "module:name", whose module is imported when it is called.

    >>> imported("math:sqrt")(4)
    2.0
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        module, _, name = reference.partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def open_data_set(data_set: DataSet) -> Split:
    """Opens a data set; training and test samples have the same classes."""
    split = data_set.open()
    train, test = split.train, split.test
    for samples in (train, test):
        require_labels(samples)
        if samples.kind != data_set.kind:
            raise InputError(
                f"{samples.origin} holds {samples.kind}s, but the benchmark {data_set.name} is of {data_set.kind}s; "
                "choose another name or other data"
            )
    place = {name: k for k, name in enumerate(train.classes)}
    names = [test.classes[label] for label in require_labels(test)]
    unknown = sorted(set(names) - set(place))
    if unknown:
        shown = some_of(unknown, show=lambda name: f"{name!r}{closest(name, train.classes)}")
        raise InputError(
            f"{test.origin}: {len(unknown)} labels are outside the {len(place)} classes of {train.origin}: {shown}; "
            "correct them, or add training samples"
        )
    return replace(split, test=replace(test, classes=train.classes, labels=tuple(place[name] for name in names)))


def require_labels(samples: Samples) -> tuple[int, ...]:
    """Returns the labels; samples without any are refused."""
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, which training needs: class folders, or a column named label (or "
            "give label_column)"
        )
    return samples.labels
