"""The section `benchmark` of run.yaml, and the training and test samples that a data set is opened as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.config import STRICT, PositiveInt, Proportion, Seed, Text
from tunable_magmax.data.orders import Item, OrderSection
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.splits import split_all, split_groups
from tunable_magmax.errors import InputError

Scenario: TypeAlias = Literal["class", "domain"]
Groups = dict[str, Annotated[tuple[Item, ...], Field(min_length=1)]]
TEST_NAMES = ("test", "val", "validation")
"""What the test part may be called where the data is split already; the first that is there is used."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What to learn, in which order."""

    __pydantic_config__ = STRICT
    tasks: (
        Annotated[
            PositiveInt | Annotated[Groups, Field(min_length=1)],
            Field(description="a number of tasks, or a mapping of group names to lists of class names or indices"),
        ]
        | None
    ) = None
    order: OrderSection | None = None
    scenario: Scenario = "class"
    holdout: Proportion = 0.0
    split_seed: Seed = 0
    data: Text | None = None
    per_class: dict[Literal["train", "test"], PositiveInt] | None = None
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    class_names: Text | None = None
    text_column: Text | None = None
    label_column: Text | None = None
    domain_column: Text | None = None


@dataclass(frozen=True, kw_only=True)
class DataOptions(Section):
    """A checked section of a data set. `numbers`: the whole numbers that are options of this data set only."""

    name: str
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Returns `data`, of a data set that needs it."""
        assert self.data is not None
        return Path(self.data)

    @property
    def columns(self) -> tuple[str | None, str | None, str | None]:
        """Returns the columns of texts, labels and domains, as `open_samples` takes them."""
        return self.text_column, self.label_column, self.domain_column


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test samples of a data set; `facts` says how they were split.

    `drawn`: which of all samples are for testing, where a seed decided. `renamed`: whether the names in the file
    `class_names` are in use already.
    """

    train: Samples
    test: Samples
    facts: dict[str, Any]
    drawn: tuple[int, ...] = ()
    renamed: bool = False


def folders_split(path: Path, read: Callable[[Path], Samples]) -> Split | None:
    """Reads the folders train/ and test/ (or val/); returns None if there are no such folders."""
    if not (path / "train").is_dir():
        return None
    for name in TEST_NAMES:
        if (path / name).is_dir():
            return Split(read(path / "train"), read(path / name), {"split": "as found", "files": ["train", name]})
    if [item.name for item in path.iterdir() if item.is_dir()] == ["train"]:
        raise InputError(
            f"{path} has train/, but neither {'/ nor '.join(TEST_NAMES)}/; add one, or give {path / 'train'} as 'data' "
            "to have test_share of it drawn for testing"
        )
    return None  # among others, a class may be called train


def drawn_split(samples: Samples, options: DataOptions, by_class: bool = True) -> Split:
    """Draws samples for testing: the same share of each class (in each domain), or a share of all samples."""
    require_labels(samples, options)
    share, seed = options.test_share, options.split_seed
    if by_class:
        domains = samples.domains or ("",) * len(samples)
        train, test = split_groups(list(zip(domains, samples.labels or (), strict=True)), share, seed)
    else:
        train, test = split_all(len(samples), share, seed)
    facts = {
        "split": "drawn from each class" if by_class else "drawn from all",
        "test_share": share,
        "split_seed": seed,
    }
    return Split(samples.subset(train), samples.subset(test), facts, tuple(test))


def require_labels(samples: Samples, options: DataOptions) -> None:
    """Refuses samples without labels, and without domains where every domain is a task."""
    if samples.labels is None:
        raise InputError(
            f"{samples.origin} holds no labels, which training needs: class folders, or a column named label (or "
            "give label_column)"
        )
    if options.scenario == "domain" and samples.domains is None:
        raise InputError(f"{samples.origin}: which column names the domain of a sample? Give domain_column")
