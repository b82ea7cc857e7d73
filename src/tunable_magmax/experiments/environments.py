"""Environments: mixtures of some tasks' test samples, each split into a small known part and the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError
from tunable_magmax.lottery import derived_seed

VARIANTS = (42, 123, 456, 789, 1011)
META = 0.1
PAPER: Mapping[str, tuple[float, ...]] = {
    "D1": (0.5, 0.5),
    "D2": (0.8, 0.2),
    "D3": (1 / 3, 1 / 3, 1 / 3),
    "D4": (0.4, 0.4, 0.2),
    "D5": (0.6, 0.2, 0.2),
}
"""The paper's five mixing ratios."""


@dataclass(frozen=True)
class Environment:
    """One site. `tasks`: indices from 0, with their wanted `ratio`.

    `meta`: positions of the test samples that are known of it, `rest`: of those that models are scored on. `short`: how
    many samples each task lacked to satisfy the ratio.
    """

    mixture: str
    variant: int
    tasks: tuple[int, ...]
    ratio: tuple[float, ...]
    meta: tuple[int, ...]
    rest: tuple[int, ...]
    short: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.mixture}/{self.variant}"

    def with_samples(self, size: int) -> Environment:
        """Returns the same with fewer known samples: the first ones of a seeded order."""
        order = shuffled(len(self.meta), derived_seed(self.variant, self.mixture, "meta"))
        return replace(self, meta=tuple(sorted(self.meta[k] for k in order[:size])))


def paper_size(tasks: int) -> int:
    """Returns how many samples the paper's environments have: 1000, 500 or 200 for 5, 20 or 50 tasks.

    >>> [paper_size(tasks) for tasks in (5, 15, 20, 50)]
    [1000, 500, 500, 200]
    """
    return 1000 if tasks <= 10 else 500 if tasks <= 30 else 200


def level_mixtures(levels: Sequence[int | str], tasks: int) -> dict[str, tuple[float, ...]]:
    """Returns equal shares of M of the tasks for each level M; `all` is all tasks, and more than these are left out.

    >>> level_mixtures([2, 10, "all"], 4)
    {'M2': (0.5, 0.5), 'M4': (0.25, 0.25, 0.25, 0.25)}
    """
    counts = [tasks if level == "all" else int(level) for level in levels]
    return {f"M{count}": (1 / count,) * count for count in dict.fromkeys(counts) if 0 < count <= tasks}


@dataclass(frozen=True)
class EnvironmentSizes:
    """Describes environments: mixing ratios by name, equal shares as further `levels`, and the seeds of variants.

    `size`: samples of each; a task with too few gives all it has, and the environment says how many are missing.
    Without it, the largest size for which every task can satisfy every ratio of the mixtures, at most `most`; a level
    that needs more of a task has fewer samples. The first share `meta` of each task's samples (at least one) is known.
    """

    mixtures: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: PAPER)
    variants: tuple[int, ...] = VARIANTS
    size: int | None = None
    most: int = 1000
    meta: float = META
    levels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of all environments, in the order in which they are drawn."""
        return [f"{name}/{variant}" for name in {**self.mixtures, **self.levels} for variant in self.variants]


def draw_environments(benchmark: Benchmark, sizes: EnvironmentSizes) -> list[Environment]:
    """Draws an environment for each mixing ratio and variant; tasks and samples are drawn by the variant's seed."""
    ratios = {**sizes.mixtures, **sizes.levels}
    for name, ratio in ratios.items():
        if len(ratio) > len(benchmark.tasks) or not ratio or min(ratio) <= 0 or not math.isclose(sum(ratio), 1):
            raise InputError(
                f"environment {name!r}: the ratio {tuple(ratio)} must be positive shares that sum to 1, of at most "
                f"{len(benchmark.tasks)} tasks"
            )
    supply = min(len(task.test) for task in benchmark.tasks)
    possible = {name: int(supply / max(ratio) + 1e-9) for name, ratio in ratios.items()}
    largest = min(sizes.most, *(possible[name] for name in sizes.mixtures or ratios))
    return [
        _drawn(benchmark, name, ratio, variant, sizes.size or min(largest, possible[name]), sizes.meta)
        for name, ratio in ratios.items()
        for variant in sizes.variants
    ]


def _drawn(
    benchmark: Benchmark, mixture: str, ratio: tuple[float, ...], variant: int, size: int, share: float
) -> Environment:
    chosen = shuffled(len(benchmark.tasks), derived_seed(variant, mixture, "tasks"))[: len(ratio)]
    meta: list[int] = []
    rest: list[int] = []
    short: list[int] = []
    for t, wanted in zip(chosen, _counts(ratio, size), strict=True):
        supply = benchmark.tasks[t].test
        samples = [supply[k] for k in shuffled(len(supply), derived_seed(variant, mixture, "samples", t))[:wanted]]
        cut = max(1, round(share * len(samples)))
        meta += samples[:cut]
        rest += samples[cut:]
        short.append(wanted - len(samples))
    if not rest:
        raise InputError(f"environment {mixture}/{variant} has {len(meta)} samples: none is left to evaluate on")
    return Environment(mixture, variant, tuple(chosen), ratio, tuple(sorted(meta)), tuple(sorted(rest)), tuple(short))


def _counts(ratio: Sequence[float], size: int) -> list[int]:
    """Divides `size` into whole numbers in a ratio, by largest remainder.

    >>> _counts((1 / 3, 1 / 3, 1 / 3), 500)
    [167, 167, 166]
    """
    floors = [int(share * size + 1e-9) for share in ratio]
    order = sorted(range(len(ratio)), key=lambda k: (floors[k] - ratio[k] * size, k))
    for k in order[: size - sum(floors)]:
        floors[k] += 1
    return floors
