"""What a merge did, as a frozen record that goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tunable_magmax.errors import InputError, closest

VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One merged tensor: its shape, its type in the output, and what each task gave (None without owners)."""

    shape: tuple[int, ...]
    dtype: str
    counts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did. `counts` and `budget` are per task in training order; None where the method has none.

    >>> import torch, tunable_magmax as tmx
    >>> base, task = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    >>> report = tmx.merge_state_dicts(base, [task], scale=0.5).report
    >>> report.elements, report.counts, MergeReport.from_json(report.to_json()) == report
    (4, (4,), True)
    """

    method: str
    tasks: int
    elements: int
    budget: tuple[int, ...] | None
    counts: tuple[int, ...] | None
    leftovers: int | None
    scale: float
    seed: int
    options: Mapping[str, Any]
    """The options that shaped the result, as they were used."""
    last_length: float
    """The length of the last task vector, ||tau_T||."""
    merged_length: float
    """The length of the merged task vector before scaling, ||tau_merged||."""
    tensors: Mapping[str, TensorReport]
    """The merged tensors by name."""
    copied: Sequence[str]
    """Tensors copied from the base: not mergeable, left out, or changed by no task."""
    warnings: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file written."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each input file, if asked for."""
    names: tuple[str, ...] | None = None
    """What the tasks are called, if somebody said so."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """What the tasks are that are no checkpoints but adapters, by role: "task 1"."""

    def labels(self) -> list[str]:
        """The tasks as people read them, "task 1" or "task 1: birds", in training order."""
        if self.names is None:
            return [f"task {t}" for t in range(1, self.tasks + 1)]
        return [f"task {t}: {' '.join(name.split())}" for t, name in enumerate(self.names, start=1)]

    def to_json(self) -> str:
        """JSON text with stable order: equal reports give equal bytes."""
        record = asdict(self)
        if self.names is None:
            del record["names"]  # a report without names is as it was before there were any
        if not self.adapters:
            del record["adapters"]  # nor does one without adapters speak of them
        return json.dumps({"version": VERSION, **record}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MergeReport:
        """Read a report; a broken or foreign one is an `InputError`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"not a merge report: {error}") from None
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise InputError(f"not a merge report of version {VERSION}")
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise InputError(f"unknown key {name!r} in a merge report{closest(name, known)}")
        try:
            data["tensors"] = {
                name: TensorReport(tuple(t["shape"]), t["dtype"], _tuple(t["counts"]))
                for name, t in data["tensors"].items()
            }
            for name in ("budget", "counts", "copied", "warnings"):
                data[name] = _tuple(data[name])
            data["names"] = _names(data.get("names"), data["tasks"])
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"not a merge report: {error}") from None


def _names(given: Any, tasks: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != tasks or not all(isinstance(name, str) for name in given):
        raise InputError(f"not a merge report: names should be a list of {tasks} texts, one for each task")
    return tuple(given)


def _tuple(values: Any) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
