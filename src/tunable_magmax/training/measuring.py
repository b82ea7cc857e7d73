"""The accuracy matrix R, filled as training goes: after task i, the accuracy on every task j."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.metrics import METRICS_FILE, AccuracyMatrix
from tunable_magmax.models.decoded import Decoded
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import embed_prepared
from tunable_magmax.preference.atomic import write_atomic

# Samples that are decoded at a time, where they cannot all be kept.
AT_ONCE = 4096
BATCH = 1024


@dataclass(frozen=True)
class Scores:
    """One model's accuracy on each task: among all classes, and among the task's own."""

    unknown: tuple[float, ...]
    known: tuple[float, ...]


def score_tasks(encoder: Encoder, head: Head, benchmark: Benchmark, test: Decoded) -> Scores:
    """Measure an encoder on the test samples of all tasks; NaN for a task that has none."""
    positions = sorted({position for task in benchmark.tasks for position in task.test})
    labels: dict[int, int] = {}
    logits: list[NDArray[np.float32]] = []
    weight = torch.from_numpy(head.weight).to(encoder.device)
    for start in range(0, len(positions), AT_ONCE):
        inputs = test.take(positions[start : start + AT_ONCE])
        assert inputs.labels is not None
        features = torch.nn.functional.normalize(embed_prepared(encoder, inputs, BATCH), dim=1)
        logits.append((features @ weight.T).cpu().numpy())
        labels |= dict(zip(inputs.positions, inputs.labels.tolist(), strict=True))
    table = np.concatenate(logits) if logits else np.zeros((0, len(head.classes)), np.float32)
    row = {position: k for k, position in enumerate(labels)}
    unknown, known = [], []
    for task in benchmark.tasks:
        rows = [row[position] for position in task.test if position in row]
        truth = np.array([labels[position] for position in task.test if position in row], dtype=np.int64)
        own = np.array(task.classes)
        scores = table[rows]
        unknown.append(_share(scores.argmax(axis=1) == truth))
        known.append(_share(own[scores[:, own].argmax(axis=1)] == truth))
    return Scores(tuple(unknown), tuple(known))


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
                self.known = [float(value) for value in content["task_known"][:finished]]
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{self._path}: damaged ({error}); remove {run} and train again") from None

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
        content: dict[str, Any] = self.value.to_dict() | {"task_known": self.known}
        write_atomic(self._path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _share(right: NDArray[np.bool_]) -> float:
    return float(right.mean()) if right.size else float("nan")
