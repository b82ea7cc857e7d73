"""What training says while it runs: JSON lines always, TensorBoard if asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import write_atomic
from tunable_magmax.training.trainer import Tick

RECORDS = "records.jsonl"


class Tracker:
    """Appends records to records.jsonl, each complete as soon as it is told; a context manager."""

    def __init__(self, run: Path, tensorboard: bool = False) -> None:
        self._path = run / RECORDS
        self._board: Any = _board(run / "tensorboard") if tensorboard else None
        self._planned = _earlier(self._path) if tensorboard else {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.close()

    def rewind(self, task: int, step: int) -> None:
        """Drop what an interrupted run recorded of steps that will be taken again."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _stays(line, task, step)]
        write_atomic(self._path, "".join(f"{line}\n" for line in kept).encode())

    def tick(self, tick: Tick) -> None:
        """One record of a task's progress."""
        self.tell("step", **(asdict(tick) | {"task": tick.task + 1}))
        if self._board is not None:
            self._planned[tick.task] = tick.steps
            step = sum(steps for task, steps in self._planned.items() if task < tick.task) + tick.step
            self._board.add_scalar("loss", tick.loss, step)
            self._board.add_scalar("learning rate", tick.rate, step)
            self._board.add_scalar("samples per second", tick.samples_per_second, step)

    def accuracies(self, task: int, values: Mapping[str, float]) -> None:
        """The accuracy on each task after a task, where TensorBoard shows it."""
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"accuracy/{name}", value, task)

    def tell(self, kind: str, **values: Any) -> None:
        """One record, with the time."""
        record = {"kind": kind, "time": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise StorageError(f"{self._path}: could not be written ({error.strerror or error})") from error


def _stays(line: str, task: int, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False  # the last line of a killed run may be cut off
    at = record.get("task", 0)
    return bool(at < task or (at == task and record.get("kind") == "step" and record["step"] <= step))


def training_seconds(run: Path) -> float:
    """How long a run's finished tasks took to train, whichever call trained them.

    Of a task that was stopped in the middle, only what came after its last start counts.
    """
    return float(sum(record["seconds"] for record in _told(run / RECORDS)))


def _earlier(path: Path) -> dict[int, int]:
    """How many steps the finished tasks (from 0) of an earlier call took."""
    return {record["task"] - 1: record["steps"] for record in _told(path)}


def _told(path: Path) -> list[dict[str, Any]]:
    """What was recorded of each finished task."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    # The last line of a killed run may be cut off, and is no task's then.
    return [json.loads(line) for line in lines if line.startswith('{"kind": "task"') and line.endswith("}")]


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(folder)
