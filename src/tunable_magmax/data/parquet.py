"""Opens parquet files as Hugging Face writes them: images or texts, labels, and class names in the metadata."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from tunable_magmax.data.images import in_order, read_picture, threads_for
from tunable_magmax.data.samples import Kind, Samples, Unreadable
from tunable_magmax.data.tables import LABEL_COLUMNS, TEXT_COLUMNS, indexed, require_column
from tunable_magmax.errors import InputError
from tunable_magmax.files import parse_json


def open_parquet(
    path: Path,
    split: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    domain_column: str | None = None,
) -> Samples:
    """Opens one file, or those of a folder whose names start with `split`, in sorted order."""
    files = _files(path, split)
    opened = _open(files)
    schema = opened[0].schema_arrow
    features = _features(schema)
    types = {name: str(schema.field(name).type) for name in schema.names}
    images = [name for name in types if _is_image(types[name], features.get(name))]
    kind: Kind = "image" if images and text_column is None else "text"
    if kind == "image":
        column = images[0]
    else:
        texts = [name for name in types if types[name] == "string"]
        column = require_column(path, texts, text_column, TEXT_COLUMNS, "text_column")
    size = sum(file.metadata.num_rows for file in opened)
    if not size:
        raise InputError(f"{path}: holds no samples")
    load = Column(opened, [file.name for file in files], column).load
    samples = Samples(str(path), kind, size, load)

    def categories(chosen: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        values = [value for file in opened for value in file.read(columns=[chosen]).column(chosen).to_pylist()]
        return _labels(path, values, features.get(chosen, {}).get("names"), chosen)

    others = [name for name in types if name != column and re.fullmatch(r"u?int\d+|string", types[name])]
    named = [name for name in others if features.get(name, {}).get("names")]
    known = [name for name in others if name in LABEL_COLUMNS]
    if label_column is not None or known or named:
        candidates = others if label_column is not None or known else named
        label = require_column(path, candidates, label_column, LABEL_COLUMNS, "label_column")
        classes, labels = categories(label)
        samples = replace(samples, classes=classes, labels=labels)
    if domain_column is not None:
        names, indices = categories(require_column(path, others, domain_column, (), "domain_column"))
        samples = replace(samples, domains=tuple(names[index] for index in indices))
    return samples


def _open(files: Sequence[Path]) -> list[Any]:
    """Opens files, which must have the same columns."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError('parquet files need pyarrow: pip install "tunable-magmax[train]"') from None
    opened = []
    for file in files:
        try:
            opened.append(parquet.ParquetFile(file))
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"{file}: not a readable parquet file ({error})") from None
        names = opened[-1].schema_arrow.names
        if names != opened[0].schema_arrow.names:
            raise InputError(f"{file} has other columns than {files[0]}: {', '.join(names)}")
    return opened


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.parquet"))
    chosen = [file for file in files if split is None or file.name.startswith(split)]
    if not chosen:
        raise InputError(f"{path}: no parquet file starts with {split!r}; found {', '.join(f.name for f in files)}")
    splits = sorted({file.name.split("-")[0] for file in chosen})
    if split is None and len(splits) > 1:
        raise InputError(f"{path} holds several splits ({', '.join(splits)}): choose one with --split")
    return chosen


def _features(schema: Any) -> dict[str, Any]:
    """Returns what the Hugging Face metadata says of each column."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _is_image(kind: str, feature: dict[str, Any] | None) -> bool:
    if feature is not None and feature.get("_type") == "Image":
        return True
    return kind in ("binary", "large_binary") or kind.startswith("struct<bytes: binary")


def _labels(path: Path, values: list[Any], names: Any, column: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if any(value is None for value in values):
        raise InputError(f"{path}: {values.count(None)} samples have no {column!r}; every sample needs one")
    if not isinstance(names, list):
        return indexed([str(value) for value in values])
    outside = sorted({value for value in values if not 0 <= value < len(names)})
    if outside:
        raise InputError(f"{path}: {column!r} holds {outside[0]}, but there are {len(names)} class names")
    return tuple(map(str, names)), tuple(values)


KEPT_BYTES = 1 << 30
"""Files of at most so many bytes, uncompressed, are read once and kept: 20 tasks ask 20 times for parts of them."""
BATCH_ROWS = 512


class Column:
    """Images or texts in one column of several open parquet files."""

    def __init__(self, opened: Sequence[Any], names: Sequence[str], column: str) -> None:
        held = opened[0].schema_arrow.field(column).type
        # Of {bytes, path} only the bytes are read.
        self._columns = [f"{column}.bytes" if str(held).startswith("struct") else column]
        self._groups = [
            (file, name, g) for file, name in zip(opened, names, strict=True) for g in range(file.num_row_groups)
        ]
        about = [file.metadata.row_group(g) for file, _, g in self._groups]
        self._starts = list(accumulate((group.num_rows for group in about), initial=0))
        self._bytes = sum(group.total_byte_size for group in about)
        self._kept: dict[int, list[Any]] = {}

    def load(self, positions: Sequence[int]) -> Iterator[Any]:
        """Yields the inputs at ascending positions; no other is decoded."""
        threads = threads_for(self._bytes / max(1, self._starts[-1]))
        return in_order(lambda pair: _input(*pair), self._encoded(positions), threads)

    def _encoded(self, positions: Sequence[int]) -> Iterator[tuple[Any, str]]:
        for number, group in groupby(positions, lambda position: bisect_right(self._starts, position) - 1):
            wanted = list(group)
            rows = self._rows(number, [position - self._starts[number] for position in wanted])
            for position, value in zip(wanted, rows, strict=True):
                yield value, f"{self._groups[number][1]}, row {position}"

    def _rows(self, number: int, rows: Sequence[int]) -> Iterator[Any]:
        """Yields the values in ascending rows of a row group."""
        start, waiting = 0, deque(rows)
        for values in self._batches(number):
            while waiting and waiting[0] < start + len(values):
                yield values[waiting.popleft() - start].as_py()
            if not waiting:
                return
            start += len(values)

    def _batches(self, number: int) -> Iterable[Any]:
        file, _, group = self._groups[number]
        if self._bytes > KEPT_BYTES:  # a few rows at a time, and nothing is left behind
            return map(_values, file.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._columns))
        if number not in self._kept:
            self._kept[number] = [_values(file.read_row_group(group, columns=self._columns))]
        return self._kept[number]


def _values(table: Any) -> Any:
    """Returns the only column of a table or batch; of a column of structs, its only field."""
    import pyarrow

    values = table.column(0)
    if not pyarrow.types.is_struct(values.type):
        return values
    # Flattening carries the structs' own nulls over to the field.
    return values.flatten()[0]


def _input(value: Any, name: str) -> Any:
    if isinstance(value, bytes):
        return read_picture(value, name)
    return value if isinstance(value, str) else Unreadable(name, "empty")
