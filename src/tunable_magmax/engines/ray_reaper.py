"""Ends what a local Ray cluster leaves behind when its driver dies; a program of its own, run without the package.

Some of Ray's processes notice only after many seconds that nobody needs them. All of them have a mark in their
environment. This program waits until its stdin ends, which is when the driver does, and kills all that have the mark.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

MARK = "TMX_RAY_CLUSTER"


def marked(mark: str) -> list[int]:
    """Returns the processes that were started with this mark; none are known where there is no /proc."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.stdin.buffer.read()
    for process in marked(sys.argv[1]):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
