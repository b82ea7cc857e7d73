"""Reads tables of samples: CSV, JSON, lines of text, and parquet of texts or images; decides what their columns are."""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

from tunable_magmax.data.images import in_order, read_picture, threads_for
from tunable_magmax.data.samples import Kind, Samples, Unreadable, indexed
from tunable_magmax.errors import InputError, closest, shortened, some_of
from tunable_magmax.files import load_json, parse_json

TEXT_COLUMNS = ("text", "sentence", "utterance", "query", "input", "content")
LABEL_COLUMNS = ("label", "class", "intent", "category", "target", "fine_label", "label_text")
DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}
TABLE_SUFFIXES = frozenset({".txt", ".csv", ".tsv", ".jsonl", ".ndjson"})
"""Tables that are text files, one sample a line."""
DATA_SUFFIXES = TABLE_SUFFIXES | {".parquet", ".json"}


@dataclass(frozen=True, eq=False)
class Table:
    """`width` columns of one or several files, read when they are asked for.

    `columns`: those that may hold labels or domains, `texts` and `images`: those that may hold inputs.
    `cells` reads a whole column; `load`, of parquet, inputs by their positions. `names`: class names by column.
    """

    path: Path
    size: int
    width: int
    columns: tuple[str, ...]
    texts: tuple[str, ...]
    cells: Callable[[str], list[Any]]
    images: tuple[str, ...] = ()
    load: Callable[[str], Callable[[Sequence[int]], Iterator[Any]]] | None = None
    names: Mapping[str, list[Any]] = field(default_factory=dict)

    def find(self, asked: str | None, usual: Sequence[str], option: str, among: Sequence[str]) -> str | None:
        """Returns the column that was asked for by an option, else the first that is called as usual, or None."""
        if asked is not None and asked not in among:
            raise InputError(
                f"{self.path}: {option} is {asked!r}{closest(asked, among)}, found {_shown(among) or 'no such column'}"
            )
        known = {name.strip().lower(): name for name in reversed(among)}
        return asked or next((known[name] for name in usual if name in known), None)

    def label(self, asked: str | None, among: Sequence[str], needed: bool = False) -> str | None:
        """Returns the column of labels; without a usual name, the only one with class names or, if needed, at all."""
        usual = self.find(asked, LABEL_COLUMNS, "--label-column", among)
        rest = [name for name in among if name in self.names] or (among if self.width == 1 and needed else [])
        if usual is not None or not (rest or needed):
            return usual
        if len(rest) != 1:
            raise InputError(
                f"{self.path}: which column holds the labels? Give {_option('--label-column')}, one of "
                f"{_shown(among) or '(none fits)'}"
            )
        return rest[0]

    def categories(self, column: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Returns the class names of a column in order, and each row's index among them."""
        values, names = self.cells(column), self.names.get(column)
        if names is None:
            # Each name is looked at once: labels are many, and classes few.
            texts = {value: str(value).strip() for value in self._checked(column, values)}
            classes, _ = indexed(sorted(set(texts.values())))
            order = {name: k for k, name in enumerate(classes)}
            place = {value: order[text] for value, text in texts.items()}
            return classes, tuple(map(place.__getitem__, values))
        if outside := set(values) - set(range(len(names))):
            first = next(k for k, value in enumerate(values) if value in outside)
            raise InputError(
                f"{self.path}: sample {first + 1} has {values[first]!r} as {column!r}, expected 0 to {len(names) - 1}: "
                f"there are {len(names)} class names"
            )
        return tuple(map(str, names)), tuple(values)

    def strings(self, column: str) -> list[str]:
        """Returns a column as texts."""
        values = self.cells(column)
        return values if all(type(value) is str for value in self._checked(column, values)) else list(map(str, values))

    def _checked(self, column: str, values: Sequence[Any]) -> set[Any]:
        """Returns the different values; refuses what is empty or neither a text nor a whole number."""
        if set(map(type, values)) <= {str, int}:
            different = set(values)
            if all(str(value).strip() for value in different):
                return different
        wrong = (k for k, value in enumerate(values) if type(value) not in (str, int) or not str(value).strip())
        k = next(wrong)
        raise InputError(
            f"{self.path}: sample {k + 1} has no {column!r} (found {shortened(repr(values[k]))}, expected a text or a "
            "whole number); every row needs one"
        )


def open_table(
    path: Path,
    split: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    domain_column: str | None = None,
) -> Samples:
    """Opens a table of inputs, with labels where it has a column of them, and domains where their column is named."""
    table = read_table(path, split)
    kind: Kind = "image" if table.images and text_column is None else "text"
    if kind == "image":
        inputs = table.images[0]
    else:
        inputs = table.find(text_column, TEXT_COLUMNS, "--text-column", table.texts) or _only_text(table)
    others = [name for name in table.columns if name != inputs]
    label = table.label(label_column, others)
    domain = table.find(domain_column, (), "--domain-column", others)
    if table.load is None:
        samples = text_samples(_origin(path, split), table.strings(inputs), None)
    else:
        samples = Samples(str(path), kind, table.size, table.load(inputs))
    if label is not None:
        classes, labels = table.categories(label)
        samples = replace(samples, classes=classes, labels=labels)
    if domain is not None:
        names, indices = table.categories(domain)
        samples = replace(samples, domains=tuple(names[index] for index in indices))
    return samples


def read_labels(path: Path, split: str | None = None, label_column: str | None = None) -> list[str]:
    """Reads the labels of a table: its label column, or its only one. Plain text: one label a line."""
    table = read_table(path, split)
    if table.images and table.label(label_column, table.columns) is None:
        raise InputError(f"{path} holds inputs without labels; --inputs takes them")
    column = table.label(label_column, table.columns, needed=True)
    assert column is not None
    classes, indices = table.categories(column)
    if column in classes and label_column is None and path.suffix.lower() in DELIMITERS:
        raise InputError(
            f"{path}: its first line is {column!r}, which is a label as well; the first line of a table names its "
            "columns: put 'label' above it"
        )
    return [classes[index] for index in indices]


def text_samples(origin: str, texts: Sequence[str], labels: Sequence[str] | None) -> Samples:
    """Makes `Samples` of texts and their labels; classes in sorted order, numbers by value."""

    def load(positions: Sequence[int]) -> Iterator[str]:
        return (texts[position] for position in positions)

    classes, indices = ((), None) if labels is None else indexed(labels)
    return Samples(origin, "text", len(texts), load, classes, indices)


def read_table(path: Path, split: str | None = None) -> Table:
    """Reads a table of any format, or the parquet files of a folder; of parquet only what is asked for."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir() or suffix == ".parquet":
        table = _parquet(path, split)
    elif suffix == ".json":
        table = _json(path, split)
    elif suffix in TABLE_SUFFIXES:
        table = _text_file(path, suffix)
    else:
        raise InputError(f"{path}: expected one of {', '.join(sorted(DATA_SUFFIXES))}")
    if not table.size:
        raise InputError(f"{path}: holds no samples; give at least one")
    return table


def _origin(path: Path, split: str | None) -> str:
    return f"{path} ({split or 'train'})" if has_splits(path) else str(path)


def _only_text(table: Table) -> str:
    if table.load is not None and len(table.texts) == 1:
        return table.texts[0]
    where = " in its first line" if table.path.suffix.lower() in DELIMITERS else ""
    raise InputError(
        f"{table.path}: no column of texts among {_shown(table.texts) or 'its columns'}{where}: call it 'text', or "
        f"give {_option('--text-column')}"
    )


def _option(option: str) -> str:
    return f"{option} (in run.yaml: {option[2:].replace('-', '_')})"


def _shown(columns: Sequence[str]) -> str:
    return some_of(columns, 10, show=lambda name: shortened(repr(name)))


# -- text files -------------------------------------------------------------------------------------------------------


def _text_file(path: Path, suffix: str) -> Table:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({error}): save it as UTF-8") from None
    if suffix in DELIMITERS:
        return _rows(path, *_delimited(path, content, DELIMITERS[suffix]))
    # Not splitlines: a text may hold characters that Python takes for the end of a line, such as U+2028.
    lines = ((k, line.strip()) for k, line in enumerate(content.split("\n"), 1) if line.strip())
    if suffix == ".txt":
        return _rows(path, ["text"], [[line] for _, line in lines])
    return _objects(path, "line", ((k, _parsed(path, k, line)) for k, line in lines))


def _rows(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Makes a table of rows, which may be shorter than the columns."""

    def cells(column: str) -> list[Any]:
        k = columns.index(column)
        return [row[k] if k < len(row) else None for row in rows]

    return Table(path, len(rows), len(columns), tuple(columns), tuple(columns), cells)


def _objects(path: Path, what: str, numbered: Iterable[tuple[int, Any]]) -> Table:
    """Makes a table of JSON objects; `what`, a line or an item, and its number are for errors."""
    rows = []
    for k, row in numbered:
        if not isinstance(row, dict):
            raise InputError(f"{path}: {what} {k} is not a JSON object with columns such as 'text' and 'label'")
        rows.append(row)
    columns = tuple(dict.fromkeys(chain.from_iterable(rows)))
    return Table(path, len(rows), len(columns), columns, columns, lambda column: [row.get(column) for row in rows])


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise InputError(f"{path}: line {number} is not JSON ({error})") from None


def _delimited(path: Path, content: str, delimiters: str) -> tuple[list[str], list[list[str]]]:
    """Reads delimited lines; the first of the delimiters that the first line holds is that of all lines."""
    first = content.partition("\n")[0]
    delimiter = next((each for each in delimiters if each in first), delimiters[0])
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
                rows.append(cells)
        return columns, rows
    except csv.Error as error:
        raise InputError(f"{path}: not a table, line {reader.line_num} ({error})") from None
    finally:
        csv.field_size_limit(usual)


def has_splits(path: Path) -> bool:
    """Whether a file is JSON with an object of splits, not with a list of samples."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        return not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _json(path: Path, split: str | None) -> Table:
    """Reads a list of objects, or splits of [text, label] pairs as CLINC150 has them (by default `train`)."""
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if isinstance(content, list):
        if split is not None:
            raise InputError(f"{path}: a JSON list has no splits, but {split!r} was asked for; leave --split out")
        return _objects(path, "item", enumerate(content, 1))
    if not isinstance(content, dict) or not all(isinstance(pairs, list) for pairs in content.values()):
        raise InputError(
            f"{path}: expected a JSON list of objects, or a JSON object from splits to lists of [text, label] pairs"
        )
    chosen = split or "train"
    if chosen not in content:
        raise InputError(f"{path}: no split {chosen!r}{closest(chosen, list(content))}, found {', '.join(content)}")
    for k, pair in enumerate(content[chosen], 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise InputError(f"{path}: sample {k} of {chosen!r} is {shortened(repr(pair))}, expected [text, label]")
    return _rows(path, ("text", "label"), content[chosen])


# -- parquet ----------------------------------------------------------------------------------------------------------

_STRING = r"(large_)?string(_view)?"
_STRINGS = rf"{_STRING}|dictionary<values={_STRING},.*"
KEPT_BYTES = 1 << 30
"""Files of at most so many bytes, uncompressed, are read once and kept: 20 tasks ask 20 times for parts of them."""
BATCH_ROWS = 512


def _parquet(path: Path, split: str | None) -> Table:
    """Opens one file, or those of a folder whose names start with `split`, in sorted order."""
    files = _files(path, split)
    opened = _opened(files)
    schema = opened[0].schema_arrow
    features = _features(schema)
    types = {name: str(schema.field(name).type) for name in schema.names}
    images = tuple(name for name in types if _is_image(types[name], features.get(name)))

    def cells(column: str) -> list[Any]:
        with _damage(path):
            return list(chain.from_iterable(file.read(columns=[column]).column(column).to_pylist() for file in opened))

    def load(column: str) -> Callable[[Sequence[int]], Iterator[Any]]:
        return _Column(opened, [file.name for file in files], column).load

    return Table(
        path,
        sum(file.metadata.num_rows for file in opened),
        len(types),
        tuple(name for name in types if re.fullmatch(rf"u?int\d+|{_STRINGS}", types[name])),
        tuple(name for name in types if re.fullmatch(_STRINGS, types[name])),
        cells,
        images,
        load,
        {name: feature["names"] for name, feature in features.items() if isinstance(feature.get("names"), list)},
    )


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


def _opened(files: Sequence[Path]) -> list[Any]:
    """Opens files, which must have the same columns."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError('parquet files need pyarrow: pip install "tunable-magmax[train]"') from None
    opened = []
    for file in files:
        with _damage(file):
            opened.append(ParquetFile(file))
        names = opened[-1].schema_arrow.names
        if names != opened[0].schema_arrow.names:
            raise InputError(f"{file} has other columns than {files[0]}: {', '.join(names)}")
    return opened


@contextmanager
def _damage(path: Path | str) -> Iterator[None]:
    """Turns what pyarrow raises for damaged files into an `InputError`."""
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a readable parquet file ({error})") from None


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


class _Column:
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
            start, waiting, name = self._starts[number], deque(group), self._groups[number][1]
            for values in self._batches(number):
                while waiting and waiting[0] < start + len(values):
                    position = waiting.popleft()
                    yield values[position - start].as_py(), f"{name}, row {position}"
                if not waiting:
                    break
                start += len(values)

    def _batches(self, number: int) -> Iterable[Any]:
        file, name, group = self._groups[number]
        with _damage(name):
            if self._bytes > KEPT_BYTES:  # a few rows at a time, and nothing is left behind
                yield from map(_values, file.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._columns))
                return
            if number not in self._kept:
                self._kept[number] = [_values(file.read_row_group(group, columns=self._columns))]
        yield from self._kept[number]


def _values(table: Any) -> Any:
    """Returns the only column of a table or batch; of a column of structs, its only field."""
    import pyarrow

    values = table.column(0)
    # Flattening carries the structs' own nulls over to the field.
    return values.flatten()[0] if pyarrow.types.is_struct(values.type) else values


def _input(value: Any, name: str) -> Any:
    if isinstance(value, bytes):
        return read_picture(value, name)
    return value if isinstance(value, str) else Unreadable(name, "empty")
