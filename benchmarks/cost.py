"""The time that `tmx plan --estimate` says, beside the time that the merge then takes.

    python benchmarks/cost.py [--layers 1 6] [--tasks 2 4 8] [--folder DIR] [--cold]

Each row is a merge of its own in a warm process, so imports are not counted on either side. Task files are few and
stand in for many by name. "Load" is the system's average of running processes just after. `--cold` drops the inputs
from the page cache before the estimate and before the merge.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decoder import elements, write_walk

import tunable_magmax as tmx
from tunable_magmax.workflows.plan import plan_merge

VOCABULARY = 30_000
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.5},
    {"scope": "tensor", "scale": 0.5},
    {"keep": "magnitude"},
    {"method": "average"},
    {"memory": "128MiB"},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--files", type=int, default=4, help="different task files on disk")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    parser.add_argument("--cold", action="store_true", help="begin with nothing cached")
    options = parser.parse_args()
    tmx.merge_state_dicts({"w": torch.zeros(70)}, [{"w": torch.ones(70)}])  # loads the compiled kernels
    print(
        "| elements | T | options | read | estimate | measured | ratio | load |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for layers in options.layers:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            paths = [folder / f"theta-{t}.safetensors" for t in range(options.files + 1)]
            write_walk(paths, layers, VOCABULARY)
            for tasks in options.tasks:
                chosen = [paths[1 + t % options.files] for t in range(tasks)]
                for case in CASES:
                    row(paths[0], chosen, elements(layers, VOCABULARY), case, options.cold)
        finally:
            shutil.rmtree(folder)


def row(base: Path, tasks: list[Path], size: int, case: dict[str, Any], cold: bool) -> None:
    """Estimate, merge, and print both."""
    out = base.with_name("out")
    if cold:
        forget([base, *tasks])
    plan = plan_merge(base, tasks, out, estimate=True, **case)
    assert plan.time is not None
    if cold:
        forget([base, *tasks])
    start = time.perf_counter()
    tmx.merge_checkpoints(base, tasks, out, **case)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    out.with_name("out.log").unlink()
    what = ", ".join(f"`{name}: {value}`" for name, value in case.items()) or "defaults"
    read = plan.bytes_to_read / 2**30
    guess = plan.time.seconds
    print(f"| {size / 1e6:.0f} M | {len(tasks)} | {what} | {read:.1f} GiB", end=" | ")
    print(f"{guess:.1f} s | {seconds:.1f} s | {seconds / guess:.2f} | {os.getloadavg()[0]:.0f} |", flush=True)


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
