"""Reads many files at given positions with few open descriptors.

Fifty sharded checkpoints are thousands of files, more than the usual limit of 1024 (256 on macOS) open ones. Raising
the limit would change the whole process and may not be permitted, so a process keeps at most `LIMIT` files open here
(more only while more threads than that read), least recently used closed first, and opens them again when needed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.lottery import GOLDEN

LIMIT = 96
_LARGEST_READ = 1 << 30  # one system call gives at most 2 GiB
_SAMPLES = 16
_SAMPLE_BYTES = 64

_lock = threading.Lock()
_open: OrderedDict[PositionedFile, int] = OrderedDict()
_users: dict[PositionedFile, int] = {}


class PositionedFile:
    """A file that threads read at given positions. If it is changed after it was opened, that is an error.

    Times tell of most changes, but not of all: they tick slowly, and a page that was mapped and written to before it
    was opened can be written to again unseen. So the first bytes of a few reads, spread over the file, are remembered
    and compared with what the same places hold later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise InputError(
                    f"{path} is not a regular file: give a safetensors or torch checkpoint, or a directory"
                )
            with open(path, "rb", buffering=0) as file:
                self._opened = os.fstat(file.fileno())
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror or error}): check its permissions and that its disk is mounted"
            ) from error
        self.size = self._opened.st_size
        self._samples: dict[int, bytes] = {}
        self._rarest = 1 << 64  # positions whose number is smaller are sampled
        self._closed = False

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes, writable) from `position` on, or raises a `StorageError`."""
        with self._descriptor() as descriptor:
            self._read(descriptor, position, buffer)
        if _number(position) < self._rarest and buffer.nbytes:
            self._sample(position, bytes(buffer[:_SAMPLE_BYTES]))

    def refuse_changed(self) -> None:
        """Raises an `InputError` if the file that was read is not as it was when it was opened.

        One that was replaced by another file of the same name is: what was read is the old one.
        """
        with self._descriptor() as descriptor:
            if not self._unchanged(os.fstat(descriptor)):
                raise self._changed()
            for position, sample in self._samples.copy().items():
                again = bytearray(len(sample))
                self._read(descriptor, position, memoryview(again))
                if again != sample:
                    raise self._changed()

    def sha256(self) -> str:
        """Returns the digest of the file that is read here, whatever has its name now."""
        digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
        with self._descriptor() as descriptor:
            for start in range(0, self.size, block.nbytes):
                part = block[: self.size - start]
                self._read(descriptor, start, part)
                digest.update(part)
        return digest.hexdigest()

    def close(self) -> None:
        with _lock:
            self._closed = True
            if not _users.get(self):
                _close(self)

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
                raise StorageError(
                    f"{self.path}: ends at byte {position + done}, though it had {self.size} bytes when it was "
                    "opened: it was cut short meanwhile; restore it and run the same command again"
                )
            done += count

    def _sample(self, position: int, start: bytes) -> None:
        """Remembers how a read began, or compares it with the last one from there; few places of all are kept."""
        with _lock:
            known = self._samples.get(position, b"")
            if len(start) > len(known):
                self._samples[position] = start
            if len(self._samples) > _SAMPLES:
                del self._samples[max(self._samples, key=_number)]
                self._rarest = max(map(_number, self._samples)) + 1
        if not start.startswith(known) and not known.startswith(start):
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(
            f"{self.path}: was changed after it was opened, so that old and new values would be mixed: wait until it "
            "is complete, and run the same command again"
        )

    def _unchanged(self, now: os.stat_result) -> bool:
        """Whether this is the file that was opened, and nothing says that it was written to."""
        then = self._opened
        if _identity(now) != _identity(then):
            return False
        # The time of the last change can't be put back. Other names, owners and rights change it as well.
        return now.st_ctime_ns == then.st_ctime_ns or _rights(now) != _rights(then) or not self._has_its_name(now)

    def _has_its_name(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(self.path.stat(), status)
        except OSError:
            return False

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Yields a descriptor that stays open for so long."""
        descriptor = self._acquire()
        try:
            yield descriptor
        finally:
            self._release()

    def _acquire(self) -> int:
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
        if not self._unchanged(os.fstat(descriptor)):
            os.close(descriptor)
            raise self._changed()
        return descriptor


def _number(position: int) -> int:
    """Returns a number by which the places to sample are drawn, the same ones in every walk."""
    return (position + 1) * GOLDEN % (1 << 64)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _rights(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_nlink, status.st_mode, status.st_uid, status.st_gid


def _close(file: PositionedFile) -> None:
    descriptor = _open.pop(file, None)
    if descriptor is not None:
        os.close(descriptor)
