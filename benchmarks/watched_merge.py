"""One file-to-file merge, watched: what `larger_than_memory.py` runs in a process of its own. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tunable_magmax as tmx
from tunable_magmax.checkpoints import writer
from tunable_magmax.checkpoints.descriptors import PositionedFile
from tunable_magmax.engines import local, vectors
from tunable_magmax.merging import stream
from tunable_magmax.merging.kernels.native import NativeKernels
from tunable_magmax.merging.methods import TunableMagmax
from tunable_magmax.merging.resources import AHEAD

wall: dict[str, float] = {}
cpu: dict[str, float] = {}
KERNELS = {"survey": ["survey", "squared_distance"], "auction": ["split", "tally", "claim", "retire", "unite"]}
KERNELS["gather"] = ["gather", "square", "step"]
READ = PositionedFile._read
_lock = threading.Lock()


def watch(owner: Any, name: str, title: str, into: dict[str, float], clock: Callable[[], float]) -> None:
    """Let a function count the seconds it takes, by a clock: the wall's, or its thread's."""
    original: Callable[..., Any] = getattr(owner, name)

    def timed(*given: Any, **named: Any) -> Any:
        start = clock()
        try:
            return original(*given, **named)
        finally:
            with _lock:
                into[title] = into.get(title, 0.0) + clock() - start

    setattr(owner, name, timed)


def read_and_forget(file: PositionedFile, descriptor: int, position: int, buffer: memoryview) -> None:
    """Read, and drop from the cache what was read."""
    READ(file, descriptor, position, buffer)
    os.posix_fadvise(descriptor, position, buffer.nbytes, os.POSIX_FADV_DONTNEED)


def slow_disk(bytes_per_second: float) -> Callable[[PositionedFile, int, int, memoryview], None]:
    """Reading from one disk of a given speed, whatever the real one is: readers queue, and use no CPU meanwhile."""
    disk = threading.Lock()

    def read(file: PositionedFile, descriptor: int, position: int, buffer: memoryview) -> None:
        with disk:
            time.sleep(buffer.nbytes / bytes_per_second)
        READ(file, descriptor, position, buffer)

    return read


def peak() -> int:
    """The high-water mark of the resident set, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    job = json.loads(sys.argv[1])
    tmx.merge_state_dicts({"w": torch.zeros(70)}, [{"w": torch.ones(70)}])  # loads the compiled kernels
    if not job["warm"]:
        for path in job["paths"]:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        PositionedFile._read = read_and_forget
    if job["disk"]:
        PositionedFile._read = slow_disk(job["disk"])
    if not job["prefetch"]:
        plan = stream.plan_memory

        def alone(*given: Any, **named: Any) -> stream.MemoryPlan:
            found = plan(*given, **named)
            return replace(found, pool=found.ahead // AHEAD)

        stream.plan_memory = alone
    watch(PositionedFile, "_read", "read", cpu, time.thread_time)
    watch(vectors, "widen", "cast", cpu, time.thread_time)
    for title, names in KERNELS.items():
        for name in names:
            watch(NativeKernels, name, title, cpu, time.thread_time)
    watch(writer, "_write_all", "write", cpu, time.thread_time)
    watch(stream.Merge, "survey", "survey", wall, time.perf_counter)
    watch(TunableMagmax, "decide", "auction", wall, time.perf_counter)
    watch(stream.Merge, "measure", "measure", wall, time.perf_counter)
    watch(local, "write_weights", "gather and write", wall, time.perf_counter)
    imports, start, before = peak(), time.perf_counter(), time.process_time()
    base, *tasks = job["paths"]
    scale = job["given"].pop("scale")
    scale = scale if scale == "matched" else float(scale)
    tmx.merge_checkpoints(base, tasks, job["out"], memory=job["memory"], scale=scale, overwrite=True, **job["given"])
    seconds = time.perf_counter() - start
    cpu["in all"] = time.process_time() - before
    print(json.dumps({"seconds": seconds, "imports": imports, "peak": peak(), "wall": wall, "cpu": cpu}))


if __name__ == "__main__":
    main()
