"""Speed and memory of preferences from inputs: ratios to POT's batched solver on the same work.

    python benchmarks/prefer.py [--tasks 50] [--rows 500] [--samples 100] [--width 512]

Needs POT. Exits with 1 if a bound is broken: ratio at most 1.5 and under 2 s for all transports; for 50,000 target
samples at most 1 GiB beyond the features themselves.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

RATIO, SECONDS, MEMORY = 1.5, 2.0, 1 << 30


def best_of(function: Callable[[], Any], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def features(tasks: int, rows: int, samples: int, width: int) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((tasks, 1, width), dtype=np.float32) * np.float32(0.3)
    own = [rng.standard_normal((rows, width), dtype=np.float32) + centre for centre in centres]
    return own, [rng.standard_normal((samples, width), dtype=np.float32) + centre for centre in centres]


def speed(arguments: argparse.Namespace) -> bool:
    import torch
    from ot.batch import dist_batch, solve_batch

    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.transport import Sinkhorn, transports

    own, target = features(arguments.tasks, arguments.rows, arguments.samples, arguments.width)
    # Every solver does all 100 iterations, on float64, from float32 features to <P, C>.
    fixed = Sinkhorn(iterations=100, tolerance=0)

    def pot(method: str, array: Callable[[Any], Any]) -> Any:
        cost = dist_batch(array(np.stack(own).astype(np.float64)), array(np.stack(target).astype(np.float64)))
        cost = cost / array(np.asarray(cost).max((1, 2)))[:, None, None]
        solved = solve_batch(cost, reg=0.1, max_iter=100, tol=0, method=method)
        return (solved.plan * cost).sum((1, 2))

    costs = np.array([result.cost for result in transports(own, target, fixed)])
    np.testing.assert_allclose(costs, np.asarray(pot("log_sinkhorn", torch.from_numpy)), atol=1e-9)
    ours = best_of(lambda: transports(own, target, fixed))
    print(
        f"{arguments.tasks} transports {arguments.rows} x {arguments.samples}, width {arguments.width}, 100 iterations"
    )
    print(f"  tunable-magmax             {ours:7.2f} s")
    good = ours <= SECONDS
    for name, method, array in (
        ("POT log domain, torch", "log_sinkhorn", torch.from_numpy),
        ("POT log domain, numpy", "log_sinkhorn", np.asarray),
        ("POT plain domain, torch", "sinkhorn", torch.from_numpy),
    ):
        theirs = best_of(lambda method=method, array=array: pot(method, array), 2)  # type: ignore[misc]
        print(f"  {name:26s} {theirs:7.2f} s   ratio {ours / theirs:.2f}")
        good &= ours <= RATIO * theirs
    early = best_of(lambda: transports(own, target))
    print(f"  with early stopping        {early:7.2f} s")
    whole = best_of(lambda: Preference.from_features(own, target), 1)
    print(f"  preference with intervals  {whole:7.2f} s")
    return good


def peak(max_samples: int | None, arguments: argparse.Namespace) -> None:
    """In a process of its own: the peak of memory beyond what holds the features."""
    from tunable_magmax.preference.preference import Preference

    own, target = features(1, arguments.rows, 50_000, arguments.width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    Preference.from_features(own * 2, target * 2, max_samples=max_samples)
    seconds = time.perf_counter() - start
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, seconds)


def memory(arguments: argparse.Namespace) -> bool:
    print("50,000 target samples, 2 tasks: memory beyond the features")
    good = True
    for label, limit in (("a draw of 5,000 (default)", 5000), ("all of them", 0)):
        command = [sys.executable, __file__, "--peak", str(limit), "--width", str(arguments.width)]
        added, seconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        print(f"  {label:26s} {int(added) / 2**20:7.0f} MiB in {float(seconds):.1f} s")
        good &= int(added) <= MEMORY
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tasks", 50), ("rows", 500), ("samples", 100), ("width", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak is not None:
        peak(arguments.peak or None, arguments)
        return
    good = speed(arguments)
    good &= memory(arguments)
    print("within all bounds" if good else "A BOUND IS BROKEN")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
