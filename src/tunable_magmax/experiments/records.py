"""An experiment's records: JSON lines, one for each finished job, that a killed run leaves readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.errors import InputError, StorageError, bulleted, closest
from tunable_magmax.files import parse_json
from tunable_magmax.runs.run import is_run

RECORDS = "records.jsonl"
Record: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str, int, str]
"""What a record is of: setting, kind, seed, name."""

_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "sequence": {"tasks": int, "magmax_counts": list, "elements": int},
    "scale": {"method": str, "grid": dict, "best": float},
    "row": {"row": str, "environments": {"name": str, "mixture": str, "right": int, "samples": int}},
    "alpha": {"method": str, "scale": object, "points": {"alpha": object, "first": float, "last": float}},
    "meta-size": {"row": str, "points": {"size": int, "accuracy": float}},
}
"""What a record of each kind has, with its type. A mapping stands for a list of mappings that have these keys."""


def record_key(record: Mapping[str, Any]) -> Key:
    """Returns what a record is of. The name is the row's, the scaled method's, or of an alpha record method@scale.

    >>> record_key({"kind": "scale", "setting": "clip/cifar100-5", "seed": 3, "method": "ties"})
    ('clip/cifar100-5', 'scale', 3, 'ties')
    """
    kind = record["kind"]
    if kind == "alpha":
        name = f"{record['method']}@{record['scale']}"
    else:
        name = str({"scale": record.get("method"), "sequence": "sequence"}.get(kind, record.get("row")))
    return record["setting"], kind, record["seed"], name


def read_records(path: str | Path) -> list[Record]:
    """Reads the records of a file; of those with one key the last. A last line that was cut off is left out.

    Any other line that is no record is an `InputError` that names all such lines.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; expected the records of an experiment") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None
    tail = lines.pop()
    if _parsed(tail) is not None:
        lines.append(tail)
    kept: dict[Key, Record] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parsed(line)
        if record is None:
            shown = line[:40].decode(errors="replace")
            problems.append(f"line {number} is no JSON object: {shown}{'...' if len(line) > 40 else ''}")
            continue
        own = [f"line {number}: {problem}" for problem in _problems(record)]
        problems += own
        if not own:
            kept[record_key(record)] = record
    if problems:
        raise InputError(
            f"{path}:\n{bulleted(problems)}\nRemove these lines; what they recorded will be measured again."
        )
    return list(kept.values())


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Adds a record: one line, in one write. What a killed run left of its last line is removed first."""
    problems = _problems(record)
    if problems:
        raise InputError(f"a record cannot be written: {'; '.join(problems)}")
    path = Path(path)
    line = (json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if _mend(handle):
                line = b"\n" + line
            if os.write(handle, line) < len(line):
                raise OSError("the disk is full")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(f"{path}: could not be written ({error.strerror or error})") from error


def find_records(place: str | Path) -> list[Path]:
    """Returns the record files at a place: itself if it is a file, else all under the folder, in order of path.

    The log of a training run has the same name, beside a `run.json`, and is none of them.
    """
    place = Path(place)
    if place.is_file():
        return [place]
    return sorted(path for path in place.rglob(RECORDS) if not is_run(path.parent))


def _mend(handle: int) -> bool:
    """Cuts off a half-written last line; returns whether a whole one lacks its line break."""
    end = os.lseek(handle, 0, os.SEEK_END)
    tail = b""
    while end > len(tail) and b"\n" not in tail:
        size = min(end - len(tail), 1 << 16)
        tail = os.pread(handle, size, end - len(tail) - size) + tail
    tail = tail.rpartition(b"\n")[2]
    if not tail or _parsed(tail) is not None:
        return bool(tail)
    os.ftruncate(handle, end - len(tail))
    return False


def _parsed(line: bytes) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:  # of UnicodeDecodeError too
        return None
    return record if isinstance(record, dict) else None


def _problems(record: Mapping[str, Any]) -> list[str]:
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _NEEDED:
        return [f"kind is {kind!r}, expected one of {', '.join(_NEEDED)}{closest(str(kind), list(_NEEDED))}"]
    problems = _lacking(record, {"setting": str, "seed": int, **_NEEDED[kind]}, f"{kind} record")
    for place, part in enumerate(record["environments"] if kind == "row" and not problems else (), 1):
        if not 0 <= part["right"] <= part["samples"] != 0:
            problems.append(f"row record, environments {place}: {part['right']} right of {part['samples']} samples")
    return problems


def _lacking(record: Any, needed: Mapping[str, Any], where: str) -> list[str]:
    if not isinstance(record, Mapping):
        return [f"{where} is {record!r}, expected a mapping"]
    problems = []
    for name, kind in needed.items():
        value = record.get(name)
        if name not in record:
            problems.append(f"{where} lacks {name!r}")
        elif isinstance(kind, Mapping) and isinstance(value, list):
            for place, part in enumerate(value, 1):
                problems += _lacking(part, kind, f"{where}, {name} {place}")
        elif isinstance(kind, Mapping) or not isinstance(value, int | float if kind is float else kind):
            expected = "list" if isinstance(kind, Mapping) else kind.__name__
            problems.append(f"{where}: {name} is {value!r}, expected a value of type {expected}")
    return problems


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
