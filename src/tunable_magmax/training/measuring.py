"""The accuracy matrix R, filled as training goes: after task i, the accuracy on every task j."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.evaluator import Evaluator, label_benchmark
from tunable_magmax.evaluation.metrics import METRICS_FILE, AccuracyMatrix
from tunable_magmax.files import write_json
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import Decoded

BATCH = 1024


@dataclass(frozen=True)
class Scores:
    """One model's accuracy on each task: among all classes, and among the task's own. NaN for a task without tests."""

    unknown: tuple[float, ...]
    known: tuple[float, ...]


def task_evaluator(encoder: Encoder, head: Head, benchmark: Benchmark, test: Decoded) -> Evaluator:
    """What measures an encoder on the test samples of all tasks."""
    labelled = label_benchmark(benchmark, head.classes)
    return Evaluator(encoder, head, labelled, batch=BATCH, prepared=test.take(labelled.positions))


def score_tasks(evaluator: Evaluator) -> Scores:
    """Measure the evaluator's encoder as it is now."""
    found = evaluator.measure()
    assert found.known_by_task is not None
    unknown, known = (
        tuple(share.value for share in shares.values()) for shares in (found.by_task, found.known_by_task)
    )
    return Scores(unknown, known)


def or_null(accuracy: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if isnan(accuracy) else accuracy


class Matrix:
    """R of a run, kept in its metrics.json. `known`: after each task, the accuracy on it among its own classes."""

    def __init__(self, run: Path, benchmark: Benchmark, finished: int) -> None:
        self._path, self._benchmark = run / METRICS_FILE, benchmark
        self._rows: list[tuple[float, ...]] = []
        self._base: tuple[float, ...] | None = None
        self.known: list[float] = []
        if self._path.exists():
            before = AccuracyMatrix.load(self._path)
            self._base, self._rows = before.base, list(before.rows[:finished])
            try:
                content = json.loads(self._path.read_text(encoding="utf-8"))
                self.known = [nan if value is None else float(value) for value in content["task_known"][:finished]]
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{self._path}: damaged ({error}); remove {run} and train again") from None
        # Where the file is gone, what was measured is not known any more.
        self._rows += [(nan,) * len(benchmark.tasks)] * (finished - len(self._rows))
        self.known += [nan] * (finished - len(self.known))

    @property
    def value(self) -> AccuracyMatrix:
        tasks = self._benchmark.tasks
        return AccuracyMatrix.of([t.name for t in tasks], self._rows, self._base, [len(t.test) for t in tasks])

    def start(self, scores: Scores) -> None:
        """The base's accuracies, before any task."""
        self._base = scores.unknown

    def add(self, t: int, scores: Scores) -> None:
        """The accuracies after task t (from 0)."""
        self._rows.append(scores.unknown)
        self.known.append(scores.known[t])

    def write(self) -> None:
        """Save metrics.json."""
        content: dict[str, Any] = self.value.to_dict() | {"task_known": [*map(or_null, self.known)]}
        write_json(self._path, content)
