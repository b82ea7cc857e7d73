"""An experiment's records: lines of JSON, written when a job is done, which a killed run leaves readable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tunable_magmax.errors import InputError, StorageError, bulleted
from tunable_magmax.runs.run import is_run

RECORDS = "records.jsonl"
Key: TypeAlias = tuple[str, str, int, str]
"""What a record is of: setting, kind, seed, name."""
_CONFIG = ConfigDict(extra="ignore", ser_json_inf_nan="null")
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class EnvironmentScore:
    """What a row got in one environment, with what was believed of it.

    `error`: half the L1 distance of the weights to the true mixture, `expected_error` what was expected of it.
    `weights`: those above 0 by task, from 1. `chosen`: the source of the preference, or the model that was chosen.
    `expected`: the accuracy that was expected, with its interval, of the tailored model, the base and the last
    checkpoint. `leftovers`: the share of elements that were given by key alone. `known`: samples that were known.
    """

    __pydantic_config__ = _CONFIG
    name: str
    mixture: str
    right: Annotated[int, Field(ge=0)]
    samples: Annotated[int, Field(ge=1)]
    known: int | None = None
    error: float | None = None
    expected_error: float | None = None
    weights: Mapping[str, float] | None = None
    leftovers: float | None = None
    chosen: str | None = None
    expected: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    simpler: str | None = None
    head: str | None = None

    def __post_init__(self) -> None:
        if self.right > self.samples:
            raise ValueError(f"{self.right} right of {self.samples} samples in {self.name}")


@dataclass(frozen=True, kw_only=True)
class _Record:
    __pydantic_config__ = _CONFIG
    kind: str = ""
    setting: str
    seed: int

    @property
    def name(self) -> str:
        """What tells it from others of its kind and seed."""
        return "sequence"

    @property
    def key(self) -> Key:
        return self.setting, self.kind, self.seed, self.name


@dataclass(frozen=True, kw_only=True)
class SequenceRecord(_Record):
    """A trained sequence. `config`: its run.yaml."""

    kind: Literal["sequence"] = "sequence"
    tasks: int
    elements: int
    config: dict[str, Any]
    seconds: float | None = None
    kept: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScaleRecord(_Record):
    """The accuracy of a merge on held-out training samples at each scale, and the best scale."""

    kind: Literal["scale"] = "scale"
    method: str
    grid: dict[str, Share]
    best: float

    @property
    def name(self) -> str:
        return self.method


@dataclass(frozen=True, kw_only=True)
class RowRecord(_Record):
    """What a row got in some environments; several records of one row are put together when they are read."""

    kind: Literal["row"] = "row"
    row: str
    environments: tuple[EnvironmentScore, ...]

    @property
    def name(self) -> str:
        return self.row

    def __add__(self, later: RowRecord) -> RowRecord:
        """Returns both together; an environment of both is the later one's."""
        both = {each.name: each for each in (*self.environments, *later.environments)}
        return replace(self, environments=tuple(both.values()))


@dataclass(frozen=True, kw_only=True)
class AlphaPoint:
    """Accuracy on the first and the last task at one alpha; None: MAGMAX, which has none."""

    __pydantic_config__ = _CONFIG
    alpha: float | None
    first: Share
    last: Share


@dataclass(frozen=True, kw_only=True)
class AlphaRecord(_Record):
    """First and last task against alpha."""

    kind: Literal["alpha"] = "alpha"
    method: str
    scale: float | str
    points: tuple[AlphaPoint, ...]

    @property
    def name(self) -> str:
        return f"{self.method}@{self.scale}"


Record: TypeAlias = SequenceRecord | ScaleRecord | RowRecord | AlphaRecord
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def read_records(path: str | Path) -> list[Record]:
    """Reads the records of a file; of those with one key the last. A last line that was cut off is left out.

    Other lines that are no records are an `InputError` that names them all.
    """
    try:
        *lines, tail = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: no records of an experiment can be read there ({error.strerror})") from None
    found: list[Record] = []
    problems = []
    for number, line in enumerate([*lines, *([tail] if _is_json(tail) else [])], 1):
        if not line.strip():
            continue
        try:
            found.append(_RECORD.validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            problems.append(f"line {number}: {f'{place}: ' if place else ''}{first['msg']}")
    if problems:
        raise InputError(f"{path}:\n{bulleted(problems)}\nRemove these lines; what they recorded is measured again")
    return joined(found)


def joined(records: Sequence[Record]) -> list[Record]:
    """Returns one record for each key: all environments of a row together, of others the last."""
    kept: dict[Key, Record] = {}
    for record in records:
        before = kept.get(record.key)
        both = isinstance(before, RowRecord) and isinstance(record, RowRecord)
        kept[record.key] = before + record if both else record  # type: ignore[operator]
    return list(kept.values())


def append_records(path: str | Path, records: Sequence[Record]) -> None:
    """Adds records in one write. What a killed run left of its last line is removed first."""
    path = Path(path)
    lines = b"".join(_RECORD.dump_json(record, by_alias=True) + b"\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:
            file.seek(0)
            content = file.read()
            tail = content[content.rfind(b"\n") + 1 :]
            if tail and _is_json(tail):
                lines = b"\n" + lines
            elif tail:
                file.truncate(len(content) - len(tail))
            if file.write(lines) < len(lines):
                raise OSError("the disk is full")
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path}: could not be written ({error.strerror or error})") from error


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def find_records(place: str | Path) -> list[Path]:
    """Returns the record files at a place: itself if it is a file, else all under the folder, in order of path."""
    place = Path(place)
    return [place] if place.is_file() else sorted(path for path in place.rglob(RECORDS) if not is_run(path.parent))
