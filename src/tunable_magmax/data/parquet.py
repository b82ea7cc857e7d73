"""Opens parquet files as Hugging Face writes them: images or texts, labels, and class names in the metadata."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from tunable_magmax.data.images import in_order, read_picture, threads_for
from tunable_magmax.data.samples import Kind, Samples, Unreadable
from tunable_magmax.data.tables import LABEL_COLUMNS, TEXT_COLUMNS, choose_column, indexed
from tunable_magmax.errors import InputError


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
        column = _required(path, texts, text_column, TEXT_COLUMNS, "text_column", "texts or images")
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
        label = _required(path, candidates, label_column, LABEL_COLUMNS, "label_column", "labels")
        classes, labels = categories(label)
        samples = replace(samples, classes=classes, labels=labels)
    if domain_column is not None:
        names, indices = categories(_required(path, others, domain_column, (), "domain_column", "domains"))
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
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _is_image(kind: str, feature: dict[str, Any] | None) -> bool:
    if feature is not None and feature.get("_type") == "Image":
        return True
    return kind in ("binary", "large_binary") or kind.startswith("struct<bytes: binary")


def _required(path: Path, columns: Sequence[str], asked: str | None, usual: Sequence[str], key: str, what: str) -> str:
    """Like `choose_column`, but a column that is the only one is taken, and none is an error."""
    column = choose_column(path, columns, asked, usual, key) or (columns[0] if len(columns) == 1 else None)
    if column is None:
        raise InputError(f"{path}: which column holds the {what}? Give {key}: {', '.join(columns) or 'none fits'}")
    return column


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
"""A column of at most so many bytes is read once and kept, since 20 tasks ask 20 times for parts of it."""
BATCH_ROWS = 512


@dataclass(frozen=True)
class _Group:
    """One row group: its file's place in the list, its place in the file, its rows, and its bytes in this column."""

    file: int
    index: int
    rows: int
    size: int


class Column:
    """Images or texts in one column of several open parquet files."""

    def __init__(self, opened: Sequence[Any], names: Sequence[str], column: str) -> None:
        self._opened = opened
        self._names = names
        self._groups = [
            _Group(f, g, file.metadata.row_group(g).num_rows, _stored(file.metadata.row_group(g), column))
            for f, file in enumerate(opened)
            for g in range(file.metadata.num_row_groups)
        ]
        self._starts = [0]
        for group in self._groups:
            self._starts.append(self._starts[-1] + group.rows)
        held = opened[0].schema_arrow.field(column).type
        # Of {bytes, path} only the bytes are read.
        self._column = f"{column}.bytes" if str(held).startswith("struct") else column
        self._bytes = sum(group.size for group in self._groups)
        self._kept: dict[int, Any] = {}
        self._lock = Lock()

    def load(self, positions: Sequence[int]) -> Iterator[Any]:
        """Yields the inputs at ascending positions; no other is decoded."""
        threads = threads_for(self._bytes / max(1, self._starts[-1]))
        return in_order(lambda pair: _input(*pair), self._encoded(positions), threads)

    def _encoded(self, positions: Sequence[int]) -> Iterator[tuple[Any, str]]:
        begin = 0
        while begin < len(positions):
            number = bisect_right(self._starts, positions[begin]) - 1
            first, last = self._starts[number], self._starts[number + 1]
            end = begin
            while end < len(positions) and first <= positions[end] < last:
                end += 1
            rows = [position - first for position in positions[begin:end]]
            name = self._names[self._groups[number].file]
            for position, value in zip(positions[begin:end], self._rows(number, rows), strict=True):
                yield value, f"{name}, row {position}"
            begin = end

    def _rows(self, number: int, rows: Sequence[int]) -> Iterator[Any]:
        if self._bytes <= KEPT_BYTES:
            values = self._whole(number)
            for row in rows:
                yield values[row].as_py()
            return
        # Too much to keep: a few rows at a time, and nothing is left behind.
        group = self._groups[number]
        start, waiting = 0, iter(rows)
        wanted = next(waiting, None)
        batches = self._opened[group.file].iter_batches(BATCH_ROWS, row_groups=[group.index], columns=[self._column])
        for batch in batches:
            values = _values(batch)
            while wanted is not None and wanted < start + len(values):
                yield values[wanted - start].as_py()
                wanted = next(waiting, None)
            if wanted is None:
                return
            start += len(values)

    def _whole(self, number: int) -> Any:
        group = self._groups[number]
        with self._lock:
            if number not in self._kept:
                file = self._opened[group.file]
                self._kept[number] = _values(file.read_row_group(group.index, columns=[self._column]))
            return self._kept[number]


def _stored(group: Any, column: str) -> int:
    """Returns the decompressed bytes of a column in a row group."""
    chunks = (group.column(k) for k in range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema == column or chunk.path_in_schema.startswith(f"{column}.")
    )


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
