"""Reads a file at given positions, and refuses one that was changed after it was opened.

No descriptor stays open: fifty sharded checkpoints are thousands of files, more than a process may usually have open.
Nothing is mapped into memory: mapped pages would count as memory of the process, and reading a mapped file that was cut
short kills the process instead of raising an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunable_magmax.errors import InputError, StorageError

_LARGEST_READ = 1 << 30  # one system call gives at most 2 GiB


class PositionedFile:
    """A file that threads read at given positions.

    Each read compares device, inode, size and time of the last write with those at opening. The time of the last change
    of the inode is not compared: backups, new names and new permissions change it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise InputError(f"{path} is missing or not a regular file: give a checkpoint, or a directory with one")
            with open(path, "rb", buffering=0) as file:
                self._identity = _identity(os.fstat(file.fileno()))
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror or error}): check its permissions and that its disk is mounted"
            ) from error
        self.size = self._identity[2]

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes, writable) from `position` on, or raises a `StorageError`."""
        with self._open() as descriptor:
            self._read(descriptor, position, buffer)

    def refuse_changed(self) -> None:
        """Raises an `InputError` if the file is not the one that was opened, or was written to since then."""
        with self._open():
            pass

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Yields a descriptor of the file, which is unchanged before and after the block."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be opened again ({error.strerror or error}): "
                "restore it and run the same command again"
            ) from error
        try:
            self._compare(descriptor)
            yield descriptor
            self._compare(descriptor)
        finally:
            os.close(descriptor)

    def _compare(self, descriptor: int) -> None:
        if _identity(os.fstat(descriptor)) != self._identity:
            raise InputError(
                f"{self.path}: was changed after it was opened, so that old and new values would be mixed: wait until "
                "it is complete, and run the same command again"
            )

    def _read(self, descriptor: int, position: int, buffer: memoryview) -> None:
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
                raise StorageError(f"{self.path}: ends at byte {position + done}, before the end of what is read")
            done += count


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
