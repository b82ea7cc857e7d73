"""What a merge did, as a frozen record that goes to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tunable_magmax.errors import InputError

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

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012 - read by pydantic, not a field

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
    copied: tuple[str, ...]
    """Tensors copied from the base: not mergeable, left out, or changed by no task."""
    warnings: tuple[str, ...] = ()
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
        """Read a report; a broken one is an `InputError` that names all problems. Reports of 0.1.0 are read too."""
        from tunable_magmax import config  # not needed to merge, and slow to import

        try:
            data = json.loads(text)
        except ValueError as error:
            raise InputError(f"not a merge report: {error}") from None
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise InputError(f"not a merge report of version {VERSION}")
        report = config.check(cls, data, "not a merge report")
        per_task = {"names": report.names, "budget": report.budget, "counts": report.counts}
        per_task |= {f"counts of {name!r}": tensor.counts for name, tensor in report.tensors.items()}
        for what, values in per_task.items():
            if values is not None and len(values) != report.tasks:
                raise InputError(f"not a merge report: {what} has {len(values)} items for {report.tasks} tasks")
        return report
