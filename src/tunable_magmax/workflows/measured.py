"""`MeasuredFile`: measurements in a file, so that what was measured once is not measured again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import Progress, parse_json
from tunable_magmax.workflows.measuring import DataSet, Measurement, Measuring, Setting


class MeasuredFile:
    """Measurements in a file, an object a line: a stopped program goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.records: dict[str, dict[str, Any]] = {record["id"]: record for record in _lines(path)}

    def __contains__(self, identity: str) -> bool:
        return identity in self.records

    def add(self, record: Mapping[str, Any], right: NDArray[np.bool_]) -> None:
        """Adds a record with its key `id`, and which samples are right; one that is there already is left alone."""
        with self._lock:
            if record["id"] in self.records:
                return
            line = {**record, "right": np.packbits(right).tobytes().hex(), "samples": len(right)}
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # A line that a kill cut short must not swallow this one.
                torn = self.path.exists() and self.path.stat().st_size > 0 and not _ends_a_line(self.path)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(("\n" if torn else "") + json.dumps(line, ensure_ascii=False) + "\n")
            except OSError as error:
                raise StorageError(f"{self.path}: could not be written ({error.strerror or error})") from error
            self.records[line["id"]] = line


def unpacked(record: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Returns which samples a record says are right."""
    bits = np.frombuffer(bytes.fromhex(record["right"]), dtype=np.uint8)
    return np.unpackbits(bits, count=record["samples"]).astype(bool)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    for line in text.split("\n"):
        with suppress(ValueError, KeyError, TypeError):  # cut short by a kill
            record = parse_json(line)
            unpacked(record)
            if isinstance(record["id"], str):
                yield record


def measure_all(
    measuring: Measuring,
    settings: Iterable[tuple[Mapping[str, Any], Setting]],
    data: DataSet,
    file: MeasuredFile,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Measures many models, each with some facts for its record; those that the file holds are not measured again."""
    wanted, found = list(settings), list[Measurement]()
    for done, (facts, setting) in enumerate(wanted, 1):
        identity = measuring.identify(setting, data)
        if identity in file:
            record = file.records[identity]
            found.append(Measurement(identity, data.name, unpacked(record), float(record["scale_used"])))
        else:
            measured = measuring.measure(setting, data, identity=identity)
            file.add({"id": identity, **facts, "scale_used": measured.scale}, measured.right)
            found.append(measured)
        if progress is not None:
            progress("measuring", done, len(wanted))
    return found
