"""Hugging Face parquet: images as bytes or texts, labels, and class names in the schema's metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunable_magmax.data.parquet_column import Column
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.tables import LABEL_COLUMNS, TEXT_COLUMNS, indexed
from tunable_magmax.errors import InputError, closest


def open_parquet(
    path: Path,
    split: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    domain_column: str | None = None,
) -> Samples:
    """One file, or those of a folder whose names start with `split`, in sorted order."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError('parquet files need pyarrow: pip install "tunable-magmax[train]"') from None
    files = _files(path, split)
    opened = []
    for file in files:
        try:
            opened.append(parquet.ParquetFile(file))
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"{file}: not a readable parquet file ({error})") from None
    schema = opened[0].schema_arrow
    for file, other in zip(files, opened, strict=True):
        if other.schema_arrow.names != schema.names:
            raise InputError(f"{file} has other columns than {files[0]}: {', '.join(other.schema_arrow.names)}")
    features = _features(schema)
    images = next((name for name in schema.names if _is_image(schema.field(name).type, features.get(name))), None)
    if images is not None and text_column is None:
        column, kind = images, "image"
    else:
        texts = [name for name in schema.names if pyarrow.types.is_string(schema.field(name).type)]
        column = _chosen(path, text_column, texts, TEXT_COLUMNS, "--text-column", "texts or images")
        kind = "text"
    labelled = [name for name in schema.names if name != column and _is_label(pyarrow, schema.field(name).type)]
    named = [name for name in labelled if features.get(name, {}).get("names")]
    usual = label_column is not None or any(name in LABEL_COLUMNS for name in labelled) or named
    classes: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None
    if usual:
        pick = named if named and not any(name in LABEL_COLUMNS for name in labelled) else labelled
        chosen = _chosen(
            path, label_column, labelled if label_column else pick, LABEL_COLUMNS, "--label-column", "labels"
        )
        values = [value for file in opened for value in file.read(columns=[chosen]).column(chosen).to_pylist()]
        classes, labels = _labels(path, values, features.get(chosen, {}).get("names"), chosen)
    domains: tuple[str, ...] | None = None
    if domain_column is not None:
        found = _chosen(path, domain_column, labelled, (), "--domain-column", "domains")
        values = [value for file in opened for value in file.read(columns=[found]).column(found).to_pylist()]
        names, indices = _labels(path, values, features.get(found, {}).get("names"), found)
        domains = tuple(names[index] for index in indices)
    size = sum(file.metadata.num_rows for file in opened)
    if not size:
        raise InputError(f"{path}: holds no samples")
    load = Column(opened, [file.name for file in files], column).load
    return Samples(str(path), "image" if kind == "image" else "text", size, load, classes, labels, domains)


def _files(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.parquet"))
    chosen = [file for file in found if split is None or file.name.startswith(split)]
    if not chosen:
        raise InputError(f"{path}: no parquet file starts with {split!r}; found {', '.join(f.name for f in found)}")
    splits = sorted({file.name.split("-")[0] for file in chosen})
    if split is None and len(splits) > 1:
        raise InputError(f"{path} holds several splits ({', '.join(splits)}): choose one with --split")
    return chosen


def _features(schema: Any) -> dict[str, Any]:
    """What the Hugging Face metadata says of each column."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: told for name, told in found.items() if isinstance(told, dict)} if isinstance(found, dict) else {}


def _is_image(kind: Any, told: dict[str, Any] | None) -> bool:
    if told is not None and told.get("_type") == "Image":
        return True
    return str(kind) in ("binary", "large_binary") or str(kind).startswith("struct<bytes: binary")


def _is_label(pyarrow: Any, kind: Any) -> bool:
    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_string(kind))


def _chosen(path: Path, asked: str | None, columns: Sequence[str], usual: Sequence[str], option: str, what: str) -> str:
    if asked is not None:
        if asked not in columns:
            raise InputError(f"{path}: {option} is {asked!r}{closest(asked, columns)}, found {', '.join(columns)}")
        return asked
    found = next((name for name in usual if name in columns), None) or (columns[0] if len(columns) == 1 else None)
    if found is None:
        raise InputError(f"{path}: which column holds the {what}? Give {option}: {', '.join(columns) or 'none fits'}")
    return found


def _labels(path: Path, values: list[Any], names: Any, column: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if any(value is None for value in values):
        raise InputError(f"{path}: {values.count(None)} samples have no {column!r}; every sample needs one")
    if not isinstance(names, list):
        return indexed([str(value) for value in values])
    outside = sorted({value for value in values if not 0 <= value < len(names)})
    if outside:
        raise InputError(f"{path}: {column!r} holds {outside[0]}, but there are {len(names)} class names")
    return tuple(map(str, names)), tuple(values)
