"""The same merge by 1 and 2 workers of a Ray cluster on this machine: time by phase, and bytes that travel.

    python benchmarks/cluster.py [--workers 1 2] [--tasks 4] [--threads 1] [--repeat 2]

ViT-B/16's image tower, float32, merged by tunable_magmax with a matched scale into shards of 50 MB. Files are in the
page cache, so that computing is compared and not disks. Starting Ray and its workers is told apart: it is paid once for
a merge and does not grow with it. Of several runs the fastest counts, by phase. Outputs are compared by SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from vit import next_task, random_base

from tunable_magmax.engines import cluster
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.workers import Call, RayWorkers

PHASES = {"look": "survey", "auction_steps": "auction", "auctions": "auction", "settle": "auction", "write": "write"}
SHOWN = ("survey", "auction", "measure", "write")
seconds: Counter[str] = Counter()
travelled: Counter[str] = Counter()


class Measured(RayWorkers):
    """Keeps the time and the bytes of calls."""

    def each(self, calls: deque[Call]) -> Iterator[tuple[Call, Any]]:
        began = time.perf_counter()
        phase = PHASES.get(calls[0].name, calls[0].name) if calls else "none"
        for call, answer in super().each(calls):
            travelled[phase] += len(pickle.dumps(call.arguments)) + len(pickle.dumps(answer))
            yield call, answer
        seconds[phase] += time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="threads of a worker")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    cluster.RayWorkers = Measured  # type: ignore[misc]
    folder = Path(tempfile.mkdtemp())
    try:
        paths = [folder / f"theta-{t}.safetensors" for t in range(options.tasks + 1)]
        current = random_base()
        for t, path in enumerate(paths):
            save_file(current, path)
            current = next_task(current, t + 1)
        elements = sum(value.numel() for value in current.values())
        del current
        print(f"{elements:,} elements, T = {options.tasks}, {options.threads} thread(s) a worker")
        how = {"weights": range(1, options.tasks + 1), "shard_size": 50_000_000, "overwrite": True}
        out, wanted = folder / "out", ""
        took = []
        for _ in range(options.repeat + 1):  # the first one fills the page cache
            began = time.perf_counter()
            merge_checkpoints(paths[0], paths[1:], out, threads=options.threads, **how)
            took.append(time.perf_counter() - began)
        wanted = digest(out)
        print(f"local, {options.threads} thread(s): {min(took):.2f} s")
        for workers in options.workers:
            runs = []
            for _ in range(options.repeat):
                seconds.clear()
                travelled.clear()
                began = time.perf_counter()
                merge_checkpoints(
                    paths[0], paths[1:], out, threads=options.threads, engine="ray", workers=workers, **how
                )
                seconds["all"] = time.perf_counter() - began
                assert digest(out) == wanted, "the outputs differ"
                runs.append(dict(seconds))
            best = {
                phase: min(run[phase] for run in runs) for phase in ("survey", "auction", "measure", "write", "all")
            }
            merging = sum(best[phase] for phase in ("survey", "auction", "measure", "write"))
            phases = ", ".join(f"{phase} {best[phase]:.2f}" for phase in ("survey", "auction", "measure", "write"))
            print(f"ray, {workers} worker(s): {merging:.2f} s ({phases}); {best['all']:.2f} s with Ray's start")
            print(f"  bytes between driver and workers: {dict(travelled)}, {sum(travelled.values()):,} in all")
    finally:
        shutil.rmtree(folder)


def digest(out: Path) -> str:
    """One SHA-256 of all files."""
    content = hashlib.sha256()
    for path in sorted(out.iterdir()):
        content.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()


if __name__ == "__main__":
    main()
