"""Samples that a caller holds in memory: texts, pictures, paths of pictures, labels, and pairs of input and label."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tunable_magmax.data.images import IMAGE_SUFFIXES, pillow, read_picture, to_rgb
from tunable_magmax.data.samples import Kind, Samples, Unreadable, indexed
from tunable_magmax.data.tables import LABEL_COLUMNS, TEXT_COLUMNS
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.showing import plural

Given: TypeAlias = "str | os.PathLike[str] | Iterable[Any]"
"""What a caller of the Python API may give for samples: a path, or the samples themselves."""
INPUT_COLUMNS = ("image", "img", "picture", *TEXT_COLUMNS)
WANTED = {
    "image": "a PIL image, an array [height, width, 3] of uint8, or the path of an image file",
    "text": "a text, or a Path whose file holds one text",
}


@dataclass(frozen=True, eq=False)
class GivenSamples(Samples):
    """Samples that were not read from one file or folder; `items` are as they were given."""

    items: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.origin

    @property
    def name(self) -> str:
        """What records call them, as they call a file by its name."""
        return self.origin

    def digest(self) -> str:
        """Returns the SHA-256 of the inputs and labels; of files, their paths, sizes and times count."""
        found = hashlib.sha256(repr((self.kind, self.classes, self.labels)).encode())
        for item in self.items:
            for part in _content(item):
                found.update(hashlib.sha256(part).digest())
        return found.hexdigest()


Source: TypeAlias = Path | GivenSamples
"""Where samples come from."""


def given_inputs(value: Given) -> Source:
    """Returns inputs as samples; a text or path alone is the path of a file or folder.

    Texts that are paths of image files are images.

    >>> given_inputs(["where is my card?", "what do I owe?"]).name
    '2 texts in memory'
    >>> given_inputs("site/images")
    PosixPath('site/images')
    """
    path = _as_path(value)
    if path is not None:
        return path
    items = _listed(value, "inputs")
    return given_samples([_cell(item, INPUT_COLUMNS) if isinstance(item, Mapping) else item for item in items])


def given_labels(value: Given) -> Source:
    """Returns labels as samples that are nothing but labels: class names or indices.

    >>> given_labels(["cat", "dog", "cat"]).labels
    (0, 1, 0)
    """
    path = _as_path(value)
    if path is not None:
        return path
    names = _label_names(_listed(value, "labels"))
    classes, labels = indexed(names)
    origin = f"{plural(len(names), 'label')} in memory"
    return GivenSamples(origin, "text", len(names), _loader(names, "text"), classes, labels, items=tuple(names))


def given_labelled(value: Given) -> Source:
    """Returns pairs of an input and its label as labelled samples; rows of a data set have columns of these.

    >>> pairs = given_labelled(zip(["hello", "bye"], ["greeting", "parting"]))
    >>> pairs.name, pairs.classes, pairs.labels
    ('2 labelled texts in memory', ('greeting', 'parting'), (0, 1))
    """
    path = _as_path(value)
    if path is not None:
        return path
    pairs = _listed(value, "pairs")
    inputs, labels = [], []
    for position, pair in enumerate(pairs, 1):
        if isinstance(pair, Mapping):
            pair = _cell(pair, INPUT_COLUMNS), _cell(pair, LABEL_COLUMNS)
        elif not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"pair {position} is a {type(pair).__name__}: a pair is a tuple of an input and its label, and "
                "zip(inputs, labels) makes them"
            )
        inputs.append(pair[0])
        labels.append(pair[1])
    return given_samples(inputs, labels=labels)


def given_samples(items: Sequence[Any], kind: Kind | None = None, labels: Sequence[Any] | None = None) -> GivenSamples:
    """Makes samples of inputs of one kind, by default that of the first; files are read when they are needed."""
    kind = kind or _kind(items[0])
    for position, item in enumerate(items, 1):
        _check(item, kind, position)
    classes, indices = ((), None) if labels is None else indexed(_label_names(labels))
    labelled = "" if labels is None else "labelled "
    origin = f"{plural(len(items), f'{labelled}{kind}')} in memory"
    return GivenSamples(origin, kind, len(items), _loader(items, kind), classes, indices, items=tuple(items))


def is_one_input(value: Any) -> bool:
    """Says whether a value is a single input, not several of them."""
    return isinstance(value, str | os.PathLike) or _is_picture(value) or (_is_array(value) and value.ndim in (2, 3))


def _as_path(value: Given) -> Path | None:
    return Path(value) if isinstance(value, str | os.PathLike) else None


def _listed(value: Any, what: str) -> list[Any]:
    """Returns the items of a list, an iterator, a column or the rows of a table, or a data set of torch."""
    indexable = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    several = isinstance(value, Iterable) or indexable
    if is_one_input(value) or isinstance(value, Mapping) or not several:
        raise InputError(f"{what} are a {type(value).__name__}: give a list of them, or the path of a file or folder")
    if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a DataFrame, which iterates over its columns' names
        items: list[Any] = value.to_dict("records")
    else:
        items = list(value) if isinstance(value, Iterable) else [value[k] for k in range(len(value))]
    if not items:
        raise InputError(f"{what} are an empty list: give at least one")
    return items


def _cell(row: Mapping[str, Any], usual: Sequence[str]) -> Any:
    """Returns the cell of a row that is called as usual."""
    found = next((name for name in usual if name in row), None)
    if found is None:
        raise InputError(
            f"the rows have the columns {some_of(row, show=repr)}, expected one called {some_of(usual, 3, show=repr)}: "
            "give the columns themselves"
        )
    return row[found]


def _label_names(labels: Sequence[Any]) -> list[str]:
    """Returns labels as texts, as a file would hold them; numbers may be of numpy or torch."""
    labels = [label.item() if getattr(label, "ndim", None) == 0 else label for label in labels]
    for position, label in enumerate(labels, 1):
        named = isinstance(label, str) and label.strip()
        if not named and (isinstance(label, bool) or not isinstance(label, int)):
            raise InputError(f"label {position} is {label!r}, expected the name of a class, or its index")
    return [str(label) for label in labels]


def _kind(item: Any) -> Kind:
    if _is_picture(item) or _is_array(item):
        return "image"
    named = isinstance(item, str | Path) and Path(item).suffix.lower() in IMAGE_SUFFIXES
    return "image" if named and (isinstance(item, Path) or Path(item).is_file()) else "text"


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert") and hasattr(value, "tobytes")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "OU"


# -- reading ----------------------------------------------------------------------------------------------------------


def _loader(items: Sequence[Any], kind: Kind) -> Any:
    def load(positions: Sequence[int]) -> Iterator[Any]:
        return (_read(items[position], kind) for position in positions)

    return load


def _read(value: Any, kind: Kind) -> Any:
    """Returns one input as models take it, or an `Unreadable`."""
    if kind == "text":
        return _read_text(value) if isinstance(value, Path) else value
    if isinstance(value, str | Path):
        return read_picture(Path(value), str(value))
    try:
        return to_rgb(pillow().fromarray(np.ascontiguousarray(value)) if _is_array(value) else value, pillow())
    except ValueError as error:
        return Unreadable("a picture in memory", str(error))


def _check(value: Any, kind: Kind, position: int) -> None:
    """Refuses what is no input of this kind."""
    if kind == "image" and _is_array(value):
        colours = value.shape[2] in (3, 4) if value.ndim == 3 else value.ndim == 2
        if value.dtype != np.uint8 or not colours or not value.size:
            raise InputError(
                f"input {position} is an array {list(value.shape)} of {value.dtype}, expected [height, width, 3] of "
                "uint8, from 0 to 255"
            )
    elif not isinstance(value, str | Path) and (kind == "text" or not _is_picture(value)):
        raise InputError(f"input {position} is a {type(value).__name__}, expected {WANTED[kind]}")


def _read_text(path: Path) -> str | Unreadable:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return Unreadable(str(path), str(error))


def _content(item: Any) -> Iterator[bytes]:
    """Yields what makes an input this one and no other."""
    if isinstance(item, str | Path):
        yield f"{type(item).__name__} {item}".encode("utf-8", "surrogatepass")
        if isinstance(item, Path) or Path(item).suffix.lower() in IMAGE_SUFFIXES:
            try:
                status = Path(item).stat()
            except OSError:
                return
            yield f"{Path(item).resolve()} {status.st_size} {status.st_mtime_ns}".encode("utf-8", "surrogateescape")
    else:
        size = item.shape if _is_array(item) else (item.size, item.mode)
        yield repr(size).encode()
        yield item.tobytes()
