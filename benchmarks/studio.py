"""Times a measured point of the studio, and its phases.

    python benchmarks/studio.py RUN_DIR [SAMPLES] [POINTS]

Each point has new weights, so nothing of it is known beforehand. Seconds are medians; beside each, those of the
processor, which other programs on the machine change less.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tunable_magmax.runs.run import Run
from tunable_magmax.studio.options import StudioOptions
from tunable_magmax.studio.points import PointRequest
from tunable_magmax.studio.session import Studio


class Clock:
    """Collects wall and processor seconds of what it calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name: str, work: Callable[..., Any], *given: Any) -> Any:
        """Calls `work` and notes how long it took."""
        wall, processor = time.perf_counter(), time.process_time()
        result = work(*given)
        spent = time.perf_counter() - wall, time.process_time() - processor
        self.seconds.setdefault(name, []).append(spent)
        return result

    def median(self, name: str) -> tuple[float, float]:
        """Returns the median seconds, wall and processor."""
        walls, processors = zip(*self.seconds[name], strict=True)
        return median(walls), median(processors)


def main(run: Path, samples: int = 300, points: int = 10) -> None:
    """Prints the phases."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        studio = Studio(Run.open(run), StudioOptions(out=Path(folder) / "out", samples=samples, device="cpu"))
        clock("open", lambda: deque(studio.opening(), maxlen=0))
        scores, data = studio.scores, next(iter(studio.data.values()))
        tasks, draws = len(studio.run.tasks), np.random.default_rng(0)
        bench = scores.bench
        for _ in range(points + 1):
            asked = PointRequest(tuple(draws.dirichlet([1.0] * tasks).tolist()), method="tunable_magmax")
            setting = studio.setting(asked)
            clock("merge", bench.models.state, setting.spec)
            clock("merge, forward", bench.features, setting.spec, data.samples)
            if scores.kept is not None:
                clock("forward, kept", bench.features, setting.spec, scores.kept)
            clock("fit", bench.fit, setting.spec, scores.facts(setting))
            clock("answers, lines", scores.point, setting, data, setting.preference.weights)
            other = PointRequest(tuple(draws.dirichlet([1.0] * tasks).tolist()), method="tunable_magmax")
            clock("whole point", studio.measure_now, other)
        studio.close()
    kept = 0 if scores.kept is None else len(scores.kept)
    print(f"{tasks} tasks, {bench.models.elements:,} elements, {len(data)} samples; heads fitted to {kept} kept ones")
    for name, spent in clock.seconds.items():
        clock.seconds[name] = spent[1:] or spent  # the first one also compiles
        wall, processor = clock.median(name)
        print(f"{name:16} {wall:8.3f} s {processor:8.3f} s of the processor")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
