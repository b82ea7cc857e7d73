"""Opens samples and labels of any format, and finds the splits that a folder or file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunable_magmax.data.images import open_image_folder
from tunable_magmax.data.memory import as_samples
from tunable_magmax.data.samples import Samples, joined, with_names
from tunable_magmax.data.tables import DATA_SUFFIXES, Table, json_splits, read_table
from tunable_magmax.errors import InputError, closest, some_of

TRAIN = "train"
TEST_NAMES = ("test", "val", "validation")
"""What the test samples may be called; the first that is there is used."""


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
