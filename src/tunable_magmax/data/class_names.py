"""Reads class names: a list of all classes, or readable names for the labels that the data uses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.data.samples import Samples, is_index
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import parse_json

WORDNET_ID = re.compile(r"n\d{8}")
_FORMS = 'a JSON list, a JSON object {"label": "name"}, lines with one name each, or lines "n01443537 goldfish"'

ClassNames: TypeAlias = tuple[str, ...] | Mapping[str, str]
"""All classes in order, or label -> name."""


def read_class_names(path: Path) -> ClassNames:
    """Reads a JSON list or object; or lines: a name each, a WordNet id and a name, or a label, a tab and a name."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: class names cannot be read ({error})") from None
    if path.suffix.lower() == ".json":
        try:
            entries = parse_json(content)
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from None
    else:
        lines = [line.strip() for line in content.split("\n") if line.strip()]
        entries = _pairs(lines) or lines
    names = list(entries.values()) if isinstance(entries, dict) else entries
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"{path}: expected {_FORMS}")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(f"{path}: {some_of(repeated, show=repr)} named more than once; class names must differ")
    return entries if isinstance(entries, dict) else tuple(names)


def wordnet_names(content: str) -> dict[str, str]:
    """Maps WordNet ids to names, from the lines of a text that hold just these two; other lines are left out.

    >>> wordnet_names("ImageNet-R\\n\\nn01443537 goldfish\\n")
    {'n01443537': 'goldfish'}
    """
    matches = (re.fullmatch(rf"({WORDNET_ID.pattern})\s+(\S.*?)\s*", line) for line in content.splitlines())
    return {match[1]: match[2].replace(" ", "_") for match in matches if match}


def _pairs(lines: list[str]) -> dict[str, str] | None:
    ids = wordnet_names("\n".join(lines))
    if ids and len(ids) == len(lines):
        return ids
    parts = [line.split("\t") for line in lines]
    if all(len(part) == 2 for part in parts):
        return {label.strip(): name.strip() for label, name in parts}
    return None


def by_name(
    labels: Sequence[str], lists: Sequence[tuple[str, ...]], fallback: Sequence[tuple[str, ...]], origin: object
) -> list[Any]:
    """Returns labels as class names: as they are, unless none is a name and all are numbers, which are indices then.

    An index counts in the one list of classes that all `lists` are, or else in the one that all of `fallback` are.

    >>> by_name(["1", "0"], [("cat", "dog")], [()], Path("labels.txt"))
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

    >>> from tunable_magmax.data.tables import text_samples
    >>> with_names(text_samples("a.csv", ["meow", "woof"], ["0", "1"]), ["cat", "dog"]).classes
    ('cat', 'dog')
    """
    place = dict(zip(rows, names or rows, strict=True))
    found = by_name(samples.classes, [tuple(rows)], [()], samples.origin)
    classes = tuple(place.get(name, name) for name in found)
    return samples if len({*classes}) < len(classes) else replace(samples, classes=classes)
