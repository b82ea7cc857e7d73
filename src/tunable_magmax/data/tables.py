"""Reads tables of samples: CSV, JSON, lines of text, and parquet of texts or pictures."""

from __future__ import annotations

import csv
import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

from tunable_magmax.data.images import map_in_threads, read_picture, threads_for
from tunable_magmax.data.samples import Samples, Unreadable, quoted, text_samples
from tunable_magmax.errors import InputError, closest, plural, required, shortened
from tunable_magmax.files import load_json, parse_json

DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}
TABLE_SUFFIXES = frozenset({".txt", ".csv", ".tsv", ".jsonl", ".ndjson"})
"""Tables that are text files, one sample a line."""
DATA_SUFFIXES = TABLE_SUFFIXES | {".parquet", ".json"}
LINES = "lines"
"""The one column of a text file without column names: its lines are texts or labels."""
TEXT_COLUMNS = ("text", "sentence", "utterance", "query", "input", "content", LINES)
IMAGE_COLUMNS = ("image", "img", "picture", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "label_ids", "class", "intent", "category", "target", "fine_label", "label_text")


def find_column(columns: Iterable[str], usual: Sequence[str]) -> str | None:
    """Returns the first column with a usual name, whatever its case and the spaces around it; None if there is none.

    >>> find_column(["id", " Text "], TEXT_COLUMNS)
    ' Text '
    """
    known = {name.strip().lower(): name for name in reversed(list(columns))}
    return next((known[name] for name in usual if name in known), None)


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file.

    `columns`: those without pictures, which `cells` reads; `pictures` loads pictures by their positions, where there
    are any; `names`: the class names behind a column's numbers.
    """

    origin: str
    size: int
    columns: tuple[str, ...]
    cells: Callable[[str], list[Any]]
    pictures: Callable[[Sequence[int]], Iterator[Any]] | None = None
    names: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def in_memory(cls, origin: str, columns: Mapping[str, list[Any]]) -> Table:
        """Makes a table of whole columns."""
        return cls(origin, max(map(len, columns.values()), default=0), tuple(columns), columns.__getitem__)

    def samples(self, text_column: str | None, label_column: str | None, labels_alone: bool = False) -> Samples:
        """Returns the inputs, with labels if there is a column of them.

        With `labels_alone` no inputs are needed, and an only column holds the labels unless it is one of texts.
        """
        others = self.columns
        if labels_alone:
            samples = text_samples(self.origin, [""] * self.size)
        elif self.pictures and text_column is None:
            samples = Samples(self.origin, "image", self.size, self.pictures)
        else:
            column = self._find(others, "--text-column", text_column, TEXT_COLUMNS)
            if column is None:
                raise InputError(
                    f"{self.origin}: no column of texts among {quoted(self.columns)}: call it 'text' in the first "
                    "line, or name it with --text-column (in run.yaml: text_column)"
                )
            samples = text_samples(self.origin, self._strings(column))
            others = tuple(name for name in others if name != column)
        label = self._find(others, "--label-column", label_column, LABEL_COLUMNS)
        if label is None and labels_alone and not self.pictures and len(others) == 1:
            label = None if find_column(others, TEXT_COLUMNS[:-1]) else others[0]
        samples = replace(samples, columns=self.columns) if label is None else self._labelled(samples, label)
        if self.columns == (label,) and label in samples.classes:
            raise InputError(
                f"{self.origin}: its first line is {label!r}, which is a label as well; the first line of a table "
                "names its columns: put 'label' above it"
            )
        return samples

    def _find(self, among: Sequence[str], option: str, asked: str | None, usual: Sequence[str]) -> str | None:
        """Returns the column that was asked for, which must be there, or else one with a usual name."""
        if asked is None:
            return find_column(among, usual)
        if asked not in among:
            raise InputError(
                f"{self.origin}: {option} is {asked!r}{closest(asked, among)}; the columns are {quoted(self.columns)}"
            )
        return asked

    def _strings(self, column: str) -> list[str]:
        """Returns a column as texts; a cell that is neither a text nor a whole number, or is empty, is refused."""
        values = self.cells(column)
        for k, value in enumerate(values, 1):
            if type(value) not in (str, int) or not str(value).strip():
                raise InputError(
                    f"{self.origin}: sample {k} has {shortened(repr(value))} as {column!r}, expected a text or a whole "
                    "number: correct this row, or leave it out"
                )
        return list(map(str, values))

    def _labelled(self, samples: Samples, column: str) -> Samples:
        names = self.names.get(column)
        if names is None:
            return samples.labelled([text.strip() for text in self._strings(column)])
        values = self.cells(column)
        wrong = next((k for k, value in enumerate(values) if value not in range(len(names))), None)
        if wrong is not None:
            raise InputError(
                f"{self.origin}: sample {wrong + 1} has {values[wrong]!r} as {column!r}, expected 0 to "
                f"{len(names) - 1}: there are {len(names)} class names"
            )
        return replace(samples, classes=tuple(names), labels=tuple(values))


def read_table(path: Path, origin: str, split: str | None = None) -> Table:
    """Reads a table. `split`: of a JSON file with splits."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        table = _parquet(path, origin)
    elif suffix in DELIMITERS:
        table = Table.in_memory(origin, _delimited(path, DELIMITERS[suffix]))
    elif suffix == ".json":
        content = _read_json(path)
        table = _rows(origin, enumerate(content if split is None else content[split], 1), "item")
    else:
        # Not splitlines: a text may hold characters that Python takes for the end of a line, such as U+2028.
        lines = [(k, line.strip()) for k, line in enumerate(_text(path).split("\n"), 1) if line.strip()]
        if suffix == ".txt":
            table = Table.in_memory(origin, {LINES: [line for _, line in lines]})
        else:
            table = _rows(origin, ((k, _parsed(path, k, line)) for k, line in lines), "line")
    if not table.size:
        raise InputError(f"{origin}: holds no samples; give at least one")
    return table


# -- text files -------------------------------------------------------------------------------------------------------


def csv_rows(text: str, delimiter: str = ",") -> list[list[str]]:
    """Returns the rows of delimited text; a quoted cell may hold anything, and be as long as the text.

    >>> csv_rows('text,label\\n"pay, now",bill\\n')
    [['text', 'label'], ['pay, now', 'bill']]
    """
    usual = csv.field_size_limit(max(len(text), csv.field_size_limit()))
    try:
        return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    finally:
        csv.field_size_limit(usual)


def _delimited(path: Path, delimiters: str) -> dict[str, list[Any]]:
    """Reads delimited lines; the first of the delimiters that the first line holds is that of all lines."""
    text = _text(path)
    first = text.partition("\n")[0]
    delimiter = next((each for each in delimiters if each in first), delimiters[0])
    try:
        header, *rows = csv_rows(text, delimiter) or [[]]
    except csv.Error as error:
        raise InputError(
            f"{path}: not a table with a line of column names ({error}); a quote that opens a cell must also close it"
        ) from None
    names = [name.strip() for name in header]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise InputError(f"{path}: several columns are called {quoted(sorted(repeated))}; give them other names")
    for k, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise InputError(
                f"{path}: row {k} below the column names has {plural(len(row), 'cell')}, but there are "
                f"{plural(len(names), 'column')}: {shortened(delimiter.join(row), 200)}; a cell that holds the "
                'delimiter needs quotes: "..."'
            )
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # with the ends of lines as they are
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line} is not UTF-8 text ({error.reason}): save the file as UTF-8") from None


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        why = getattr(error, "msg", error)  # the line that it counts is the only one of its own text
        raise InputError(f"{path}: line {number} is not JSON ({why}): correct it, or leave it out") from None


def _rows(origin: str, rows: Iterable[tuple[int, Any]], what: str) -> Table:
    """Makes a table of objects with columns, or of pairs [text, label]; an error names their number."""
    found: list[dict[str, Any]] = []
    for number, row in rows:
        if isinstance(row, dict):
            found.append(row)
        elif isinstance(row, list) and len(row) == 2:
            found.append({"text": row[0], "label": row[1]})
        else:
            raise InputError(
                f"{origin}: {what} {number} is {shortened(repr(row))}, expected an object such as "
                '{"text": ..., "label": ...}, or [text, label]'
            )
    columns = dict.fromkeys(chain.from_iterable(found))
    return Table.in_memory(origin, {name: [row.get(name) for row in found] for name in columns})


def _read_json(path: Path) -> Any:
    """Returns the list that a JSON file holds, or an object of such lists, by split."""
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    lists = content.values() if isinstance(content, dict) else [content]
    if not all(isinstance(rows, list) for rows in lists):
        raise InputError(f"{path}: expected a JSON list of samples, or an object of such lists by split")
    return content


def json_splits(path: Path) -> list[str]:
    """Returns the splits of a JSON file, such as CLINC150's; none if it holds one list."""
    content = _read_json(path)
    return list(content) if isinstance(content, dict) else []


# -- parquet ----------------------------------------------------------------------------------------------------------

_PICTURES = r"(large_)?binary|struct<bytes: binary.*"


def _parquet(path: Path, origin: str) -> Table:
    """Opens a parquet file; pictures are read a row group at a time, other columns whole."""
    parquet = required("pyarrow.parquet")
    with _damage(path):
        file = parquet.ParquetFile(path)
    schema = file.schema_arrow
    pictures = [name for name in schema.names if re.fullmatch(_PICTURES, str(schema.field(name).type))]
    groups = [file.metadata.row_group(g) for g in range(file.num_row_groups)]
    starts = list(accumulate((group.num_rows for group in groups), initial=0))
    threads = threads_for(sum(group.total_byte_size for group in groups) / max(1, starts[-1]))

    def cells(column: str) -> list[Any]:
        with _damage(path):
            read: list[Any] = file.read(columns=[column]).column(column).to_pylist()
            return read

    def encoded(positions: Sequence[int]) -> Iterator[tuple[Any, int]]:
        for group, inside in groupby(positions, lambda position: bisect_right(starts, position) - 1):
            with _damage(path):
                values = file.read_row_group(group, columns=pictures[:1]).column(0)
            for position in inside:
                yield values[position - starts[group]].as_py(), position

    def decoded(cell: tuple[Any, int]) -> Any:
        value, name = cell[0], f"{path.name}, row {cell[1] + 1}"
        value = value["bytes"] if isinstance(value, dict) else value
        return Unreadable(name, "empty") if value is None else read_picture(value, name)

    def load(positions: Sequence[int]) -> Iterator[Any]:
        return map_in_threads(decoded, encoded(positions), threads)

    others = tuple(name for name in schema.names if name not in pictures)
    return Table(origin, starts[-1], others, cells, load if pictures else None, _class_names(schema))


@contextmanager
def _damage(path: Path | str) -> Iterator[None]:
    """Turns what pyarrow raises for damaged files into an `InputError`."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a readable parquet file ({error}): download or save it again") from None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Returns the class names of columns, which the Hugging Face metadata have."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        named = {name: feature.get("names") for name, feature in features.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: list(map(str, names)) for name, names in named.items() if isinstance(names, list)}
