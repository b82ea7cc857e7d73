"""Opens samples of any kind: files and folders with their splits, and what a caller holds in memory.

In memory they are lists, arrays, columns and frames of pandas, data sets of torch and of Hugging Face; their inputs are
read when they are asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tunable_magmax.data.images import IMAGE_SUFFIXES, open_image_folder, pillow, read_picture, to_rgb
from tunable_magmax.data.samples import Kind, Samples, Unreadable, joined, text_samples, with_names
from tunable_magmax.data.tables import (
    DATA_SUFFIXES,
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    TEXT_COLUMNS,
    Table,
    find_column,
    json_splits,
    read_table,
)
from tunable_magmax.errors import InputError, closest, plural, some_of

TRAIN = "train"
TEST_NAMES = ("test", "val", "validation")
"""What the test samples may be called; the first that is there is used."""
SamplesLike: TypeAlias = "str | os.PathLike[str] | Iterable[Any]"
"""What a caller of the Python API may give for samples: a path, or the samples themselves."""
EXPECTED = {
    "image": "a PIL image, an array [height, width, 3] of uint8, or the path of an image file",
    "text": "a text",
}
LABELLED = (
    "pairs of an input and its label, or rows with a label and one of 'text', 'image', 'input_ids' and 'pixel_values'"
)
SampleSource: TypeAlias = Path | Samples
"""Where samples come from."""


def open_samples(
    path: str | Path | Samples,
    split: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    *,
    labels_alone: bool = False,
) -> Samples:
    """Opens a folder of images or of class folders, a table of texts, or parquet (a file, or a folder of them).

    With `labels_alone` a table needs no inputs.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "site.csv")
    ...     _ = file.write_text("text,label\\nhello there,greeting\\nbye,parting\\n")
    ...     samples = open_samples(file)
    >>> samples.kind, samples.classes, samples.labels, list(samples.load([1]))
    ('text', ('greeting', 'parting'), (0, 1), ['bye'])
    """
    opened = path if isinstance(path, Samples) else _open(Path(path), split)
    if isinstance(opened, Samples):
        return opened
    parts = [table.samples(text_column, label_column, labels_alone) for table in opened]
    return joined(parts, str(path) if split is None else f"{path} ({split})") if len(parts) > 1 else parts[0]


def open_labels(path: str | Path | Samples, split: str | None = None, label_column: str | None = None) -> list[str]:
    """Reads labels, names or numbers as the file holds them: of a table, or of class folders."""
    return open_samples(path, split, None, label_column, labels_alone=True).label_names()


def open_labelled(data: Any, names: Mapping[int, str], processor: Any = None) -> Samples:
    """Opens labelled samples as training loops have them: a path, or what `as_samples` takes.

    `names`: the classes that numbers stand for. `processor`: what made the tokens or pixel values of the data.
    """
    source = as_samples(data, "labelled", names, processor)
    if isinstance(source, Samples):
        return source
    samples = open_samples(source)
    samples.require_labels()
    return with_names(samples, [*names.values()]) if names else samples


def find_splits(path: Path) -> dict[str, list[Path]]:
    """Returns the files or folders of each split that a place holds; none if it is one whole.

    A JSON file has the splits of its object; a folder has the tables whose names begin with train, test, val or
    validation (train.csv, test-00000-of-00001.parquet), or the folders of these names, or all its parquet files.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist: give a folder of images, a table of texts or a parquet file")
    if path.is_file():
        return {name: [path] for name in (json_splits(path) if path.suffix.lower() == ".json" else ())}
    known = (TRAIN, *TEST_NAMES)
    items = sorted(item for item in path.iterdir() if not item.name.startswith("."))
    tables = [item for item in items if item.is_file() and item.suffix.lower() in DATA_SUFFIXES - {".txt"}]
    found = {name: [file for file in tables if re.split("[.-]", file.name)[0] == name] for name in known}
    if any(found.values()):
        return {name: files for name, files in found.items() if files}
    parquet = [file for file in tables if file.suffix.lower() == ".parquet"]
    if parquet:
        return {"all": parquet}
    folders = [item for item in items if item.is_dir()]
    splits = {item.name: [item] for item in folders if item.name in known}
    # Beside other folders, a class may be called train.
    return splits if TRAIN in splits and (len(splits) > 1 or len(folders) == 1) else {}


def _open(path: Path, split: str | None) -> list[Table] | Samples:
    """Opens a folder of images, or the tables of a split: one, or several of parquet."""
    if path.is_file() and path.suffix.lower() not in DATA_SUFFIXES:
        known = ", ".join(sorted(DATA_SUFFIXES))
        raise InputError(f"{path}: unknown kind of data; expected a folder of images or one of {known}")
    splits = find_splits(path)
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split is None and splits:
        raise InputError(f"{path} holds several splits ({', '.join(splits)}): choose one with --split")
    if split is not None and split not in splits:
        held = f"it has {some_of(splits)}" if splits else "it has none; leave --split out"
        raise InputError(f"{path}: no split {split!r}{closest(split, list(splits))}: {held}")
    files = [path] if split is None else splits[split]
    if files[0].is_dir():
        return open_image_folder(files[0])
    if len(files) == 1:
        origin = str(path) if split is None else f"{path} ({split})"
        return [read_table(files[0], origin, split if path.is_file() else None)]
    if files[0].suffix.lower() != ".parquet":
        raise InputError(f"{path}: which one, {' or '.join(file.name for file in files)}? Keep one")
    return [read_table(file, str(file)) for file in files]


# -- in memory ---------------------------------------------------------------------------------------------------------


def as_samples(
    value: SamplesLike | Samples, role: str = "labelled", names: Mapping[int, str] | None = None, processor: Any = None
) -> SampleSource:
    """Returns what a caller gives as samples; a text or path alone is the path of a file or folder.

    As `inputs`, texts that are paths of image files are images; `labels` are class names or indices; `labelled` are
    pairs of an input and its label, or rows of a data set. `names`: the classes that numbers stand for. `processor`:
    the tokenizer, which decodes rows of tokens alone, or the image processor, whose normalisation of pixel values is
    undone.

    >>> as_samples(["where is my card?", "what do I owe?"], "inputs").name
    '2 texts in memory'
    >>> as_samples(["cat", "dog", "cat"], "labels").labels
    (0, 1, 0)
    >>> samples = as_samples(zip(["hello", "bye"], ["greeting", "parting"]))
    >>> samples.name, samples.classes, samples.labels
    ('2 labelled texts in memory', ('greeting', 'parting'), (0, 1))
    """
    if isinstance(value, str | os.PathLike):
        return Path(value)
    if isinstance(value, Samples):
        return value
    rows = rows_of(value)
    if not len(rows):
        raise InputError(f"samples are an empty {type(value).__name__}: give at least one")
    if role == "labels":
        labels = [_label(label, k, {}) for k, label in enumerate(rows, 1)]
        return text_samples(f"{plural(len(labels), 'label')} in memory", [""] * len(labels), labels)
    return memory_samples(rows, None, None if role == "inputs" else _row_labels(rows), names or {}, processor)


def memory_samples(
    rows: Sequence[Any],
    kind: Kind | None = None,
    labels: Iterable[Any] | None = None,
    names: Mapping[int, str] = {},
    processor: Any = None,
) -> Samples:
    """Makes samples of inputs of one kind, by default that of the first; with labels, rows may be pairs."""

    def value(position: int) -> Any:
        row = rows[position]
        is_pair = labels is not None and isinstance(row, tuple | list) and len(row) == 2
        return _input(row[0] if is_pair else row, processor)

    sort = kind or _kind(value(0))

    def load(positions: Sequence[int]) -> Iterator[Any]:
        return (_read(value(position), sort, position + 1, processor) for position in positions)

    if len(rows):
        next(load([0]))  # so that data of the wrong kind are refused at once
    if labels is None:
        return Samples(f"{plural(len(rows), sort)} in memory", sort, len(rows), load)
    samples = Samples(f"{plural(len(rows), f'labelled {sort}')} in memory", sort, len(rows), load)
    return samples.labelled([_label(label, k, names) for k, label in enumerate(labels, 1)])


def is_one_input(value: Any) -> bool:
    """Says whether a value is a single input, not several of them."""
    pixels = isinstance(value, np.ndarray) and value.dtype.kind not in "OU" and value.ndim in (2, 3)
    return isinstance(value, str | os.PathLike) or _is_picture(value) or pixels


def class_names_of(data: Any) -> tuple[str, ...]:
    """Returns the names of a data set's class indices: those of a ClassLabel, or `classes`; none if it has none."""
    features = getattr(data, "features", None)
    features = features if isinstance(features, Mapping) else {}
    column = find_column(features, LABEL_COLUMNS)
    named = getattr(data, "classes", None) if column is None else getattr(features[column], "names", None)
    if named is None and hasattr(data, "dataset"):  # a part of another data set
        return class_names_of(data.dataset)
    return tuple(map(str, named or ()))


# -- rows, and what is in them ----------------------------------------------------------------------------------------


def rows_of(data: Any) -> Sequence[Any]:
    """Returns what has a length and positions: the data as it comes, before any transform of Hugging Face."""
    if hasattr(data, "columns") and hasattr(data, "to_dict"):  # a frame of pandas, which iterates over its columns
        data = data.to_dict("records")
    elif hasattr(data, "with_format") and find_column(
        getattr(data, "features", None) or (), (*TEXT_COLUMNS, *IMAGE_COLUMNS)
    ):
        data = data.with_format(None)
    positions = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not hasattr(data, "iloc")
    if is_one_input(data) or isinstance(data, Mapping) or not (positions or isinstance(data, Iterable)):
        raise InputError(f"samples are a {type(data).__name__}: give a list of them, or the path of a file or folder")
    return data if positions else list(data)


def _row_labels(rows: Any) -> Iterable[Any]:
    """Returns the label of each row; whole columns are read without the inputs beside them."""
    column = find_column(getattr(rows, "column_names", None) or (), LABEL_COLUMNS)
    targets = rows[column] if column is not None else getattr(rows, "targets", None)
    if targets is not None and len(targets) == len(rows):
        return list(targets)
    return [_row_label(rows[k], k + 1) for k in range(len(rows))]


def _row_label(row: Any, position: int) -> Any:
    column = find_column(row, LABEL_COLUMNS) if isinstance(row, Mapping) else None
    if column is not None:
        return row[column]
    if isinstance(row, tuple | list) and len(row) == 2:
        return row[1]
    held = f"a row with {some_of(row, show=repr)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
    raise InputError(f"sample {position} is {held}: give {LABELLED}; zip(inputs, labels) makes pairs")


def _input(row: Any, processor: Any) -> Any:
    """Returns the input of a row; a row that is no mapping is the input."""
    if not isinstance(row, Mapping):
        return row
    column = find_column(row, IMAGE_COLUMNS) or find_column(row, TEXT_COLUMNS)
    if column is not None:
        return row[column]
    if "input_ids" in row and hasattr(processor, "decode"):
        return str(processor.decode(np.asarray(row["input_ids"]).tolist(), skip_special_tokens=True))
    raise InputError(f"the rows have the columns {some_of(row, show=repr)}, and no input: give {LABELLED}")


def _label(label: Any, position: int, names: Mapping[int, str]) -> str:
    """Returns the name of a class, by `names` that of an index."""
    label = label.item() if getattr(label, "ndim", None) == 0 else label
    if isinstance(label, str) and label.strip():
        return label
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        raise InputError(f"label {position} is {label!r}, expected the name of a class, or its index")
    return names.get(label, str(label))


# -- reading ----------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> Kind:
    named = isinstance(value, Path)
    if isinstance(value, str):
        named = Path(value).suffix.lower() in IMAGE_SUFFIXES and Path(value).is_file()
    return "image" if named or _is_picture(value) or hasattr(value, "shape") else "text"


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert") and hasattr(value, "tobytes")


def _read(value: Any, kind: Kind, position: int, processor: Any) -> Any:
    """Returns one input as models take it, or an `Unreadable`."""
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "image" and isinstance(value, str | Path):
        return read_picture(Path(value), str(value))
    if kind == "image" and hasattr(value, "shape"):
        value = pillow().fromarray(np.ascontiguousarray(_pixels(np.asarray(value), position, processor)))
    elif kind == "text" or not _is_picture(value):
        raise InputError(f"input {position} is a {type(value).__name__}, expected {EXPECTED[kind]}")
    try:
        return to_rgb(value)
    except ValueError as error:
        return Unreadable("a picture in memory", str(error))


def _pixels(values: Any, position: int, processor: Any) -> Any:
    """Returns the pixels [height, width, 3] of an array, or those that an image processor made its values of."""
    if values.dtype.kind == "f" and values.ndim == 3 and hasattr(processor, "image_mean"):
        scaled = values.transpose(1, 2, 0)
        if getattr(processor, "do_normalize", True):
            scaled = scaled * np.asarray(processor.image_std) + np.asarray(processor.image_mean)
        factor = processor.rescale_factor if getattr(processor, "do_rescale", True) else 1.0
        return (scaled / factor).round().clip(0, 255).astype(np.uint8)
    if values.ndim == 3 and values.shape[0] == 3 and values.shape[2] not in (3, 4):
        values = values.transpose(1, 2, 0)
    colours = values.shape[2] in (3, 4) if values.ndim == 3 else values.ndim == 2
    if values.dtype != np.uint8 or not colours or not values.size:
        raise InputError(
            f"input {position} is an array {list(values.shape)} of {values.dtype}, expected [height, width, 3] of "
            "uint8, from 0 to 255; of pixel values, also the image processor that made them (processing_class)"
        )
    return values
