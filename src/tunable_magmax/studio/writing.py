"""Models and preferences in the output folder, with progress and cancel."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError, shortened
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.guard import Refused, error_body
from tunable_magmax.studio.points import Setting
from tunable_magmax.studio.worker import Events, Stopped
from tunable_magmax.workflows.options import SiteSources, TailorOptions
from tunable_magmax.workflows.tailor import tailor

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SAMPLES = "samples"
"""The folder of uploaded samples in the output folder."""


def checked_name(name: str) -> str:
    """Returns a name for a file or folder in the output folder, or refuses it."""
    if not NAME.fullmatch(name) or name.endswith((".partial", ".log")) or name == SAMPLES:
        raise InputError(
            f"{shortened(name)!r} cannot be a name here: use letters, digits, '-', '_' and '.', at most 64, beginning "
            f"with a letter or digit; {SAMPLES} is taken"
        )
    return name


@dataclass(frozen=True)
class Model:
    """A model that is being written, or was: `state` is writing, done, cancelled or failed."""

    name: str
    path: Path
    state: str
    phase: str | None = None
    done: int = 0
    total: int = 0
    error: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    expected: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of a model that is done, the accuracy to expect with its interval: tailored, base, last."""

    def to_dict(self) -> dict[str, Any]:
        """Returns it for the page, with the bytes of its files."""
        files = self.path.rglob("*") if self.state == "done" else ()
        size = sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
        return {**vars(self), "path": str(self.path), "bytes": size or None}


@dataclass
class Writer:
    """Writes models of one run into one folder, one at a time."""

    run: Run
    out: Path
    events: Events
    models: dict[str, Model] = field(default_factory=dict)
    """Those that were tried in this session."""
    _thread: threading.Thread | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def writing(self) -> str | None:
        """The name of the model that is being written."""
        return next((model.name for model in self.models.values() if model.state == "writing"), None)

    def write(self, asked: str, setting: Setting) -> str:
        """Begins to write the model of a point as OUT/name; returns the name."""
        name = checked_name(asked)
        with self._lock:
            if self.writing is not None:
                raise Refused(409, f"the model {self.writing!r} is being written: wait until it is done, or cancel it")
            if (self.out / name).exists():
                raise Refused(409, f"there is a {name!r} already in {self.out}: choose another name")
            self._cancelled.clear()
            self.models[name] = Model(name, self.out / name, "writing")
            self._thread = threading.Thread(target=self._write, args=(name, setting), name="writer")
        self._thread.start()
        return name

    def cancel(self, name: str) -> None:
        """Cancels the writing of a model, and waits until nothing is left of it."""
        model = self.models.get(name)
        if model is None or model.state != "writing":
            raise Refused(409, f"{shortened(name)!r} is not being written, so there is nothing to cancel")
        self.stop()

    def stop(self) -> None:
        """Cancels whatever is being written."""
        self._cancelled.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout=60)

    def _write(self, name: str, setting: Setting) -> None:
        last = 0.0

        def progress(phase: str, done: int, total: int) -> None:
            nonlocal last
            if self._cancelled.is_set():
                raise Stopped("the writing was cancelled")
            now = time.monotonic()
            if now - last > 0.1 or done == total:
                last = now
                self._publish(replace(self.models[name], phase=phase, done=done, total=total))

        out, by_file = self.out / name, setting.file is not None
        # As the shown command does it: by the file of a preset, or by weights.
        scale: Any = setting.scale
        options = TailorOptions(
            out=out,
            sources=SiteSources() if by_file else SiteSources(weights=setting.preference.weights),
            preference=setting.preference if by_file else None,
            method=setting.method,
            scale=scale,
        )
        try:
            progress("reading", 0, 1)
            self.out.mkdir(parents=True, exist_ok=True)
            record = tailor(self.run, options, progress).record
            self._publish(Model(name, out, "done", warnings=record.warnings, expected=record.expected))
        except Stopped:
            self._publish(Model(name, out, "cancelled"))
        except Exception as error:
            self._publish(Model(name, out, "failed", error=error_body(error)["error"]))

    def _publish(self, model: Model) -> None:
        self.models[model.name] = model
        self.events.publish("model", model.to_dict())

    def save_preference(self, asked: str, setting: Setting) -> dict[str, Any]:
        """Writes OUT/name.json: the preference of a point, with its scale if that is a number above 0."""
        file = self.out / f"{checked_name(asked).removesuffix('.json')}.json"
        scale = setting.scale if isinstance(setting.scale, float) and setting.scale > 0 else None
        replace(setting.preference, scale=scale).save(file)
        return {"file": file.name, "path": str(file)}
