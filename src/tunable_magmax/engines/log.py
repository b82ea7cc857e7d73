"""Report and log of an output: when, where and of what it was made, and whether a merge would make it again."""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.companions import REPORT
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.errors import InputError
from tunable_magmax.files import append_line, parse_json, read_whole
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.version import __version__


@dataclass(frozen=True, slots=True)
class Log:
    """Time, host and paths of an output's merges, a JSON object a line.

    They are not in the output itself, because equal merges must give equal outputs.
    """

    path: Path
    out: Path
    started: float
    fingerprint: Mapping[str, Any]
    """What a finished output is recognised by."""

    def write(self, inputs: Inputs, report: MergeReport) -> None:
        """Appends a line for the merge that made `report`."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 3),
            "host": socket.gethostname(),
            "versions": {
                "tunable-magmax": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "base": str(inputs.paths[0].resolve()),
            "tasks": [str(path.resolve()) for path in inputs.paths[1:]],
            "out": str(self.out.resolve()),
            "files": dict(report.files),
            "fingerprint": self.fingerprint,
        }
        # The weights are complete, so a full disk must not make it look as if they were not.
        with suppress(OSError):
            append_line(self.path, json.dumps(entry))


def log_of(out: Path) -> Path:
    """Returns where an output's log is: beside it."""
    return out.with_name(f"{out.name}.log")


def log_entries(out: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of the log beside an output, the newest first; a line cut short by a kill is left out."""
    try:
        lines = log_of(out).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError):
            entry = parse_json(line, odd_names=True)
            if isinstance(entry, dict):
                yield entry


def report_place(out: Path) -> Path:
    """Returns where a merge's report is: in the directory, or beside a single file."""
    return out / REPORT if out.is_dir() else out.with_name(f"{out.name.removesuffix('.safetensors')}.report.json")


def read_report(path: str | Path) -> MergeReport:
    """Reads the report of a merged checkpoint; a missing or broken one is an `InputError`."""
    path = Path(path)
    place = report_place(path)
    if not path.exists() and not place.exists():
        raise InputError(f"{path} does not exist: give a merged checkpoint, a directory or a .safetensors file")
    try:
        return MergeReport.from_json(read_whole(place).decode())
    except FileNotFoundError:
        raise InputError(f"{path} has no merge report: {place} does not exist, so this is not a merge of tmx") from None
    except (OSError, ValueError, InputError) as error:
        raise InputError(f"{place}: {error}") from None


def finished_report(out: Path, fingerprint: Mapping[str, Any]) -> MergeReport | None:
    """Returns the report of an output that was made by this fingerprint, as its log says, and that has all its files.

    None: there is no such output.
    """
    try:
        report = read_report(out)
    except InputError:
        return None
    if not all(place.is_file() for place in ([out] if out.is_file() else [out / name for name in report.files])):
        return None
    made = next((entry for entry in log_entries(out) if entry.get("files") == dict(report.files)), {})
    return report if made.get("fingerprint") == json.loads(json.dumps(fingerprint)) else None
