"""Where in its file a mapped piece of memory lies, as Linux tells it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_MADV_DONTNEED = 4


class FileMapping:
    """The mappings of one file in this process at the time of construction; none known on other systems than Linux.

    Only memory that lies in such a mapping may be let go: pages of the heap would silently become zeros.
    """

    def __init__(self, path: Path) -> None:
        self._ranges = _ranges(path) if sys.platform == "linux" else []

    def position(self, address: int, size: int) -> int | None:
        """The position in the file of the `size` bytes at `address`, or None if they are not known to be mapped."""
        for start, stop, offset in self._ranges:
            if start <= address and address + size <= stop:
                return offset + address - start
        return None

    def let_go(self, address: int, size: int) -> None:
        """Drop mapped pages from memory. They come back from the file when touched again."""
        if self.position(address, size) is None:
            return
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = -(-address // page) * page, (address + size) // page * page
        if first < last:
            # Its failure costs memory, not correctness.
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _ranges(path: Path) -> list[tuple[int, int, int]]:
    """(start, stop, position in the file) of each mapping of the file."""
    status = path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    name = str(path.resolve())
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, offset, on, inode, *rest = line.rstrip("\n").split(maxsplit=5)
            # Some file systems (btrfs) show another device here than to stat; then the name must be the same.
            if int(inode) == status.st_ino and (on == device or rest == [name]):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((start, stop, int(offset, 16)))
    return found
