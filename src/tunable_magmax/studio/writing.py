"""The way out: models and preferences in the output folder, with progress and cancel; downloads as one stream."""

from __future__ import annotations

import io
import json
import re
import secrets
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

from tunable_magmax.checkpoints.companions import REPORT
from tunable_magmax.checkpoints.partial import Partial
from tunable_magmax.errors import InputError, shortened
from tunable_magmax.files import write_atomic
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.desk import Events, Stopped
from tunable_magmax.studio.guard import Refused, error_body
from tunable_magmax.studio.points import Preset
from tunable_magmax.workflows.measuring import Setting
from tunable_magmax.workflows.prefer import Estimation
from tunable_magmax.workflows.tailor import TailorOptions, tailor
from tunable_magmax.workflows.target import TargetReading, TargetSources

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = ("samples", "points.jsonl")
TICKETS, TICKET_SECONDS = 64, 60.0
SETTINGS = {"memory": "1GiB", "shard_size": "5GB", "base_model": None, "overwrite": False}
"""As `tmx tailor` has them, so that the shown command finds the model complete."""
PIECE = 1 << 20
MARK = "studio.json"
"""A file in the directory of unfinished work, which says that a studio writes there and the next one may remove it."""


def checked_name(name: Any, taken: tuple[str, ...] = ()) -> str:
    """Returns a name for a file or folder in the output folder, or refuses it."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.endswith((".partial", ".log")) or name in taken:
        raise InputError(
            f"{shortened(str(name))!r} cannot be a name here: use letters, digits, '-', '_' and '.', at most 64, "
            f"beginning with a letter or digit{'; taken: ' + ', '.join(taken) if taken else ''}"
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

    def to_dict(self) -> dict[str, Any]:
        """Returns it for the page."""
        files = model_files(self.path) if self.state == "done" else []
        return {
            **vars(self),
            "path": str(self.path),
            "warnings": list(self.warnings),
            "files": [file.relative_to(self.path).as_posix() for file in files],
            "bytes": sum(file.stat().st_size for file in files) if files else None,
        }


def model_files(folder: Path) -> list[Path]:
    """Returns the plain files of a model, sorted; nothing that leads out of its folder."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


@dataclass
class Writer:
    """Writes models of one run into one folder, one at a time.

    `quiet`: held while warnings are collected, which several threads cannot do at a time.
    """

    run: Run
    out: Path
    seed: int
    events: Events
    quiet: threading.Lock
    _models: dict[str, Model] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def writing(self) -> str | None:
        """The name of the model that is being written."""
        return next((model.name for model in self._models.values() if model.state == "writing"), None)

    def models(self) -> list[Model]:
        """Returns the models of the output folder, and those that were tried in this session."""
        found = dict(self._models)
        for folder in sorted(self.out.iterdir()) if self.out.is_dir() else []:
            if NAME.fullmatch(folder.name) and (folder / REPORT).is_file() and not folder.is_symlink():
                known = found.get(folder.name)
                if known is None or known.state not in ("writing", "done"):
                    found[folder.name] = Model(folder.name, folder, "done")
        return list(found.values())

    def clean(self) -> list[str]:
        """Removes models that a killed studio left unfinished; returns their names.

        What other commands left, which they can continue, and folders of the user's own have no mark and stay.
        """
        removed = []
        for folder in sorted(self.out.glob("*.partial")) if self.out.is_dir() else []:
            name = folder.name.removesuffix(".partial")
            if NAME.fullmatch(name) and not folder.is_symlink() and (folder / MARK).is_file():
                Partial(folder).discard()
                removed += [] if folder.exists() else [name]
        return removed

    def write(self, asked: Any, setting: Setting, preset: Preset | None) -> str:
        """Begins to write the model of a point as OUT/name; returns the name."""
        name = checked_name(asked, RESERVED)
        with self._lock:
            if self.writing is not None:
                raise Refused(409, f"the model {self.writing!r} is being written: wait until it is done, or cancel it")
            if (self.out / name).exists():
                raise Refused(409, f"there is a {name!r} already in {self.out}: choose another name")
            partial = self.out / f"{name}.partial"
            if partial.exists() and not (partial / MARK).is_file():
                raise Refused(409, f"{partial} is there, which is none of the studio's work: choose another name")
            self._cancelled.clear()
            self._models[name] = Model(name, self.out / name, "writing")
            self._thread = threading.Thread(target=self._write, args=(name, setting, preset), name="writer")
        self._thread.start()
        return name

    def cancel(self, name: str) -> None:
        """Cancels the writing of a model, and waits until nothing is left of it."""
        model = self._models.get(name)
        if model is None or model.state != "writing":
            raise Refused(409, f"{shortened(name)!r} is not being written, so there is nothing to cancel")
        self.stop()

    def stop(self) -> None:
        """Cancels whatever is being written."""
        self._cancelled.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout=60)

    def _write(self, name: str, setting: Setting, preset: Preset | None) -> None:
        told = 0.0

        def progress(phase: str, done: int, total: int) -> None:
            nonlocal told
            if self._cancelled.is_set():
                raise Stopped("the writing was cancelled")
            now = time.monotonic()
            if now - told > 0.1 or done == total:
                told = now
                _mark(out)
                self._tell(replace(self._models[name], phase=phase, done=done, total=total))

        out, by_file = self.out / name, preset is not None and preset.file is not None
        estimation = Estimation(seed=self.seed)
        options = TailorOptions(setting.method, setting.scale, "auto", self.seed, None, estimation, SETTINGS)
        # As the shown command does it: by the file of a preset, or by weights.
        sources = TargetSources() if by_file else TargetSources(weights=setting.preference.weights)
        try:
            progress("waiting", 0, 1)
            with self.quiet:
                self.out.mkdir(parents=True, exist_ok=True)
                made = tailor(
                    self.run,
                    sources,
                    out,
                    options,
                    TargetReading(),
                    preference=setting.preference if by_file else None,
                    progress=progress,
                )
            self._tell(Model(name, out, "done", warnings=made.warnings))
        except Stopped:
            Partial.of(out).discard()
            self._tell(Model(name, out, "cancelled"))
        except Exception as error:
            Partial.of(out).discard()
            self._tell(Model(name, out, "failed", error=error_body(error)["error"]))

    def _tell(self, model: Model) -> None:
        self._models[model.name] = model
        self.events.publish("model", model.to_dict())

    def save_preference(self, name: Any, setting: Setting) -> dict[str, Any]:
        """Writes OUT/name.json: the preference of a point, with its scale if that is a number above 0."""
        name = checked_name(name)
        file = self.out / f"{name.removesuffix('.json')}.json"
        if file.is_dir():
            raise Refused(409, f"{file} is a folder: choose another name")
        scale = setting.scale if isinstance(setting.scale, float) and setting.scale > 0 else None
        preference = replace(setting.site, scale=scale)
        preference.save(file)
        return {"file": file.name, "path": str(file), "preference": _content(preference)}


def _mark(out: Path) -> None:
    """Marks the unfinished work of a model as the studio's, once there is any."""
    partial = out.with_name(f"{out.name}.partial")
    if (partial / "fingerprint.json").is_file() and not (partial / MARK).exists():
        with suppress(OSError):  # without it the folder stays, which does no harm
            write_atomic(partial / MARK, b"{}")


def _content(preference: Preference) -> Any:
    return json.loads(preference.to_json())


# -- downloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Download:
    """Something to download: a model's folder as a zip, or its one file of weights."""

    path: Path
    file: str
    zipped: bool

    @property
    def size(self) -> int | None:
        """Bytes, if they are known beforehand."""
        return None if self.zipped else self.path.stat().st_size


class Tickets:
    """Permissions to download something once, within a minute: a link cannot send the token's header."""

    def __init__(self) -> None:
        self._tickets: dict[str, tuple[float, Download]] = {}
        self._lock = threading.Lock()

    def give(self, download: Download) -> str:
        """Returns a new ticket."""
        ticket, now = secrets.token_urlsafe(24), time.monotonic()
        with self._lock:
            alive = {key: value for key, value in self._tickets.items() if value[0] > now}
            while len(alive) >= TICKETS:
                alive.pop(next(iter(alive)))
            self._tickets = {**alive, ticket: (now + TICKET_SECONDS, download)}
        return ticket

    def take(self, ticket: str) -> Download:
        """Returns what a ticket is for; it works once."""
        with self._lock:
            until, download = self._tickets.pop(ticket, (0.0, None))
        if download is None or until < time.monotonic():
            raise Refused(404, "this download is no longer valid: ask for it again on the page")
        return download


def find_download(model: Model, what: Any) -> Download:
    """Returns the download of a model that is complete."""
    if model.state != "done":
        raise Refused(409, f"the model {model.name!r} is not complete")
    if what == "zip":
        return Download(model.path, f"{model.name}.zip", True)
    if what != "weights":
        raise InputError(f"what is {shortened(str(what))!r}, expected zip or weights")
    weights = [
        file for file in model_files(model.path) if file.name.startswith("model") and file.suffix == ".safetensors"
    ]
    if len(weights) != 1:
        raise InputError(f"the weights of {model.name!r} are {len(weights)} files: download the zip")
    return Download(weights[0], f"{model.name}.safetensors", False)


def zip_pieces(folder: Path) -> Iterator[bytes]:
    """Yields a zip of a model's folder piece by piece; weights hardly compress, so nothing is compressed."""
    sink = _Sink()
    with zipfile.ZipFile(cast(IO[bytes], sink), "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for file in model_files(folder):
            name = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            info = zipfile.ZipInfo.from_file(file, name, strict_timestamps=False)
            with file.open("rb") as source, archive.open(info, "w", force_zip64=True) as entry:
                while piece := source.read(PIECE):
                    entry.write(piece)
                    yield sink.take()
            yield sink.take()
    yield sink.take()


class _Sink(io.RawIOBase):
    """A file that can only be written to; what was written is taken out again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._parts.append(bytes(content))
        return len(content)

    def take(self) -> bytes:
        content, self._parts = b"".join(self._parts), []
        return content
