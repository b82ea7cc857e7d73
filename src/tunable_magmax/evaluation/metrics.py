"""Computes what a sequence of tasks gains and forgets from its accuracy matrix: R[i, j] after task i, on task j.

T is the last task that was trained, so a run that is not finished has metrics of the tasks so far. All are means over
tasks, whatever the number of samples:

| metric | definition |
| --- | --- |
| average accuracy | over j <= T of R[T, j] |
| forgetting | over j < T of max over i < T of R[i, j], less R[T, j] (Chaudhry et al. 2018); positive is worse |
| backward transfer | over j < T of R[T, j] - R[j, j] (Lopez-Paz and Ranzato 2017); negative is worse |
| forward transfer | over 1 < j <= T of R[j - 1, j] - R[0, j], where R[0] is the base (they take random weights) |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, repr=False)
class AccuracyMatrix:
    """The rows of the matrix R [trained tasks, tasks], NaN where a task has no samples.

    `base`: the row of the base, before any task; `samples`: how many samples of each task stand behind a column.

    >>> r = AccuracyMatrix(("birds", "cars"), ((0.9, 0.1), (0.6, 0.8)), base=(0.5, 0.4))
    >>> {name: round(value, 3) for name, value in r.metrics().items()}
    {'average accuracy': 0.7, 'forgetting': 0.3, 'backward transfer': -0.3, 'forward transfer': -0.3}
    """

    tasks: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    base: tuple[float, ...] | None = None
    samples: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        known = ", ".join(f"{name} {value:.1%}" for name, value in self.metrics().items() if value is not None)
        return f"AccuracyMatrix({len(self.tasks)} tasks; {known})"

    def metrics(self) -> dict[str, float | None]:
        """Returns average accuracy, forgetting, backward and, with a base, forward transfer; None if not known."""
        r, last = np.array(self.rows, dtype=np.float64), len(self.rows)
        earlier = r[:-1, : last - 1]
        values: dict[str, float | None] = {
            "average accuracy": _mean(r[-1, :last]),
            "forgetting": _mean(earlier.max(axis=0) - r[-1, : last - 1]) if last > 1 else None,
            "backward transfer": _mean(r[-1, : last - 1] - r.diagonal()[: last - 1]),
        }
        if self.base is not None:
            values["forward transfer"] = _mean(r.diagonal(1)[: last - 1] - np.array(self.base)[1:last])
        return values

    def to_dict(self) -> dict[str, Any]:
        """Returns the matrix and the metrics."""
        base = None if self.base is None else _nulls(self.base)
        about = {"tasks": list(self.tasks), "samples": None if self.samples is None else list(self.samples)}
        return {**about, "base": base, "matrix": [_nulls(row) for row in self.rows], "metrics": self.metrics()}


def _mean(values: NDArray[np.float64]) -> float | None:
    return None if not values.size or np.isnan(values).any() else float(values.mean())


def _nulls(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
