"""What training records: JSON lines always, the accuracy matrix and TensorBoard if asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from math import isnan, nan
from pathlib import Path
from typing import Any

from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.evaluation.accuracy import Accuracy
from tunable_magmax.evaluation.evaluator import Evaluator, label_benchmark
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.files import parse_json, write_atomic
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import Decoded
from tunable_magmax.runs.run import Run
from tunable_magmax.training.trainer import Tick

RECORDS_FILE = "records.jsonl"


class Tracker:
    """Appends records to records.jsonl, each at once; a context manager."""

    def __init__(self, run: Path, tensorboard: bool = False) -> None:
        self._path = run / RECORDS_FILE
        self._board: Any = _board(run / "tensorboard") if tensorboard else None
        self._planned = _earlier(self._path) if tensorboard else {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.close()

    def rewind(self, task: int, step: int) -> None:
        """Removes what an interrupted run recorded of steps that will be taken again."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _stays(line, task, step)]
        write_atomic(self._path, "".join(f"{line}\n" for line in kept).encode())

    def tick(self, tick: Tick) -> None:
        """Records a task's progress."""
        self.write("step", **(asdict(tick) | {"task": tick.task + 1}))
        if self._board is not None:
            self._planned[tick.task] = tick.steps
            step = sum(steps for task, steps in self._planned.items() if task < tick.task) + tick.step
            self._board.add_scalar("loss", tick.loss, step)
            self._board.add_scalar("learning rate", tick.rate, step)
            self._board.add_scalar("samples per second", tick.samples_per_second, step)

    def accuracies(self, task: int, values: Mapping[str, float]) -> None:
        """Shows the accuracy on each task after a task in TensorBoard."""
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"accuracy/{name}", value, task)

    def write(self, kind: str, **values: Any) -> None:
        """Writes one record, with the time."""
        record = {"kind": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise StorageError(f"{self._path}: could not be written ({error.strerror or error})") from error


def _stays(line: str, task: int, step: int) -> bool:
    try:
        record = parse_json(line)
    except ValueError:
        return False  # the last line of a killed run may be cut off
    at = record.get("task", 0)
    return bool(at < task or (at == task and record.get("kind") == "step" and record["step"] <= step))


def training_seconds(run: Path) -> float:
    """Returns how long a run's finished tasks took to train, whichever call trained them.

    Of a task that was stopped in the middle, only what came after its last start counts.
    """
    return float(sum(record["seconds"] for record in _task_records(run / RECORDS_FILE)))


def _earlier(path: Path) -> dict[int, int]:
    """Returns how many steps the finished tasks (from 0) of an earlier call took."""
    return {record["task"] - 1: record["steps"] for record in _task_records(path)}


def _task_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of finished tasks."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    # The last line of a killed run may be cut off.
    return [parse_json(line) for line in lines if line.startswith('{"kind": "task"') and line.endswith("}")]


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(folder)


TEST_BATCH = 1024


def task_evaluator(encoder: Encoder, head: Head, benchmark: Benchmark, test: Decoded) -> Evaluator:
    """Returns what measures an encoder on the test samples of all tasks."""
    labelled = label_benchmark(benchmark, head.classes)
    return Evaluator(encoder, head, labelled, batch=TEST_BATCH, prepared=test.take(labelled.positions))


def or_null(accuracy: float) -> float | None:
    """Returns None for NaN, which JSON does not have."""
    return None if isnan(accuracy) else accuracy


class RunMatrix:
    """R of a run, kept in its metrics.json. `known`: after each task, the accuracy on it among its own classes."""

    def __init__(self, run: Run, benchmark: Benchmark) -> None:
        self._run, self._benchmark = run, benchmark
        self._rows: list[tuple[float, ...]] = []
        self._base: tuple[float, ...] | None = None
        self.known: list[float] = []
        finished, metrics = len(run.tasks), run.read_metrics()
        if metrics is not None:
            try:
                before = AccuracyMatrix.from_dict(metrics)
                self._base, self._rows = before.base, list(before.rows[:finished])
                self.known = [nan if value is None else float(value) for value in metrics["task_known"][:finished]]
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"metrics.json: damaged ({error}); remove {run.path} and train again") from None
        # Where the file is gone, what was measured is not known any more.
        self._rows += [(nan,) * len(benchmark.tasks)] * (finished - len(self._rows))
        self.known += [nan] * (finished - len(self.known))

    @property
    def value(self) -> AccuracyMatrix:
        tasks = self._benchmark.tasks
        return AccuracyMatrix.of([t.name for t in tasks], self._rows, self._base, [len(t.test) for t in tasks])

    def start(self, accuracy: Accuracy) -> None:
        """Takes the base's accuracy, before any task."""
        self._base = _by_task(accuracy)

    def add(self, t: int, accuracy: Accuracy) -> None:
        """Adds the accuracy after task t (from 0), and saves metrics.json."""
        self._rows.append(_by_task(accuracy))
        self.known.append(list((accuracy.known_by_task or {}).values())[t].value)
        self._run.write_metrics(self.value.to_dict() | {"task_known": [*map(or_null, self.known)]})


def _by_task(accuracy: Accuracy) -> tuple[float, ...]:
    """Returns the accuracy on each task among all classes, NaN for a task without tests."""
    return tuple(share.value for share in accuracy.by_task.values())
