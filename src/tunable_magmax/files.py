"""Write a file whole or not at all."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError, StorageError

_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_size(size: int | str, what: str) -> int:
    """Bytes from a number or from text such as "512MiB" (binary), "5GB" (decimal) or "2g" (binary).

    >>> parse_size("512MiB", "memory"), parse_size("5GB", "shard size"), parse_size(1024, "memory")
    (536870912, 5000000000, 1024)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{what} is {size!r}, expected a size such as 512MiB, 5GB or a number of bytes")
    amount = (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )
    if amount <= 0:
        raise InputError(f"{what} is {size!r}, expected more than nothing")
    return amount


def show_size(amount: float) -> str:
    """Bytes for people.

    >>> show_size(345_000_000), show_size(12)
    ('329.0 MiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file beside it, so that readers see the old or the new."""
    scratch: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; give it the mode that a plain open() would have.
        umask = os.umask(0)
        os.umask(umask)
        Path(scratch).chmod(0o666 & ~umask)
        Path(scratch).replace(path)
        scratch = None
    except OSError as error:
        raise StorageError(f"{path}: could not be written ({error.strerror or error})") from error
    finally:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, in the same manner."""
    write_atomic(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
