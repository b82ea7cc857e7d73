"""70 billion parameters, T = 50, bfloat16, on clusters that nobody measured: the cost model's formula, worked out.

    python benchmarks/cluster_on_paper.py

Core seconds are those of `larger_than_memory.py` (docs/scale.md); a worker has 32 such cores and reads 2 GB/s.
"""

from __future__ import annotations

from tunable_magmax.engines.cost import Cluster, Load, Speeds, auction_rounds, estimate_cluster, most_speedup, speedup

ELEMENTS, TASKS, CORES, GB = 70 * 10**9, 50, 32, 10**9
EVERYTHING = 2 * ELEMENTS * (TASKS + 1)
LOAD = Load(
    elements=ELEMENTS,
    survey=EVERYTHING,
    decide=0,
    measure=EVERYTHING,
    render=EVERYTHING,
    written=2 * ELEMENTS,
    passes=3,
    rounds=auction_rounds(TASKS, looks=0),
)
WORKER = Speeds(
    threads=CORES,
    read=2 * GB,
    read_again=2 * GB,
    read_cpu=1.0 / GB,
    survey=CORES / (1.0e-9 * TASKS),
    decide=CORES / (1.0e-9 * TASKS),
    measure=CORES / (0.7e-9 * TASKS),
    render=CORES / (1.0e-9 * TASKS),
    write=GB,
    write_cpu=1.5 / GB,
)
SHARED = (2, 10, 40, 200)


def main() -> None:
    print(f"reads {LOAD.bytes_to_read / 1e12:.1f} TB in {LOAD.passes} passes, asks {LOAD.rounds} times\n")
    print("| workers | " + " | ".join(f"{gb} GB/s shared" for gb in SHARED) + " |")
    print("| --- " * (len(SHARED) + 1) + "|")
    for workers in (1, 2, 4, 8, 16, 32, 64, 128):
        clusters = [Cluster(workers, gb * GB) for gb in SHARED]
        cells = [
            f"{estimate_cluster(LOAD, WORKER, c).seconds / 60:.1f} min, {speedup(LOAD, WORKER, c):.1f} x"
            for c in clusters
        ]
        print(f"| {workers} | " + " | ".join(cells) + " |")
    print("| most | " + " | ".join(f"{most_speedup(LOAD, WORKER, Cluster(1, gb * GB)):.1f} x" for gb in SHARED) + " |")


if __name__ == "__main__":
    main()
