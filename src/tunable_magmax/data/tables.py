"""Reads tables of samples: CSV, JSON, lines of text, and parquet of texts or pictures."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

from tunable_magmax.data.columns import LABEL_COLUMNS, TEXT_COLUMNS, find_column, require_column, shown
from tunable_magmax.data.images import in_order, read_picture, threads_for
from tunable_magmax.data.samples import Samples, Unreadable, text_samples
from tunable_magmax.errors import InputError, shortened
from tunable_magmax.files import load_json, parse_json

DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}
TABLE_SUFFIXES = frozenset({".txt", ".csv", ".tsv", ".jsonl", ".ndjson"})
"""Tables that are text files, one sample a line."""
DATA_SUFFIXES = TABLE_SUFFIXES | {".parquet", ".json"}
NEEDS_PYARROW = 'tables need pyarrow: pip install "tunable-magmax[train]"'


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one or several files, read when they are asked for.

    `columns`: those that may hold labels, `texts` and `pictures`: those that may hold inputs. `cells` reads a whole
    column; `load`, of parquet, inputs by their positions. `names`: the class names behind a column's numbers.
    """

    origin: str
    size: int
    columns: tuple[str, ...]
    texts: tuple[str, ...]
    cells: Callable[[str], list[Any]]
    pictures: tuple[str, ...] = ()
    load: Callable[[str], Callable[[Sequence[int]], Iterator[Any]]] | None = None
    names: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of_columns(cls, origin: str, columns: Mapping[str, list[Any]]) -> Table:
        """Makes a table of columns in memory."""
        size = max(map(len, columns.values()), default=0)
        return cls(origin, size, tuple(columns), tuple(columns), columns.__getitem__)

    def samples(self, text_column: str | None, label_column: str | None) -> Samples:
        """Returns the inputs, with labels if there is a column of them."""
        if self.pictures and text_column is None:
            column = self.pictures[0]
        elif text_column is not None:
            column = require_column(self.texts, text_column, "--text-column", self.origin)
        else:
            column = find_column(self.texts, TEXT_COLUMNS) or self._only_text()
        if self.load is None:
            samples = text_samples(self.origin, self.strings(column))
        else:
            kind = "image" if column in self.pictures else "text"
            samples = Samples(self.origin, kind, self.size, self.load(column))  # type: ignore[arg-type]
        label = self.label_column(label_column, [name for name in self.columns if name != column])
        return samples if label is None else self._labelled(samples, label)

    def labels(self, label_column: str | None) -> list[str]:
        """Returns the labels: those of the label column, or of the only column."""
        column = self.label_column(label_column, self.columns)
        if column is None and self.pictures:
            raise InputError(f"{self.origin} holds inputs without labels; --inputs takes them")
        if column is None and len(self.columns) != 1:
            raise InputError(f"{self.origin}: which column holds the labels? Name one of {shown(self.columns)}")
        labelled = self._labelled(text_samples(self.origin, [""] * self.size), column or self.columns[0])
        assert labelled.labels is not None
        return [labelled.classes[label] for label in labelled.labels]

    def label_column(self, asked: str | None, among: Sequence[str]) -> str | None:
        """Returns the column that is asked for, else that with a usual name, else the only one with class names."""
        if asked is not None:
            return require_column(among, asked, "--label-column", self.origin)
        named = [name for name in among if name in self.names]
        return find_column(among, LABEL_COLUMNS) or (named[0] if len(named) == 1 else None)

    def strings(self, column: str) -> list[str]:
        """Returns a column as texts; a cell that is neither a text nor a whole number, or is empty, is refused."""
        values = self.cells(column)
        for k, value in enumerate(values):
            if type(value) not in (str, int) or not str(value).strip():
                raise InputError(
                    f"{self.origin}: sample {k + 1} has no {column!r} (found {shortened(repr(value))}, expected a text "
                    "or a whole number); every row needs one"
                )
        return list(map(str, values))

    def _labelled(self, samples: Samples, column: str) -> Samples:
        names = self.names.get(column)
        if names is None:
            return samples.labelled([text.strip() for text in self.strings(column)])
        values = self.cells(column)
        wrong = next((k for k, value in enumerate(values) if value not in range(len(names))), None)
        if wrong is not None:
            raise InputError(
                f"{self.origin}: sample {wrong + 1} has {values[wrong]!r} as {column!r}, expected 0 to "
                f"{len(names) - 1}: there are {len(names)} class names"
            )
        return Samples(samples.origin, samples.kind, samples.size, samples.load, tuple(names), tuple(values))

    def _only_text(self) -> str:
        if self.load is not None and len(self.texts) == 1:
            return self.texts[0]
        raise InputError(
            f"{self.origin}: no column of texts among {shown(self.texts) or 'its columns'}: call it 'text' in the "
            "first line, or name it with --text-column (in run.yaml: text_column)"
        )


def read_table(files: Sequence[Path], origin: str, split: str | None = None) -> Table:
    """Reads a table; several parquet files are one table. `split`: of a JSON file with splits."""
    suffix = files[0].suffix.lower()
    if suffix == ".parquet":
        table = _parquet(files, origin)
    elif suffix == ".json":
        table = _json(files[0], origin, split)
    elif suffix in DELIMITERS:
        table = Table.of_columns(origin, _delimited(files[0], DELIMITERS[suffix]))
    else:
        table = _lines(files[0], origin, suffix)
    if not table.size:
        raise InputError(f"{origin}: holds no samples; give at least one")
    return table


# -- text files -------------------------------------------------------------------------------------------------------


def _delimited(path: Path, delimiters: str) -> dict[str, list[Any]]:
    """Reads delimited lines; the first of the delimiters that the first line holds is that of all lines."""
    try:
        import pyarrow
        from pyarrow import csv
    except ImportError:
        raise InputError(NEEDS_PYARROW) from None
    try:
        with path.open("rb") as file:
            first = file.readline().decode(errors="replace")
        delimiter = next((each for each in delimiters if each in first), delimiters[0])
        options = {
            # A cell may be as long as the file.
            "read_options": csv.ReadOptions(block_size=max(1, path.stat().st_size)),
            "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        }
        names = csv.open_csv(path, **options).schema.names
        texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False)
        table = csv.read_csv(path, convert_options=texts, **options)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{path}: not a table in UTF-8 with a line of column names ({shortened(str(error), 200)}); a cell that "
            'holds the delimiter needs quotes: "..."'
        ) from None
    names = [name.strip() for name in names]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise InputError(f"{path}: several columns are called {shown(sorted(repeated))}; give them other names")
    return dict(zip(names, (column.to_pylist() for column in table.columns), strict=True))


def _lines(path: Path, origin: str, suffix: str) -> Table:
    """Reads a text a line, or a JSON object a line."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error}): save it as UTF-8") from None
    # Not splitlines: a text may hold characters that Python takes for the end of a line, such as U+2028.
    lines = [(k, line.strip()) for k, line in enumerate(content.split("\n"), 1) if line.strip()]
    if suffix == ".txt":
        return Table.of_columns(origin, {"text": [line for _, line in lines]})
    rows = []
    for k, line in lines:
        try:
            rows.append((f"line {k}", parse_json(line)))
        except ValueError as error:
            raise InputError(f"{path}: line {k} is not JSON ({error})") from None
    return _objects(origin, rows)


def _objects(origin: str, rows: Sequence[tuple[str, Any]]) -> Table:
    """Makes a table of JSON objects; an error says where one is none."""
    for where, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{origin}: {where} is not a JSON object with columns such as 'text' and 'label'")
    columns = dict.fromkeys(chain.from_iterable(row for _, row in rows))
    return Table.of_columns(origin, {name: [row.get(name) for _, row in rows] for name in columns})


def json_splits(path: Path) -> dict[str, list[Any]]:
    """Returns the lists of a JSON object by name, such as CLINC150's; none if the file holds one list."""
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if isinstance(content, list):
        return {}
    if not isinstance(content, dict) or not all(isinstance(rows, list) for rows in content.values()):
        raise InputError(
            f"{path}: expected a JSON list of objects, or a JSON object from splits to lists of [text, label] pairs"
        )
    return content


def _json(path: Path, origin: str, split: str | None) -> Table:
    """Reads a list of objects, or of [text, label] pairs in a split."""
    if split is None:
        return _objects(origin, [(f"item {k}", row) for k, row in enumerate(load_json(path), 1)])
    rows = json_splits(path)[split]
    for k, row in enumerate(rows, 1):
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(part, str) and part for part in row):
            raise InputError(f"{origin}: sample {k} is {shortened(repr(row))}, expected [text, label]")
    return Table.of_columns(origin, {"text": [row[0] for row in rows], "label": [row[1] for row in rows]})


# -- parquet ----------------------------------------------------------------------------------------------------------

_STRING = r"(large_)?string(_view)?"
_STRINGS = rf"{_STRING}|dictionary<values={_STRING},.*"
_PICTURES = r"(large_)?binary|struct<bytes: binary.*"
KEPT_BYTES = 1 << 30
"""Files of at most so many bytes, uncompressed, are read once and kept: 20 tasks ask 20 times for parts of them."""


def _parquet(files: Sequence[Path], origin: str) -> Table:
    """Opens parquet files, which must have the same columns."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(NEEDS_PYARROW) from None
    opened = []
    for file in files:
        with _damage(file):
            opened.append(ParquetFile(file))
        if opened[-1].schema_arrow.names != opened[0].schema_arrow.names:
            raise InputError(f"{file} has other columns than {files[0]}: {', '.join(opened[-1].schema_arrow.names)}")
    schema = opened[0].schema_arrow
    types = {name: str(schema.field(name).type) for name in schema.names}

    def cells(column: str) -> list[Any]:
        with _damage(origin):
            return list(chain.from_iterable(file.read(columns=[column]).column(column).to_pylist() for file in opened))

    def load(column: str) -> Callable[[Sequence[int]], Iterator[Any]]:
        # Of {bytes, path} only the bytes are read.
        part = f"{column}.bytes" if types[column].startswith("struct") else column
        return _Column([(file, path.name) for file, path in zip(opened, files, strict=True)], part).load

    return Table(
        origin,
        sum(file.metadata.num_rows for file in opened),
        tuple(name for name, kind in types.items() if re.fullmatch(rf"u?int\d+|{_STRINGS}", kind)),
        tuple(name for name, kind in types.items() if re.fullmatch(_STRINGS, kind)),
        cells,
        tuple(name for name, kind in types.items() if re.fullmatch(_PICTURES, kind)),
        load,
        _class_names(schema),
    )


@contextmanager
def _damage(path: Path | str) -> Iterator[None]:
    """Turns what pyarrow raises for damaged files into an `InputError`."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a readable parquet file ({error})") from None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Returns the class names of columns, which the Hugging Face metadata have."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        named = {name: feature.get("names") for name, feature in features.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: list(map(str, names)) for name, names in named.items() if isinstance(names, list)}


class _Column:
    """Reads pictures or texts in one column of several parquet files, a row group at a time."""

    def __init__(self, files: Sequence[tuple[Any, str]], column: str) -> None:
        self._column = column
        self._groups = [(file, name, g) for file, name in files for g in range(file.num_row_groups)]
        about = [file.metadata.row_group(g) for file, _, g in self._groups]
        self._starts = list(accumulate((group.num_rows for group in about), initial=0))
        size = sum(group.total_byte_size for group in about)
        self._threads = threads_for(size / max(1, self._starts[-1]))
        self._values = lru_cache(None if size <= KEPT_BYTES else 1)(self._read)

    def load(self, positions: Sequence[int]) -> Iterator[Any]:
        """Yields the inputs at ascending positions; no other is decoded."""
        return in_order(lambda pair: _decoded(*pair), self._encoded(positions), self._threads)

    def _encoded(self, positions: Iterable[int]) -> Iterator[tuple[Any, str]]:
        for number, group in groupby(positions, lambda position: bisect_right(self._starts, position) - 1):
            values, name = self._values(number), self._groups[number][1]
            for position in group:
                yield values[position - self._starts[number]].as_py(), f"{name}, row {position}"

    def _read(self, number: int) -> Any:
        import pyarrow

        file, name, group = self._groups[number]
        with _damage(name):
            values = file.read_row_group(group, columns=[self._column]).column(0).combine_chunks()
        # Flattening carries the structs' own nulls over to the field.
        return values.flatten()[0] if pyarrow.types.is_struct(values.type) else values


def _decoded(value: Any, name: str) -> Any:
    if isinstance(value, bytes):
        return read_picture(value, name)
    return value if isinstance(value, str) else Unreadable(name, "empty")
