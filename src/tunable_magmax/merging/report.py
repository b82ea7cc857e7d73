"""What a merge finds in its inputs, and the report of what it did, which goes to JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError, bulleted, one_line, plural, shown_shares
from tunable_magmax.merging.options import FOR_FILES, Options


@dataclass(frozen=True, slots=True)
class Survey:
    """Which tensors each task changed [tensors, T], what is wrong with them, and how far the last task moved them.

    >>> found = Survey.nothing(tensors=1, tasks=2)
    >>> found.nonfinite[0, 1] += 3
    >>> found.changed[0] = True
    >>> found.refuse(["w"], ["base", "task 1", "task 2"])
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: values that can't be merged:
      - task 1: 'w' has 3 values that are NaN or infinite, or too far from the base
    Mend these checkpoints, or leave the tensors out with exclude patterns.
    """

    changed: NDArray[np.bool_]
    nonfinite: NDArray[np.int64]
    """Values of base and tasks [tensors, T + 1] that are NaN or infinite, themselves or less the base's finite ones."""
    squares: NDArray[np.float64]
    """The squared length of the last task vector [tensors]."""

    @classmethod
    def nothing(cls, tensors: int, tasks: int) -> Survey:
        """Returns a survey in which nothing changed and all is finite."""
        nonfinite = np.zeros((tensors, tasks + 1), np.int64)
        return cls(np.zeros((tensors, tasks), np.bool_), nonfinite, np.zeros(tensors))

    def add(self, other: Survey) -> None:
        """Adds the survey of other ones of the tensors, with nothing for those of this one."""
        for name in ("changed", "nonfinite", "squares"):
            ours = getattr(self, name)
            ours += getattr(other, name)

    def refuse(self, names: Sequence[str], labels: Sequence[str]) -> None:
        """Raises an `InputError` that lists every merged tensor with values that can't be merged."""
        merged = self.nonfinite * self.changed.any(axis=1, keepdims=True)
        problems = [
            f"{labels[t]}: {names[k]!r} has {merged[k, t]:,} values that are NaN or infinite, or too far from the base"
            for k, t in np.argwhere(merged).tolist()
        ]
        if problems:
            raise InputError(
                f"values that can't be merged:\n{bulleted(problems)}\n"
                "Mend these checkpoints, or leave the tensors out with exclude patterns."
            )


VERSION = 1
_LEFT_OUT = ("names", "adapters", "heads", "hub", "reduced")
"""What a report says nothing of if there is nothing of it."""


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One merged tensor: its shape, its type in the output, and what each task gave (None without owners)."""

    shape: tuple[int, ...]
    dtype: str
    counts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, repr=False)
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
    inputs: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the stored tensors of base and tasks, by role: "base", "task 1"."""
    names: tuple[str, ...] | None = None
    """What the tasks are called, if somebody said so."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """What the tasks are that are no checkpoints but adapters, by role: "task 1"."""
    heads: Mapping[str, Any] | None = None
    """What became of heads that base and tasks do not share; None if there are none."""
    hub: Mapping[str, str] = field(default_factory=dict)
    """Name and commit of the checkpoints that come from the Hugging Face hub, by role: "base", "task 1"."""
    reduced: Mapping[str, Any] | None = None
    """Of an output that is a LoRA adapter: its rank, and the share of the step's length that it lacks, of the whole and
    of the worst matrix. None: the output is a model."""
    version: int = VERSION
    """Of the format."""

    def __repr__(self) -> str:
        what = f"{self.method}, {self.elements:,} elements of {len(self.tensors):,} tensors, scale {self.scale:g}"
        if self.counts is None or not self.elements:
            return f"MergeReport({what}; {plural(self.tasks, 'task')})"
        return f"MergeReport({what}; {shown_shares(self.columns, [count / self.elements for count in self.counts])})"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON: what tmx-report.json holds."""
        content: dict[str, Any] = json.loads(self.to_json())
        return content

    def labels(self) -> list[str]:
        """Returns what to call the tasks, "task 1" or "task 1: birds", in training order."""
        if self.names is None:
            return [f"task {t}" for t in range(1, self.tasks + 1)]
        return [f"task {t}: {one_line(name)}" for t, name in enumerate(self.names, start=1)]

    @property
    def columns(self) -> list[str]:
        """What to call the tasks where there is little room: "birds", or "task 1"."""
        return self.labels() if self.names is None else [one_line(name) for name in self.names]

    @property
    def reduction(self) -> str:
        """What an output is that is an adapter, and how near it is to the merge; empty of all others."""
        if self.reduced is None:
            return ""
        rank, error, worst_error = (self.reduced[name] for name in ("rank", "error", "worst_error"))
        return (
            f"a LoRA adapter of rank {rank}; it lacks {error:.2%} of the merged step's length, at worst "
            f"{worst_error:.2%}, of {self.reduced['worst']}"
        )

    def to_json(self) -> str:
        """Returns JSON text in a fixed order: equal reports give equal bytes."""
        record = {name: value for name, value in asdict(self).items() if value or name not in _LEFT_OUT}
        return json.dumps({"version": self.version, **record}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MergeReport:
        """Reads a report; a broken one is an `InputError` that names all problems."""
        from tunable_magmax import config  # not needed to merge, and slow to import

        report = config.check_json(cls, text, "not a merge report", VERSION)
        per_task = {"names": report.names, "budget": report.budget, "counts": report.counts}
        per_task |= {f"counts of {name!r}": tensor.counts for name, tensor in report.tensors.items()}
        for what, values in per_task.items():
            if values is not None and len(values) != report.tasks:
                raise InputError(f"not a merge report: {what} has {len(values)} items for {report.tasks} tasks")
        return report


def options_used(options: Options, reads: Sequence[str]) -> dict[str, Any]:
    """Returns the options that shaped a result; `reads` are those that only some methods read."""
    files = [name for name in FOR_FILES if getattr(options, name) is not None]
    names = ("weights", "budget", "scale", "out_dtype", "include", "exclude", *files, *reads)
    return {name: _as_reported(getattr(options, name)) for name in names}


def _as_reported(value: Any) -> Any:
    """Returns an option for JSON: exact numbers as text that reads back as exactly them, short if that does."""
    if isinstance(value, Fraction):
        short = str(int(value) if value.denominator == 1 else float(value))
        return short if Fraction(short) == value else str(value)
    if isinstance(value, tuple) and any(isinstance(each, Fraction) for each in value):
        return [_as_reported(each) for each in value]
    return getattr(value, "digest", value)


def matched_scale(last_square: float, merged_square: float) -> float:
    """Returns ||tau_T|| / ||tau_merged|| to six significant digits, 1 if the merged vector is zero (rule 9).

    >>> matched_scale(4.0, 36.0)
    0.333333
    """
    if not math.isfinite(last_square) or not math.isfinite(merged_square):
        raise InputError("the task vectors are too long to measure in float64: give a number as scale")
    return significant(math.sqrt(last_square) / math.sqrt(merged_square)) if merged_square else 1.0


def significant(value: float) -> float:
    """Rounds a number to six significant digits, as in reports and scales.

    >>> significant(2 / 3)
    0.666667
    """
    return float(f"{value:.5e}")
