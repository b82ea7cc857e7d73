"""Reads tables of texts and labels: CSV, JSON lines, or plain lines of text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tunable_magmax.data.samples import Samples, is_index
from tunable_magmax.errors import InputError, closest, shortened, some_of
from tunable_magmax.files import parse_json

TEXT_COLUMNS = ("text", "sentence", "utterance", "query", "input", "content")
LABEL_COLUMNS = ("label", "class", "intent", "category", "target", "fine_label", "label_text")
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}
TABLE_SUFFIXES = frozenset({".txt", ".csv", ".tsv", ".jsonl", ".ndjson"})


def open_table(
    path: Path, text_column: str | None = None, label_column: str | None = None, domain_column: str | None = None
) -> Samples:
    """Opens a table of texts, with labels where it has a column of them, and domains where their column is named."""
    rows = read_rows(path)
    columns = list(rows[0])
    text = choose_column(path, columns, text_column, TEXT_COLUMNS, "text_column")
    if text is None:
        where = " in its first line" if path.suffix.lower() in DELIMITERS else ""
        raise InputError(
            f"{path}: no column of texts among {_shown(columns)}{where}: call it 'text', or give text_column"
        )
    label = choose_column(path, columns, label_column, LABEL_COLUMNS, "label_column")
    domain = choose_column(path, columns, domain_column, (), "domain_column")
    labels = None if label is None else [name.strip() for name in _cells(path, rows, label)]
    samples = text_samples(str(path), _cells(path, rows, text), labels)
    return samples if domain is None else replace(samples, domains=tuple(_cells(path, rows, domain)))


def text_samples(origin: str, texts: Sequence[str], labels: Sequence[str] | None) -> Samples:
    """Makes `Samples` of texts and their labels; classes in sorted order, numbers by value."""

    def load(positions: Sequence[int]) -> Iterator[str]:
        return (texts[position] for position in positions)

    if labels is None:
        return Samples(origin, "text", len(texts), load)
    classes, indices = indexed(labels)
    return Samples(origin, "text", len(texts), load, classes, indices)


def indexed(labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the class names in sorted order (numbers by value), and each label's index.

    >>> indexed(["10", "9", "10"])
    (('9', '10'), (1, 0, 1))
    """
    names = set(labels)
    numeric = all(map(is_index, names))
    classes = sorted(names, key=lambda name: (int(name), name)) if numeric else sorted(names)
    place = {name: k for k, name in enumerate(classes)}
    return tuple(classes), tuple(place[label] for label in labels)


def read_labels(path: Path, label_column: str | None = None) -> list[str]:
    """Reads the labels of a table: its label column, or its only one. Plain text: one label a line."""
    rows = read_rows(path)
    column = require_column(path, list(rows[0]), label_column, LABEL_COLUMNS, "label_column")
    labels = [name.strip() for name in _cells(path, rows, column)]
    if column in labels and label_column is None and path.suffix.lower() in DELIMITERS:
        raise InputError(
            f"{path}: its first line is {column!r}, which is a label as well; the first line of a table names its "
            "columns: put 'label' above it"
        )
    return labels


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a table; a plain line of text is a row with the one column `text`."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error}): save it as UTF-8") from None
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        rows = _delimited(path, content, DELIMITERS[suffix])
    elif suffix in (".jsonl", ".ndjson"):
        rows = [_object(path, line, k) for k, line in enumerate(content.split("\n"), 1) if line.strip()]
    elif suffix == ".txt":
        rows = [{"text": line.strip()} for line in content.split("\n") if line.strip()]
    else:
        raise InputError(f"{path}: expected one of {', '.join(sorted(TABLE_SUFFIXES))}")
    if not rows:
        raise InputError(f"{path}: holds no samples; give at least one")
    return rows


def _delimited(path: Path, content: str, delimiters: str) -> list[dict[str, Any]]:
    """Reads delimited lines; the first of the delimiters that the first line holds is that of all lines."""
    first = content.partition("\n")[0]
    delimiter = next((each for each in delimiters if each in first), delimiters[0])
    # Not splitlines: a cell may hold characters that Python takes for the end of a line, such as U+2028.
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
    usual = csv.field_size_limit(max(len(content), csv.field_size_limit()))
    try:
        columns = [name.strip() for name in next(reader, [])]
        if repeated := {name for name in columns if name and columns.count(name) > 1}:
            raise InputError(f"{path}: several columns are called {_shown(sorted(repeated))}; give them other names")
        rows = []
        for cells in reader:
            while len(cells) > len(columns) and not cells[-1].strip():
                cells.pop()  # a delimiter at the end
            if len(cells) > len(columns):
                raise InputError(
                    f"{path}: line {reader.line_num} has {len(cells)} cells, and the first line names {len(columns)} "
                    f'columns; a cell that holds {delimiter!r} needs quotes: "..."'
                )
            if cells:
                rows.append(dict(zip_longest(columns, cells)))
        return rows
    except csv.Error as error:
        raise InputError(f"{path}: not a table, line {reader.line_num} ({error})") from None
    finally:
        csv.field_size_limit(usual)


def _shown(columns: Sequence[str]) -> str:
    return some_of(columns, 10, show=lambda name: shortened(repr(name)))


def _object(path: Path, line: str, number: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise InputError(f"{path}: line {number} is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}: line {number} is not a JSON object with columns such as 'text' and 'label'")
    return row


def choose_column(path: Path, columns: Sequence[str], asked: str | None, usual: Sequence[str], key: str) -> str | None:
    """Returns the column that was asked for under `key`, else the first of the usual ones that exists, or None."""
    if asked is not None and asked not in columns:
        raise InputError(f"{path}: {key} is {asked!r}{closest(asked, columns)}, found {', '.join(columns)}")
    known = {name.strip().lower(): name for name in reversed(columns)}
    return asked or next((known[name] for name in usual if name in known), None)


def require_column(path: Path, columns: Sequence[str], asked: str | None, usual: Sequence[str], key: str) -> str:
    """Like `choose_column`, but a column that is the only one is taken, and none is an error."""
    column = choose_column(path, columns, asked, usual, key) or (columns[0] if len(columns) == 1 else None)
    if column is None:
        raise InputError(f"{path}: which column? Give {key}, one of {', '.join(columns) or '(none fits)'}")
    return column


def _cells(path: Path, rows: Sequence[dict[str, Any]], column: str) -> list[str]:
    """Returns the values of a column as texts; refuses what is empty or neither a text nor a whole number."""
    values = [row.get(column) for row in rows]
    for k, value in enumerate(values, 1):
        if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
            raise InputError(
                f"{path}: sample {k} has no {column!r} (found {shortened(repr(value))}); every row needs one"
            )
    return list(map(str, values))
