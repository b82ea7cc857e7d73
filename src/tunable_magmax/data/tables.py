"""Rows of text and label: CSV, JSON lines, or plain lines of text."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError, closest

TEXT_COLUMNS = ("text", "sentence", "utterance", "query", "input", "content")
LABEL_COLUMNS = ("label", "class", "intent", "category", "target", "fine_label", "label_text")
SUFFIXES = frozenset({".txt", ".csv", ".tsv", ".jsonl", ".ndjson"})


def open_table(
    path: Path, text_column: str | None = None, label_column: str | None = None, domain_column: str | None = None
) -> Samples:
    """Texts of a table, with labels where it has a column of them, and domains where their column is named."""
    rows = read_rows(path)
    columns = list(rows[0])
    column = _column(path, columns, text_column, TEXT_COLUMNS, "--text-column")
    if column is None:
        raise InputError(
            f"{path}: no column of texts among {', '.join(columns)}; name it {TEXT_COLUMNS[0]!r}, or give --text-column"
        )
    texts = [_cell(path, rows, k, column) for k in range(len(rows))]
    label = _column(path, columns, label_column, LABEL_COLUMNS, "--label-column")
    domain = _column(path, columns, domain_column, (), "--domain-column")
    samples = text_samples(
        str(path), texts, None if label is None else [_cell(path, rows, k, label) for k in range(len(rows))]
    )
    if domain is None:
        return samples
    return replace(samples, domains=tuple(_cell(path, rows, k, domain) for k in range(len(rows))))


def text_samples(origin: str, texts: Sequence[str], labels: Sequence[str] | None) -> Samples:
    """Texts and their labels as `Samples`; classes in sorted order, numbers by value."""

    def load(positions: Sequence[int]) -> Iterator[str]:
        return (texts[position] for position in positions)

    if labels is None:
        return Samples(origin, "text", len(texts), load)
    classes, indices = indexed(labels)
    return Samples(origin, "text", len(texts), load, classes, indices)


def indexed(labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Class names in sorted order (numbers by value), and each label's index.

    >>> indexed(["10", "9", "10"])
    (('9', '10'), (1, 0, 1))
    """
    names = set(labels)
    numeric = all(name.isdigit() for name in names)
    classes = sorted(names, key=int) if numeric else sorted(names)
    place = {name: k for k, name in enumerate(classes)}
    return tuple(classes), tuple(place[label] for label in labels)


def read_labels(path: Path, label_column: str | None = None) -> list[str]:
    """The labels of a table: its label column, or its only one. Plain text: one label a line."""
    rows = read_rows(path)
    columns = list(rows[0])
    column = _column(path, columns, label_column, LABEL_COLUMNS, "--label-column")
    if column is None and len(columns) == 1:
        column = columns[0]
    if column is None:
        raise InputError(
            f"{path}: no column of labels among {', '.join(columns)}; name it {LABEL_COLUMNS[0]!r}, or give "
            "--label-column"
        )
    return [_cell(path, rows, k, column) for k in range(len(rows))]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; a plain line of text is a row with the one column `text`."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        rows = _delimited(path, content, "\t" if suffix == ".tsv" else ",")
    elif suffix in (".jsonl", ".ndjson"):
        rows = [_object(path, line, k) for k, line in enumerate(content.splitlines(), 1) if line.strip()]
    elif suffix == ".txt":
        rows = [{"text": line.strip()} for line in content.splitlines() if line.strip()]
    else:
        raise InputError(f"{path}: expected one of {', '.join(sorted(SUFFIXES))}")
    if not rows:
        raise InputError(f"{path}: holds no samples; give at least one")
    return rows


def _delimited(path: Path, content: str, delimiter: str) -> list[dict[str, Any]]:
    reader = csv.DictReader(content.splitlines(keepends=True), delimiter=delimiter)
    try:
        return list(reader)
    except csv.Error as error:
        raise InputError(f"{path}: not a table, line {reader.line_num} ({error})") from None


def _object(path: Path, line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}: line {number} is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}: line {number} is not a JSON object with columns such as 'text' and 'label'")
    return row


def _column(path: Path, columns: Sequence[str], asked: str | None, usual: Sequence[str], option: str) -> str | None:
    if asked is not None:
        if asked not in columns:
            raise InputError(f"{path}: {option} is {asked!r}{closest(asked, columns)}, found {', '.join(columns)}")
        return asked
    return next((name for name in usual if name in columns), None)


def _cell(path: Path, rows: Sequence[dict[str, Any]], k: int, column: str) -> str:
    value = rows[k].get(column)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise InputError(f"{path}: sample {k + 1} has no {column!r} (found {value!r}); every row needs one")
    return str(value)
