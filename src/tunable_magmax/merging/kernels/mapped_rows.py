"""Rows of bytes in a file that is mapped, for bit planes that do not fit into the memory."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 16
"""Pages of the file come and go in aligned windows of this many bytes."""


class MappedRows:
    """Rows of equally many bytes, all 0 at first, in a file of their own that `close` removes."""

    def __init__(self, rows: int, row_bytes: int, path: Path) -> None:
        self._path, self._rows = path, rows
        self._row_bytes = -(-row_bytes // WINDOW) * WINDOW
        size = rows * self._row_bytes
        with open(path, "w+b") as file:
            # Claim the space now: a full disk must be an error here, not a SIGBUS in the middle of a loop.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                for start in range(0, size, 1 << 24):
                    file.write(bytes(min(1 << 24, size - start)))
                file.flush()
            self._map = mmap.mmap(file.fileno(), size)

    def rows(self, dtype: Any) -> NDArray[Any]:
        """Returns the rows as an array of some type."""
        return np.frombuffer(self._map, dtype).reshape(self._rows, -1)

    def release(self, start: int, stop: int, *rows: int) -> None:
        """Lets go of the memory behind bytes start:stop of some rows (-1: no row); the file keeps what they hold."""
        # Whole windows: a fault brings in all pages of one. Dropping what a neighbour uses costs a fault, never data.
        first, last = start // WINDOW * WINDOW, -(-stop // WINDOW) * WINDOW
        for row in rows:
            if row >= 0:
                self._map.madvise(mmap.MADV_DONTNEED, row * self._row_bytes + first, last - first)

    def close(self) -> None:
        """Removes the file."""
        with suppress(BufferError):  # the traceback of an error may still hold a view; the map goes with it
            self._map.close()
        self._path.unlink(missing_ok=True)
