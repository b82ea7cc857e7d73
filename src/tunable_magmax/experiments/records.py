"""An experiment's records: lines of JSON, written when a job is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from filelock import FileLock
from pydantic import Field, TypeAdapter, ValidationError

from tunable_magmax.errors import InputError
from tunable_magmax.files import write_atomic

RECORDS = "records.jsonl"
Key: TypeAlias = tuple[str, str, int, str]
"""What a record is of: setting, kind, seed, name."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentScore:
    """What a row got in one environment, with what was believed of it.

    `error`: half the L1 distance of the weights to the true mixture, `expected_error` what was expected of it.
    `weights`: those above 0 by task, from 1. `chosen`: the source of the preference, or the model that was chosen.
    `expected`: the accuracy that was expected, with its interval, of the tailored model, the base and the last
    checkpoint. `leftovers`: the share of elements that were given by key alone. `known`: samples that were known.
    """

    name: str
    mixture: str
    right: int
    samples: int
    known: int | None = None
    error: float | None = None
    expected_error: float | None = None
    weights: Mapping[str, float] | None = None
    leftovers: float | None = None
    chosen: str | None = None
    expected: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    simpler: str | None = None
    head: str | None = None

    @property
    def accuracy(self) -> float:
        """The share that is right, from 0 to 1."""
        return self.right / self.samples


@dataclass(frozen=True, kw_only=True)
class _Record:
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
    grid: dict[str, float]
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


@dataclass(frozen=True, kw_only=True)
class AlphaPoint:
    """Accuracy on the first and the last task at one alpha; None: MAGMAX, which has none."""

    alpha: float | None
    first: float
    last: float


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
    """Reads the records of a file, one for each key; a line that is no record is an `InputError`."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path}: no records of an experiment can be read there ({error.strerror})") from None
    found: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_RECORD.validate_json(line))
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"]
            raise InputError(
                f"{path}, line {number}: {why}. Remove the line; what it recorded is measured again"
            ) from None
    return _joined(found)


def _joined(records: Sequence[Record]) -> list[Record]:
    """Returns one record for each key: all environments of a row together, of others the last."""
    kept: dict[Key, Record] = {}
    for record in records:
        before = kept.get(record.key)
        if isinstance(before, RowRecord) and isinstance(record, RowRecord):
            both = {each.name: each for each in (*before.environments, *record.environments)}
            record = replace(before, environments=tuple(both.values()))
        kept[record.key] = record
    return list(kept.values())


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Adds records to a file, all or none, without what scores lack; waits for other processes that do so."""
    lines = b"".join(_RECORD.dump_json(each, exclude_none=each.kind == "row") + b"\n" for each in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        write_atomic(path, (path.read_bytes() if path.exists() else b"") + lines)
