"""`Samples`: the labels of a data set by class name, and its inputs, which are read when they are asked for."""

from __future__ import annotations

import hashlib
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, Literal, TypeAlias

from tunable_magmax.errors import InputError, closest, shortened, some_of

Kind: TypeAlias = Literal["image", "text"]
MOST_DIGITS = 18
WORDNET_ID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Unreadable:
    """An input that could not be read: its name and the reason."""

    name: str
    why: str


@dataclass(frozen=True, eq=False)
class Samples:
    """`size` inputs of one kind; `labels` (one index into `classes` for each) is None where there are none.

    `columns`: those of a table without labels.
    `load` takes ascending positions and yields, for each, a PIL image or a text, or an `Unreadable`.
    """

    origin: str
    kind: Kind
    size: int
    load: Callable[[Sequence[int]], Iterator[Any]]
    classes: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None
    columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.size

    def __str__(self) -> str:
        return self.origin

    @property
    def name(self) -> str:
        """What records call them, as they call a file by its name."""
        return self.origin

    def digest(self) -> str:
        """Returns the SHA-256 of the inputs and labels."""
        found = hashlib.sha256(repr((self.kind, self.classes, self.labels)).encode())
        for value in self.load(range(self.size)):
            content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
            found.update(hashlib.sha256(content).digest())
        return found.hexdigest()

    def require_labels(self) -> tuple[int, ...]:
        """Returns the labels; samples without any are refused."""
        if self.labels is None and self.columns:
            raise InputError(
                f"{self.origin}: no column of labels among {quoted(self.columns)}: call it 'label', or name it "
                "with --label-column (in run.yaml: label_column)"
            )
        if self.labels is None:
            raise InputError(f"{self.origin} holds inputs without labels: put images into class folders")
        return self.labels

    def label_names(self) -> list[str]:
        """Returns the class name of each sample."""
        return [self.classes[label] for label in self.require_labels()]

    def present_classes(self) -> list[str]:
        """Returns the classes that have samples, in their order."""
        return [self.classes[label] for label in sorted(set(self.require_labels()))]

    def subset(self, positions: Sequence[int]) -> Samples:
        """Returns the samples at ascending positions, with the same classes."""
        kept = tuple(positions)

        def load(wanted: Sequence[int]) -> Iterator[Any]:
            return self.load([kept[position] for position in wanted])

        labels = None if self.labels is None else tuple(self.labels[position] for position in kept)
        return replace(self, size=len(kept), load=load, labels=labels)

    def labelled(self, names: Sequence[str]) -> Samples:
        """Returns the same inputs with a class name for each; classes are in sorted order, numbers by value."""
        classes, labels = indexed(names)
        return replace(self, classes=classes, labels=labels)

    def batches(
        self, positions: Sequence[int], size: int, failed: dict[int, Unreadable]
    ) -> Iterator[tuple[list[int], list[Any]]]:
        """Yields readable inputs with their positions, `size` at a time; the others are put into `failed`."""
        where: list[int] = []
        inputs: list[Any] = []
        for position, value in zip(positions, self.load(positions), strict=True):
            if isinstance(value, Unreadable):
                failed[position] = value
                continue
            where.append(position)
            inputs.append(value)
            if len(inputs) == size:
                yield where, inputs
                where, inputs = [], []
        if inputs:
            yield where, inputs


def joined(parts: Sequence[Samples], origin: str) -> Samples:
    """Returns the samples of several data sets of one kind, one after the other; they have labels if all parts have."""
    ends = list(accumulate(map(len, parts)))

    def load(positions: Sequence[int]) -> Iterator[Any]:
        for k, group in groupby(positions, key=lambda position: bisect_right(ends, position)):
            start = ends[k] - len(parts[k])
            yield from parts[k].load([position - start for position in group])

    whole = replace(parts[0], origin=origin, size=ends[-1], load=load, classes=(), labels=None)
    if any(part.labels is None for part in parts):
        return whole
    if len({part.classes for part in parts}) > 1:
        return whole.labelled([name for part in parts for name in part.label_names()])
    labels = tuple(label for part in parts for label in part.require_labels())
    return replace(whole, classes=parts[0].classes, labels=labels)


def quoted(columns: Sequence[str]) -> str:
    """Returns names of columns for an error, between quotes."""
    return some_of(columns, 10, show=lambda name: shortened(repr(name))) or "none"


def text_samples(origin: str, texts: Sequence[str], labels: Sequence[str] | None = None) -> Samples:
    """Makes `Samples` of texts, and of a class name for each if there are labels."""

    def load(positions: Sequence[int]) -> Iterator[str]:
        return (texts[position] for position in positions)

    samples = Samples(origin, "text", len(texts), load)
    return samples if labels is None else samples.labelled(labels)


def is_index(label: str) -> bool:
    """Whether a label is a number that can count classes.

    >>> is_index("12"), is_index("\N{SUPERSCRIPT TWO}"), is_index("1" * 5000)
    (True, False, False)
    """
    return label.isdecimal() and len(label) <= MOST_DIGITS


def indexed(labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the class names in sorted order (numbers by value), and each label's index.

    >>> indexed(["10", "9", "10"])
    (('9', '10'), (1, 0, 1))
    """
    names = set(labels)
    numeric = all(map(is_index, names))
    classes = sorted(names, key=lambda name: (int(name), name)) if numeric else sorted(names)
    place = {name: k for k, name in enumerate(classes)}
    return tuple(classes), tuple(place[label] for label in labels)


def places_of(names: Sequence[str | int], known: Sequence[str], complaint: str) -> list[int]:
    """Returns where names are in a list; an error begins with the complaint and ends with those that are not there.

    >>> places_of(["dog", "cat"], ["cat", "dog"], "no classes")
    [1, 0]
    """
    place: dict[str | int, int] = {name: k for k, name in enumerate(known)}
    unknown = [name for name in dict.fromkeys(names) if name not in place]
    if unknown:
        raise InputError(f"{complaint}: {some_of(unknown, show=lambda name: f'{name!r}{closest(str(name), known)}')}")
    return [place[name] for name in names]


def by_name(
    labels: Sequence[str], lists: Sequence[tuple[str, ...]], origin: object, shared: tuple[str, ...] = ()
) -> list[str]:
    """Returns labels as class names: as they are, unless none is a name and all are numbers, which are indices then.

    An index counts in the one list of classes that all `lists` are, or else in `shared`.

    >>> by_name(["1", "0"], [("cat", "dog")], "labels.txt")
    ['dog', 'cat']
    """
    known = {name for names in lists for name in names}
    if any(label in known for label in labels) or not all(map(is_index, labels)):
        return list(labels)
    names = lists[0] if len(set(lists)) == 1 else shared
    if not names:
        raise InputError(
            f"{origin}: the labels are indices, but the profiles of the tasks list different classes, so an index "
            "could mean several; give class names"
        )
    # An index beyond the list stays as it is: a label of no known class, which is counted and named later.
    return [names[int(label)] if int(label) < len(names) else label for label in labels]


def with_names(samples: Samples, rows: Sequence[str], names: Sequence[str] | None = None) -> Samples:
    """Returns samples under a classifier's labels: classes that are numbers are its `rows`, which `names` rename.

    >>> with_names(text_samples("a.csv", ["meow", "woof"], ["0", "1"]), ["cat", "dog"]).classes
    ('cat', 'dog')
    """
    place = dict(zip(rows, names or rows, strict=True))
    classes = tuple(place.get(name, name) for name in by_name(samples.classes, [tuple(rows)], samples.origin))
    return samples if len({*classes}) < len(classes) else replace(samples, classes=classes)


def warn_unreadable(origin: str, failed: dict[int, Unreadable], tried: int) -> None:
    """Warns once of all samples that could not be read; if none could, it raises an error."""
    if not failed:
        return
    names = some_of(f"{item.name} ({item.why})" for item in failed.values())
    if len(failed) == tried:
        raise InputError(f"{origin}: {len(failed)} of {tried} samples cannot be read: {names}")
    warnings.warn(
        f"{origin}: {len(failed)} of {tried} samples could not be read and were left out: {names}", stacklevel=3
    )
