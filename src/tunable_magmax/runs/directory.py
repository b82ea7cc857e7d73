"""The run directory that training fills: what is there, what it was made with, and writing each part whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import write_atomic, write_json
from tunable_magmax.runs.run import HEAD_FILE, RUN_FILE, RUN_VERSION
from tunable_magmax.training.config import differences
from tunable_magmax.training.trainer import Midway

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.yaml"
SETUP = "training.json"
BASE = "base"
SNAPSHOT = "snapshot.safetensors"
STATES = "regulariser"
# What `write_atomic` calls a file until it is complete.
UNFINISHED = re.compile(r"\..+\.(json|jsonl|safetensors|yaml)\.[a-z0-9_]{8}")


@dataclass(frozen=True)
class RunDirectory:
    """A directory of one training run. Every file and folder in it appears whole or not at all."""

    path: Path

    @property
    def base(self) -> Path:
        return self.path / BASE

    @property
    def head(self) -> Path:
        return self.path / HEAD_FILE

    def claim(self, record: Mapping[str, Any]) -> None:
        """Make the directory, or check that it was made with the same configuration."""
        import yaml

        file = self.path / CONFIG
        content = yaml.safe_dump(dict(record), sort_keys=False, allow_unicode=True).encode()
        if not file.exists():
            if self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir()))):
                raise InputError(f"{self.path} exists and is no training run; choose another directory with -o")
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot be made ({error.strerror or error})") from error
            self._sweep()
            write_atomic(file, content)
            return
        self._sweep()
        try:
            before = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(f"{file}: cannot be read ({error}); choose another directory with -o") from None
        changed = differences(before if isinstance(before, dict) else {}, dict(record))
        if changed and not self.base.exists():
            write_atomic(file, content)  # nothing was made yet: the first try failed, and the configuration was mended
        elif changed:
            raise InputError(
                f"{self.path} is a run of another configuration; choose another directory with -o, or undo this:\n"
                + "\n".join(f"  - {line}" for line in changed)
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make sure that no other process trains here; the system lets go of the lock when a process dies."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another process trains in {self.path}: wait until it is done, or choose another directory with -o"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove files that a killed run had begun to write."""
        for folder in (self.path, self.path / "profiles", self.path / STATES):
            for item in folder.glob(".*"):
                if UNFINISHED.fullmatch(item.name) and item.is_file():
                    item.unlink(missing_ok=True)

    def check_setup(self, setup: Mapping[str, Any]) -> None:
        """Write what the run stands on, or check that its digests and data are still the same."""
        file = self.path / SETUP
        if not file.exists():
            write_json(file, setup)
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: damaged ({error}); remove {self.path} and train again") from None
        now = json.loads(json.dumps(setup))
        changed = [
            line
            for part in ("digests", "benchmark")
            for line in differences(before.get(part, {}), now[part], f"{part}.")
        ]
        if changed:
            raise InputError(
                f"{file}: the run was begun with other data; put it back, or choose another directory with -o:\n"
                + "\n".join(f"  - {line}" for line in changed)
            )

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A place for work that is removed afterwards; what a killed run left there is removed first."""
        place = self.path / f"{name}.partial"
        shutil.rmtree(place, ignore_errors=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def finished(self) -> list[dict[str, Any]]:
        """What run.json says of the tasks that are done, in training order."""
        file = self.path / RUN_FILE
        if not file.exists():
            return []
        try:
            tasks = json.loads(file.read_text(encoding="utf-8"))["tasks"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: damaged ({error}); remove {self.path} and train again") from None
        for task in tasks:
            if not (self.path / task["checkpoint"]).exists():
                raise InputError(f"{file}: {task['checkpoint']} is gone; remove {self.path} and train again")
        found: list[dict[str, Any]] = tasks
        return found

    def write_run(self, tasks: Sequence[Mapping[str, Any]], planned: int, benchmark: Mapping[str, Any]) -> None:
        """Enter the finished tasks; what `prefer`, `merge` and `eval` read."""
        run = {
            "version": RUN_VERSION,
            "base": BASE,
            "tasks": list(tasks),
            "planned_tasks": planned,
            "classifier": {"head": HEAD_FILE, "checkpoint": BASE},
            "benchmark": benchmark,
        }
        write_json(self.path / RUN_FILE, run)

    def vacant(self, name: str) -> Path:
        """A place for a new folder; what a killed run left there is removed."""
        place = self.path / name
        try:
            if place.exists():
                shutil.rmtree(place)
        except OSError as error:
            raise StorageError(f"{place}: could not be replaced ({error.strerror or error})") from error
        return place

    # -- the middle of a task --------------------------------------------------------------------------------------

    def write_snapshot(self, task: int, step: int, state: Mapping[str, Tensor]) -> None:
        """Keep the middle of a task (from 0); replaces the one before."""
        self._save(SNAPSHOT, state, {"task": str(task), "step": str(step)})

    def read_snapshot(self, task: int) -> Midway | None:
        """The middle of this task, if an interrupted run left one."""
        from safetensors import SafetensorError, safe_open

        file = self.path / SNAPSHOT
        if not file.exists():
            return None
        try:
            with safe_open(str(file), framework="pt") as opened:
                about = opened.metadata() or {}
                if about.get("task") != str(task):
                    return None
                names = list(opened.keys())
                return Midway(int(about["step"]), {name: opened.get_tensor(name) for name in names})
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{file}: damaged ({error}); remove it, and the task starts again") from None

    def drop_snapshot(self) -> None:
        """The task is finished."""
        (self.path / SNAPSHOT).unlink(missing_ok=True)

    # -- what a regulariser carries from task to task --------------------------------------------------------------

    def write_regulariser(self, task: int, state: Mapping[str, Tensor]) -> None:
        """Keep what holds after a task (from 0); the state before it stays until the task after this one is done."""
        if state:
            self._save(f"{STATES}/{task}.safetensors", state, {})
            (self.path / STATES / f"{task - 2}.safetensors").unlink(missing_ok=True)

    def read_regulariser(self, task: int) -> dict[str, Tensor]:
        """What held after a task."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.path / STATES / f"{task}.safetensors"
        try:
            return load_file(file) if file.exists() else {}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: damaged ({error}); remove {self.path} and train again") from None

    def drop_regulariser(self) -> None:
        """No task will follow."""
        shutil.rmtree(self.path / STATES, ignore_errors=True)

    def _save(self, name: str, tensors: Mapping[str, Tensor], about: dict[str, str]) -> None:
        from safetensors.torch import save

        write_atomic(self.path / name, save({k: v.contiguous().cpu() for k, v in tensors.items()}, about))


def _is_foreign(item: Path) -> bool:
    return UNFINISHED.fullmatch(item.name) is None
