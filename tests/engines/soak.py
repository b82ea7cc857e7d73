"""Many merges in one process, and what they leave behind: run by test_soak.py, or by hand for a look.

    python tests/engines/soak.py FOLDER [MERGES] [LEAK]

Prints JSON: resident memory in KiB after each round, open files before and after, and what lies in the folders. LEAK
(memory, handle, file or thread) plants a leak, to show that it would be found.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import threading
import warnings
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sequences import SMALL, TYPES, save_sequence, sequence

import tunable_magmax as tmx
from tunable_magmax.engines.local import merge_checkpoints

SIZES = {
    "small": SMALL,
    "middle": {"a.weight": (301, 211), "b.frozen": (5000,), "c.weight": (90_001,)},
    "large": {"a.weight": (700, 1001), "b.bias": (701,), "c.weight": (300_007,)},
}
KINDS: list[dict[str, Any]] = [
    {},
    {"scope": "tensor", "scale": 0.5},
    {"weights": [1, 0, 3], "memory": "40MiB"},
    {"compare": "active", "weights": [1, 2, 0], "threads": 1},
    {"method": "magmax", "out_dtype": "float32"},
    {"method": "average", "scale": 1, "shard_size": 20_000},
    {"method": "ties", "memory": "20MiB", "threads": 1},
    {"method": "random_mix", "shard_size": 50_000},
]
ROUNDS = 5
LEAKS: list[Any] = []


class Inputs:
    """Sequences of each size and type on disk, and one of each that cannot be merged."""

    def __init__(self, folder: Path) -> None:
        self.good, self.bad = {}, {}
        for name, shapes in SIZES.items():
            for types in ("f32", "bf16", "f32+f64"):
                assert types in TYPES
                base, tasks = sequence(3, shapes, types)
                self.good[name, types] = save_sequence(folder / f"{name}-{types}", base, tasks, "mixed")
                spoiled = {key: value.clone() for key, value in tasks[1].items()}
                spoiled["a.weight"].view(-1)[5] = torch.nan
                path = folder / f"{name}-{types}" / "spoiled.safetensors"
                save_file(spoiled, path)
                paths = self.good[name, types]
                self.bad[name, types] = (paths[0], [paths[1][0], path, paths[1][2]])


def merge_once(number: int, inputs: Inputs, key: tuple[str, str], options: dict[str, Any], out: Path) -> None:
    """A merge to files, or one that fails, or is stopped half-way and then continued, or in memory."""
    if number % 10 == 3:
        try:
            merge_checkpoints(*inputs.bad[key], out / "bad", **options)
        except tmx.InputError:
            return
        raise AssertionError("NaN was merged")
    if number % 10 == 6:
        base, tasks = sequence(3, SIZES[key[0]], key[1])
        given = {name: value for name, value in options.items() if name not in ("memory", "shard_size")}
        tmx.merge_state_dicts(base, tasks, **given)
        return
    target = out / ("out.safetensors" if number % 3 == 0 and "shard_size" not in options else "out")
    if number % 10 == 8:

        def interrupt(phase: str, done: int, total: int) -> None:
            if phase == "merge":
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            merge_checkpoints(*inputs.good[key], target, overwrite=True, **options, progress=interrupt)
    merge_checkpoints(*inputs.good[key], target, overwrite=True, **options)


def leak(kind: str, out: Path) -> None:
    if kind == "memory":
        LEAKS.append(bytearray(os.urandom(1 << 10)) * 64)
    elif kind == "handle":
        LEAKS.append(open(os.devnull))  # noqa: SIM115 - never closed: that is the leak
    elif kind == "file":
        (out / f"{len(list(out.iterdir()))}.tmp").touch()
    elif kind == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def resident() -> int:
    """KiB of memory that this process holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but kept for later is no leak, and differs from run to run
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            found.append(str(entry.readlink()))
    return sorted(found)


def main(folder: Path, merges: int = 200, kind: str = "") -> dict[str, Any]:
    warnings.simplefilter("error")
    out = folder / "out"
    out.mkdir(parents=True)
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    inputs = Inputs(folder / "in")
    every = list(product(KINDS, inputs.good))
    random.Random(0).shuffle(every)
    size = merges // ROUNDS
    plan = every[:size] * ROUNDS  # rounds end alike, or they could not be compared
    rounds, handles, threads = [], [], []
    for number, (options, key) in enumerate(plan):
        merge_once(number % size, inputs, key, options, out)
        leak(kind, out)
        if (number + 1) % size == 0:
            rounds.append(resident())
            handles.append(open_files())
            threads.append(threading.active_count())
    left = sorted(path.name for place in (out, folder / "tmp") for path in place.iterdir())
    return {"merges": len(plan), "resident": rounds, "handles": handles, "threads": threads, "left": left}


if __name__ == "__main__":
    place, *rest = sys.argv[1:]
    sys.stdout.write(json.dumps(main(Path(place), *(int(rest[0]), *rest[1:]) if rest else ())) + "\n")
