"""Peak memory of a file-to-file merge of ViT-B/16's image tower, in a process of its own.

    python benchmarks/memory.py [--tasks 20 50] [--memory 1GiB 256MiB]

Task files are few and stand in for many by name, to spare the disk. "Beyond imports" subtracts what the same process
takes for the interpreter, torch and the compiled kernels alone. Linux only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import save_file
from vit import next_task, random_base

CHILD = """
import sys
import torch, tunable_magmax as tmx
tmx.merge_state_dicts({"w": torch.zeros(70)}, [{"w": torch.ones(70)}])
def peak():
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("VmHWM"))
start = peak()
if len(sys.argv) > 1:
    memory, out, base, *tasks = sys.argv[1:]
    tmx.merge_checkpoints(base, tasks, out, memory=memory, overwrite=True)
print(start, peak())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[20, 50])
    parser.add_argument("--memory", nargs="+", default=["1GiB", "256MiB"])
    parser.add_argument("--files", type=int, default=8, help="different task files on disk")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        current = random_base()
        save_file(current, folder / "base.safetensors")
        for t in range(options.files):
            current = next_task(current, t + 1)
            save_file(current, folder / f"file{t}.safetensors")
        del current
        for tasks in options.tasks:
            paths = [folder / f"task{t}.safetensors" for t in range(tasks)]
            for t, path in enumerate(paths):
                path.unlink(missing_ok=True)
                os.link(folder / f"file{t % options.files}.safetensors", path)
            for memory in options.memory:
                command = [memory, str(folder / "out"), str(folder / "base.safetensors"), *map(str, paths)]
                start = time.perf_counter()
                child = [sys.executable, "-c", CHILD, *command]
                found = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
                seconds = time.perf_counter() - start
                imports, peak = (int(kib) / 1024 for kib in found.stdout.split())
                beyond = peak - imports
                print(f"T = {tasks}, {memory}: peak RSS {peak:.0f} MiB, {beyond:.0f} beyond imports, {seconds:.1f} s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
