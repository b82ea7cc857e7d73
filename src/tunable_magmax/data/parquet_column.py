"""The inputs of parquet files: a column read by row groups, kept undecoded, decoded when asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from tunable_magmax.data.decoding import in_order, threads_for
from tunable_magmax.data.pictures import read_picture
from tunable_magmax.data.samples import Unreadable

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
        """The inputs at ascending positions; no other is decoded."""
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
    """Bytes of a column's parts in a row group, decompressed."""
    chunks = (group.column(k) for k in range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema == column or chunk.path_in_schema.startswith(f"{column}.")
    )


def _values(table: Any) -> Any:
    """The only column of a table or batch; of a column of structs, its only field."""
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
