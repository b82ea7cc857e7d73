"""Splits the samples of a data set into training and test samples: as they are found, or drawn by a seed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.lottery import MASK, lottery_state, ticket

Scenario: TypeAlias = Literal["class", "domain"]

TEST_NAMES = ("test", "val", "validation")
"""What the test part may be called where the data is split already; the first that is there is used."""
# Streams of the lottery; merges use 0 to 3.
SPLIT_STREAM = 16
LIMIT_STREAM = 17
ORDER_STREAM = 18
HELD_STREAM = 19


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where a data set lies and how it is read: the keys of a `benchmark` section that concern the data alone.

    `numbers`: the whole numbers that are options of this data set only.
    """

    name: str
    data: Path | None = None
    scenario: Scenario = "class"
    text_column: str | None = None
    label_column: str | None = None
    domain_column: str | None = None
    split_seed: int = 0
    test_share: float = 0.2
    class_names: Path | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Returns `data`, of a data set that needs it."""
        assert self.data is not None
        return self.data

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


# -- seeded draws -----------------------------------------------------------------------------------------------------


def shuffled(count: int, seed: int, stream: int = ORDER_STREAM) -> list[int]:
    """Returns 0 .. count - 1 in an order that only the seed decides, whatever the versions of Python and NumPy.

    >>> shuffled(5, seed=3) == shuffled(5, seed=3), sorted(shuffled(5, seed=3))
    (True, [0, 1, 2, 3, 4])
    """
    return _drawn(range(count), seed, stream)


def split_all(size: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns positions for training and for testing, ascending: `share` of all samples, whatever their classes.

    >>> [len(part) for part in split_all(30, 0.2, seed=0)]
    [24, 6]
    """
    drawn = shuffled(size, seed, SPLIT_STREAM)
    cut = min(max(1, round(size * share)), size - 1) if size > 1 else 0
    return sorted(drawn[cut:]), sorted(drawn[:cut])


def split_groups(groups: Sequence[Hashable], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Splits each group, such as a class, in the same way: a group of two or more has samples on both sides.

    >>> split_groups(["a", "a", "b", "b", "b"], 0.2, seed=0)[1]
    [0, 4]
    """
    return _divided(shuffled(len(groups), seed, SPLIT_STREAM), groups, share, least=1)


def held_out(
    positions: Sequence[int], groups: Sequence[Hashable], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Returns positions that stay and those held out, ascending: `share` of each group, which keeps at least one.

    >>> held_out([0, 1, 2, 4], ["a", "a", "a", "a", "b"], 0.3, seed=0)
    ([0, 1, 4], [2])
    """
    return _divided(_drawn(positions, seed, HELD_STREAM), groups, share, least=0)


def limited(positions: Sequence[int], groups: Sequence[Hashable], most: int, seed: int) -> list[int]:
    """Draws at most `most` positions of each group; `groups` holds the group of each position. Ascending."""
    drawn = _drawn(positions, seed, LIMIT_STREAM)
    return sorted(p for members in _members(drawn, groups).values() for p in members[:most])


def _drawn(positions: Sequence[int], seed: int, stream: int) -> list[int]:
    """Sorts positions by their lottery numbers."""
    start = lottery_state(seed & MASK, stream, 0)
    return sorted(positions, key=lambda p: (ticket(start, p), p))


def _divided(drawn: Sequence[int], groups: Sequence[Hashable], share: float, least: int) -> tuple[list[int], list[int]]:
    """Returns the positions that stay, and the first `share` of each group (at least `least`), which do not."""
    taken = {
        position
        for members in _members(drawn, groups).values()
        for position in members[: min(max(least, round(len(members) * share)), len(members) - 1)]
    }
    return sorted(set(drawn) - taken), sorted(taken)


def _members(drawn: Sequence[int], groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for position in drawn:
        members.setdefault(groups[position], []).append(position)
    return members
