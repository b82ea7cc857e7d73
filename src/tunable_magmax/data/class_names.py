"""Reads labels as class names: a label may be a name, or the index of a class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunable_magmax.data.samples import Samples, is_index
from tunable_magmax.errors import InputError

WORDNET_ID = re.compile(r"n\d{8}")


def by_name(
    labels: Sequence[str], lists: Sequence[tuple[str, ...]], fallback: Sequence[tuple[str, ...]], origin: object
) -> list[Any]:
    """Returns labels as class names: as they are, unless none is a name and all are numbers, which are indices then.

    An index counts in the one list of classes that all `lists` are, or else in the one that all of `fallback` are.

    >>> by_name(["1", "0"], [("cat", "dog")], [()], "labels.txt")
    ['dog', 'cat']
    """
    known = {name for names in lists for name in names}
    if any(label in known for label in labels) or not all(map(is_index, labels)):
        return list(labels)
    shared = [names[0] for names in (lists, fallback) if len(set(names)) == 1 and names[0]]
    if not shared:
        raise InputError(
            f"{origin}: the labels are indices, but the profiles of the tasks list different classes, so an index "
            "could mean several; give class names"
        )
    # An index beyond the list stays as it is: a label of no known class, which is counted and named later.
    return [shared[0][int(label)] if int(label) < len(shared[0]) else label for label in labels]


def with_names(samples: Samples, rows: Sequence[str], names: Sequence[str] | None = None) -> Samples:
    """Returns samples under a classifier's labels: classes that are numbers are its `rows`, which `names` rename.

    >>> from tunable_magmax.data.samples import text_samples
    >>> with_names(text_samples("a.csv", ["meow", "woof"], ["0", "1"]), ["cat", "dog"]).classes
    ('cat', 'dog')
    """
    place = dict(zip(rows, names or rows, strict=True))
    found = by_name(samples.classes, [tuple(rows)], [()], samples.origin)
    classes = tuple(place.get(name, name) for name in found)
    return samples if len({*classes}) < len(classes) else replace(samples, classes=classes)
