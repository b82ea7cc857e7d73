"""Computes what a sequence of tasks gains and forgets from its accuracy matrix: R[i, j] after task i, on task j."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.showing import data_frame

if TYPE_CHECKING:
    import pandas

MATRIX_VERSION = 1
METRIC_DEFINITIONS = {
    "average_accuracy": "mean over tasks j <= T of R[T, j]",
    "forgetting": "mean over tasks j < T of max over i < T of R[i, j], less R[T, j] (Chaudhry et al. 2018); positive "
    "is worse",
    "backward_transfer": "mean over tasks j < T of R[T, j] - R[j, j] (Lopez-Paz and Ranzato 2017); negative is worse",
    "forward_transfer": "mean over tasks 1 < j <= T of R[j - 1, j] - R[0, j], where R[0] is the base (after Lopez-Paz "
    "and Ranzato 2017, who take random weights for it)",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its definition; the value is None where R is not known well enough."""

    name: str
    value: float | None
    definition: str

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True, repr=False)
class AccuracyMatrix:
    """The matrix R [T, T] in `rows`, NaN where unknown; `base` is the row of the base, before any task.

    T in the definitions is the last task after which anything was measured, so a run that is not finished has metrics
    of the tasks so far. They are means over tasks, whatever the number of samples.

    >>> r = AccuracyMatrix(("birds", "cars"), ((0.9, 0.1), (0.6, 0.8)), base=(0.5, 0.4))
    >>> [(metric.name, round(metric.value, 3)) for metric in r.metrics()]
    [('average_accuracy', 0.7), ('forgetting', 0.3), ('backward_transfer', -0.3), ('forward_transfer', -0.3)]
    """

    tasks: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    base: tuple[float, ...] | None = None
    samples: tuple[int, ...] | None = None
    """How many samples of each task stand behind a column."""

    def __post_init__(self) -> None:
        count = len(self.tasks)
        base = [] if self.base is None else [self.base]
        if not count or len(self.rows) != count or any(len(row) != count for row in [*self.rows, *base]):
            raise InputError(f"an accuracy matrix of {count} tasks needs {count} rows of {count} numbers")
        if any(not (math.isnan(value) or 0 <= value <= 1) for row in [*self.rows, *base] for value in row):
            raise InputError("accuracies must be shares from 0 to 1, NaN where unknown")
        if self.samples is not None and len(self.samples) != count:
            raise InputError(f"{len(self.samples)} numbers of samples for {count} tasks")

    def __repr__(self) -> str:
        values = {metric.title: metric.value for metric in self.metrics()}
        known = ", ".join(f"{title} {value:.1%}" for title, value in values.items() if value is not None)
        return f"AccuracyMatrix({len(self.tasks)} tasks{f'; {known}' if known else ''})"

    def to_frame(self) -> pandas.DataFrame:
        """Returns R as a pandas frame: a row for the base, if it was measured, and one after each task."""
        rows = {"base": self.base} if self.base is not None else {}
        rows |= {f"after {task}": row for task, row in zip(self.tasks, self.rows, strict=True)}
        return data_frame(
            {task: [row[j] for row in rows.values()] for j, task in enumerate(self.tasks)}, [*rows], "model"
        )

    @classmethod
    def of(
        cls, tasks: Sequence[str], rows: Any, base: Any = None, samples: Sequence[int] | None = None
    ) -> AccuracyMatrix:
        """Makes a matrix of arrays, tensors or nested lists; None stands for NaN, and last rows may be missing."""
        table = [_row(row) for row in rows]
        table += [(math.nan,) * len(tasks)] * (len(tasks) - len(table))
        counts = None if samples is None else tuple(map(int, samples))
        return cls(tuple(tasks), tuple(table), None if base is None else _row(base), counts)

    @property
    def after(self) -> int:
        """Returns how many tasks were trained: the last row (from 1) that holds a number; 0 if none does."""
        known = [i for i, row in enumerate(self.rows, 1) if any(not math.isnan(value) for value in row)]
        return known[-1] if known else 0

    def metrics(self) -> tuple[Metric, ...]:
        """Returns average accuracy, forgetting, backward transfer and, with a base, forward transfer."""
        r, last = np.array(self.rows, dtype=np.float64), self.after
        values: dict[str, float | None] = {
            "average_accuracy": _mean(r[last - 1, :last]) if last else None,
            "forgetting": _forgetting(r[:last, :last]),
            "backward_transfer": _mean(r[last - 1, : last - 1] - r.diagonal()[: last - 1]) if last > 1 else None,
        }
        if self.base is not None:
            before = r.diagonal(1)[: max(last - 1, 0)] - np.array(self.base)[1 : max(last, 1)]
            values["forward_transfer"] = _mean(before)
        return tuple(Metric(name, value, METRIC_DEFINITIONS[name]) for name, value in values.items())

    def to_dict(self) -> dict[str, Any]:
        """Returns the matrix, the metrics and their definitions."""
        return {
            "version": MATRIX_VERSION,
            "tasks": list(self.tasks),
            "samples": None if self.samples is None else list(self.samples),
            "base": None if self.base is None else _nulls(self.base),
            "matrix": [_nulls(row) for row in self.rows],
            "after": self.after,
            "metrics": {m.name: {"value": m.value, "definition": m.definition} for m in self.metrics()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> AccuracyMatrix:
        """Reads what `to_dict` made, whatever other keys there are. The metrics are computed again."""
        if not isinstance(data, dict) or data.get("version") != MATRIX_VERSION:
            raise InputError(f"not an accuracy matrix of version {MATRIX_VERSION}")
        try:
            return cls.of(data["tasks"], data["matrix"], data.get("base"), data.get("samples"))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"not an accuracy matrix: {type(error).__name__} {error}") from None


def _forgetting(r: NDArray[np.float64]) -> float | None:
    """Returns the mean forgetting; None unless each earlier task is known in the last row and in one before."""
    if len(r) < 2:
        return None
    earlier = r[:-1, :-1]
    if np.isnan(earlier).all(axis=0).any():
        return None
    return _mean(np.nanmax(earlier, axis=0) - r[-1, :-1])


def _mean(values: NDArray[np.float64]) -> float | None:
    return None if not values.size or np.isnan(values).any() else float(values.mean())


def _row(values: Any) -> tuple[float, ...]:
    # One and the same NaN everywhere, so that equal matrices are equal.
    return tuple(math.nan if value is None or math.isnan(value) else float(value) for value in values)


def _nulls(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
