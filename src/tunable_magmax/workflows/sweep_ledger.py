"""Which points of a sweep are finished, in a file of the sweep's folder, so that the same sweep goes on from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.card import REPORT, is_module_folder
from tunable_magmax.checkpoints.output_path import looks_like_torch
from tunable_magmax.checkpoints.partial import Partial
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.errors import InputError
from tunable_magmax.files import write_atomic, write_json
from tunable_magmax.merging.report import MergeReport

SUMMARY = "sweep.json"
LEDGER = "sweep.state.json"


class Ledger:
    """What an earlier call has left in a sweep's folder, and what this one may skip or replace.

    `fingerprint` (JSON: options, inputs, points) tells one sweep from another. Another one is refused unless
    `overwrite`, or `fresh` if it was not finished; with `fresh`, finished points of the same sweep are made again too.
    Nothing is written before `begin`.
    """

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Any], names: Sequence[str], *, overwrite: bool, fresh: bool
    ) -> None:
        self.folder, self.names, self._fingerprint = folder, names, json.loads(json.dumps(fingerprint))
        self._done: dict[str, str] = {}
        self._ours: set[str] = set()
        self._refuse_place()
        stored = self._stored()
        self._same = stored is not None and stored["fingerprint"] == self._fingerprint
        if stored is None:
            if (folder / SUMMARY).exists() and not overwrite:
                raise InputError(
                    f"{folder} holds a sweep without its {LEDGER}, so its points can't be recognised: "
                    "choose another output, or pass overwrite (--overwrite) to replace it"
                )
        else:
            self._ours = set(stored["points"])
            if not self._same:
                self._refuse_other(stored["fingerprint"], overwrite, fresh)
            elif not fresh:
                self._done = dict(stored["done"])
        self.fresh = fresh or not self._same
        self.overwrite = overwrite

    def may_replace(self, name: str) -> bool:
        return self.overwrite or name in self._ours

    def finished(self, name: str, reports_only: bool) -> MergeReport | None:
        """The report of a point that is finished, with all its files; None if it has to be made."""
        where = self._done.get(name)
        if where is None or (where == self.report_only(name) and not reports_only):
            return None
        try:
            report = MergeReport.from_json((self.folder / where).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, InputError):
            return None
        return report if all((self.folder / name / file).is_file() for file in report.files) else None

    def where(self, name: str) -> str:
        """Where a finished point's report is, from the folder."""
        return self._done[name]

    @staticmethod
    def report_only(name: str) -> str:
        """The report of a point without weights."""
        return f"{name}.report.json"

    def check(self, names: Sequence[str]) -> None:
        """Raise what stands in the way of writing these points."""
        for name in names:
            Output.check(self.folder / name, self.may_replace(name))

    def begin(self) -> None:
        """Take the folder over for this sweep."""
        if not self._same or self.fresh:
            (self.folder / SUMMARY).unlink(missing_ok=True)
        self._ours |= set(self.names)
        self._save()

    def note(self, name: str, reports_only: bool) -> None:
        """A point is finished."""
        self._done[name] = self.report_only(name) if reports_only else f"{name}/{REPORT}"
        self._save()
        if not reports_only:
            (self.folder / self.report_only(name)).unlink(missing_ok=True)

    def finish(self, summary: bytes) -> None:
        """Write the summary, and remove the points of the sweep that this one replaced."""
        write_atomic(self.folder / SUMMARY, summary)
        for name in self._ours - set(self.names):
            point, partial = self.folder / name, Partial(self.folder / f"{name}.partial")
            if (point / REPORT).is_file() and all(i.is_file() or is_module_folder(i) for i in point.iterdir()):
                shutil.rmtree(point)
            if partial.path.exists():
                with suppress(InputError):
                    partial.lock()
                    partial.remove()
            (self.folder / self.report_only(name)).unlink(missing_ok=True)
        if self._ours != set(self.names):
            self._ours = set(self.names)
            self._save()

    def _save(self) -> None:
        state = {"fingerprint": self._fingerprint, "points": sorted(self._ours), "done": self._done}
        write_json(self.folder / LEDGER, state)

    def _stored(self) -> dict[str, Any] | None:
        try:
            stored = json.loads((self.folder / LEDGER).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.folder / LEDGER} can't be read ({error}): remove it, or choose another") from None
        kinds = {"fingerprint": dict, "points": list, "done": dict}
        if not isinstance(stored, dict) or not all(isinstance(stored.get(key), kinds[key]) for key in kinds):
            raise InputError(f"{self.folder / LEDGER} is not of a sweep: remove it, or choose another output")
        # A sweep that has left nothing need not be in anybody's way.
        left = (self.folder / f"{name}{end}" for name in stored["points"] for end in ("", ".partial", ".report.json"))
        return stored if any(path.exists() for path in left) else None

    def _refuse_place(self) -> None:
        if self.folder.name.endswith(".safetensors") or looks_like_torch(self.folder):
            raise InputError(
                f"{self.folder}: a sweep's output is a directory with one checkpoint for each point: give -o "
                f"{self.folder.with_suffix('')}, for instance"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file, but a sweep's output is a directory: choose another output")

    def _refuse_other(self, stored: Mapping[str, Any], overwrite: bool, fresh: bool) -> None:
        finished = (self.folder / SUMMARY).exists()
        if overwrite or (fresh and not finished):
            return
        keys = [k for k in {**stored, **self._fingerprint} if stored.get(k) != self._fingerprint.get(k)]
        what = "another sweep" if finished else "unfinished work of another sweep"
        todo = "pass overwrite (--overwrite) to replace it" if finished else "discard it with fresh (--fresh)"
        raise InputError(
            f"{self.folder} holds {what} (different: {', '.join(map(_words, keys))}): choose another output, or {todo}"
        )


def _words(key: str) -> str:
    return key.replace("_", " ")
