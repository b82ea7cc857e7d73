"""Reads many files at given positions with few open descriptors.

Fifty sharded checkpoints are thousands of files, more than the usual limit of 1024 (256 on macOS) open ones. Raising
the limit would change the whole process and may not be permitted, so a process keeps at most `LIMIT` files open here
(more only while more threads than that read), least recently used closed first, and opens them again when needed.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from tunable_magmax.errors import InputError, StorageError

LIMIT = 96
_LARGEST_READ = 1 << 30  # one system call gives at most 2 GiB

_lock = threading.Lock()
_open: OrderedDict[PositionedFile, int] = OrderedDict()
_users: dict[PositionedFile, int] = {}


class PositionedFile:
    """A file that threads read at given positions. If it is changed after it was opened, reading is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise InputError(
                    f"{path} is not a regular file: give a safetensors or torch checkpoint, or a directory"
                )
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror or error}): check its permissions and that its disk is mounted"
            ) from error
        self.size = status.st_size
        self._identity = _identity(status)
        self._closed = False

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes, writable) from `position` on, or raises a `StorageError`."""
        descriptor = self._acquire()
        try:
            done = 0
            while done < buffer.nbytes:
                try:
                    count = os.preadv(descriptor, [buffer[done : done + _LARGEST_READ]], position + done)
                except OSError as error:
                    raise StorageError(
                        f"{self.path}: reading failed at byte {position + done} ({error.strerror or error}): "
                        "check the disk and run the same command again"
                    ) from error
                if count == 0:
                    raise StorageError(
                        f"{self.path}: ends at byte {position + done}, though it had {self.size} bytes when it was "
                        "opened: it was cut short meanwhile; restore it and run the same command again"
                    )
                done += count
        finally:
            self._release()

    def close(self) -> None:
        with _lock:
            self._closed = True
            if not _users.get(self):
                _close(self)

    def _acquire(self) -> int:
        """Returns a descriptor that stays open until `_release`."""
        with _lock:
            if self._closed:
                raise ValueError(f"{self.path}: the checkpoint is closed")
            descriptor = _open.get(self)
            if descriptor is None:
                descriptor = _open[self] = self._reopen()
            _open.move_to_end(self)
            _users[self] = _users.get(self, 0) + 1
            if len(_open) > LIMIT:
                idle = [file for file in _open if file not in _users]
                for file in idle[: len(_open) - LIMIT]:
                    _close(file)
        return descriptor

    def _release(self) -> None:
        with _lock:
            _users[self] -= 1
            if not _users[self]:
                del _users[self]
                if self._closed:
                    _close(self)

    def _reopen(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be opened again ({error.strerror or error}): "
                "restore it and run the same command again"
            ) from error
        if _identity(os.fstat(descriptor)) != self._identity:
            os.close(descriptor)
            raise StorageError(f"{self.path}: was changed after it was opened; run the same command again")
        return descriptor


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _close(file: PositionedFile) -> None:
    descriptor = _open.pop(file, None)
    if descriptor is not None:
        os.close(descriptor)
