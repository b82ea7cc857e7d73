"""Write a file whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunable_magmax.errors import StorageError


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
