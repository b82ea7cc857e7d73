"""A merge of 1.5 billion parameters, T = 4, bfloat16, in 2 GiB of RAM: peak, time per GiB read, and where time goes.

    python benchmarks/larger_than_memory.py [--memory 1600MiB] [--folder DIR] [--warm] [--no-prefetch] [--disk MB/S]

Each merge is a process of its own; its peak is the resident set's high-water mark, imports included. Files are dropped
from the page cache at the start, and every range again as soon as it was read, so that each walk over the inputs comes
from the disk, as on a machine with no memory to spare; `--warm` leaves the cache alone. The files take 18 GB and are
removed at the end unless `--keep`. Wall seconds are by phase, CPU seconds by what threads did in all of them. Linux.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from decoder import LAYERS, VOCABULARY, elements, write_walk

from tunable_magmax.files import show_size
from tunable_magmax.workflows.plan import plan_merge

TASKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", default=["1600MiB", "512MiB"])
    parser.add_argument("--scale", nargs="+", default=["matched", "0.5"])
    parser.add_argument("--scope", nargs="+", default=["model"])
    parser.add_argument("--folder", type=Path, help="where the files go, or are from an earlier --keep")
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer make a smaller model")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--no-prefetch", action="store_true", help="time it without reading ahead too")
    parser.add_argument("--disk", type=float, default=0.0, help="pretend a disk of so many MB/s, with files cached")
    parser.add_argument("--keep", action="store_true", help="leave the files where they are")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder)) if not options.keep else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"theta-{t}.safetensors" for t in range(TASKS + 1)]
    try:
        if not all(path.exists() for path in paths):
            write_walk(paths, options.layers, options.vocabulary)
        size = elements(options.layers, options.vocabulary)
        cache = "as cached" if options.warm or options.disk else "nothing cached"
        print(f"{size:,} elements, T = {TASKS}, bfloat16, {cache}")
        for memory in options.memory:
            for scope in options.scope:
                for scale in options.scale:
                    for prefetch in (True, False) if options.no_prefetch else (True,):
                        given = {"scale": scale, "scope": scope}
                        run(paths, memory, given, prefetch, options.warm or options.disk > 0, options.disk * 1e6)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def run(paths: list[Path], memory: str, given: dict[str, str], prefetch: bool, warm: bool, disk: float) -> None:
    """One merge, and a line for each thing worth knowing of it."""
    out = paths[0].with_name("out")
    plan = plan_merge(paths[0], paths[1:], out, memory=memory, overwrite=True, **given)
    job = {"paths": [str(path) for path in paths], "out": str(out), "memory": memory, "given": given}
    child = [sys.executable, str(Path(__file__).with_name("watched_merge.py"))]
    how = {**job, "prefetch": prefetch, "warm": warm, "disk": disk}
    found = json.loads(subprocess.run([*child, json.dumps(how)], check=True, stdout=subprocess.PIPE, text=True).stdout)
    shutil.rmtree(out)
    read = plan.bytes_to_read / 2**30
    what = ", ".join(f"{name} {value}" for name, value in given.items())
    print(
        f"\nmemory {memory}, {what}{'' if prefetch else ', not reading ahead'}: {found['seconds']:.1f} s, "
        f"{found['seconds'] / read:.2f} s per GiB of the {read:.1f} GiB read in {plan.passes} passes\n"
        f"  peak RSS {found['peak'] / 2**20:.0f} MiB, of which before the merge {found['imports'] / 2**20:.0f} MiB; "
        f"{show_size(plan.spilled)} of planes on disk"
    )
    for title in ("wall", "cpu"):
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found[title].items())
        print(f"  {title} seconds: {parts}")


if __name__ == "__main__":
    main()
