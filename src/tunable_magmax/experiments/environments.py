"""Environments: mixtures of some tasks' test samples, each split into a small known part and the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.config import STRICT, Positive, PositiveInt, Seed
from tunable_magmax.data.arrays import shuffled
from tunable_magmax.data.benchmark import Benchmark
from tunable_magmax.errors import InputError
from tunable_magmax.lottery import derived_seed

VARIANTS = (42, 123, 456, 789, 1011)
PAPER: Mapping[str, tuple[float, ...]] = {
    "D1": (0.5, 0.5),
    "D2": (0.8, 0.2),
    "D3": (1 / 3, 1 / 3, 1 / 3),
    "D4": (0.4, 0.4, 0.2),
    "D5": (0.6, 0.2, 0.2),
}
"""The paper's five mixing ratios."""
LEVEL_DRAWS = 3
"""Draws of equal shares of so many tasks, as in the paper's figure."""
KNOWN = 0.1
"""The share of each task's samples that is known of an environment; at least one sample is."""
MOST = 1000
"""Samples of the largest environment of size `supply`."""


Variants: TypeAlias = Annotated[tuple[Seed, ...], Field(min_length=1)]
Mixtures: TypeAlias = Annotated[
    Literal["paper"] | dict[str, Annotated[list[Positive], Field(min_length=1)]],
    Field(description="paper, or a mapping of names to lists of numbers above 0, such as {D1: [0.5, 0.5]}"),
]
Level: TypeAlias = Annotated[Literal["all"] | PositiveInt, Field(description="all or a whole number of at least 1")]


@dataclass(frozen=True)
class EnvironmentOptions:
    """Describes environments.

    `mixtures`: ratios by name. `levels`: beside them, equal shares of so many tasks, or of `all`; more than there are
    are left out. `variants`: the seeds of the draws of each; levels have the first three. `size`: `paper`, where a task
    with too few samples gives all it has; or `supply`, the largest size for which every task can satisfy every ratio
    of the mixtures, at most `MOST`, and a level that needs more of a task has fewer samples.
    """

    __pydantic_config__ = STRICT
    mixtures: Mixtures = "paper"
    levels: tuple[Level, ...] = ()
    variants: Variants = VARIANTS
    size: Literal["paper", "supply"] = "paper"

    @property
    def ratios(self) -> Mapping[str, tuple[float, ...]]:
        """The mixing ratios without the levels."""
        return PAPER if self.mixtures == "paper" else {name: tuple(ratio) for name, ratio in self.mixtures.items()}

    def all_ratios(self, tasks: int) -> dict[str, tuple[float, ...]]:
        """Returns mixing ratios by name for so many tasks, levels last.

        >>> EnvironmentOptions({"A": [0.7, 0.3]}, levels=(2, 10, "all")).all_ratios(4)
        {'A': (0.7, 0.3), 'M2': (0.5, 0.5), 'M4': (0.25, 0.25, 0.25, 0.25)}
        """
        counts = dict.fromkeys(tasks if level == "all" else level for level in self.levels)
        return {**self.ratios, **{f"M{count}": (1 / count,) * count for count in counts if count <= tasks}}

    def names(self, tasks: int) -> list[str]:
        """Returns the names of all environments, one draw of every mixture after the other."""
        names = self.all_ratios(tasks)
        return [f"{name}/{variant}" for variant in self.variants for name in names if variant in self.draws(name)]

    def draws(self, name: str) -> Variants:
        """Returns the variants of a mixing ratio, or of a level."""
        return self.variants if name in self.ratios else self.variants[:LEVEL_DRAWS]


@dataclass(frozen=True)
class Environment:
    """One site. `tasks`: indices from 0, with their wanted `ratio`.

    `meta`: positions of the test samples that are known of it, `rest`: of those that models are scored on.
    """

    mixture: str
    variant: int
    tasks: tuple[int, ...]
    ratio: tuple[float, ...]
    meta: tuple[int, ...]
    rest: tuple[int, ...]

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


def draw_environments(benchmark: Benchmark, options: EnvironmentOptions) -> list[Environment]:
    """Draws an environment for each mixing ratio and variant; tasks and samples are drawn by the variant's seed."""
    count = len(benchmark.tasks)
    ratios = options.all_ratios(count)
    for name, ratio in ratios.items():
        if len(ratio) > count or min(ratio) <= 0 or not math.isclose(sum(ratio), 1):
            raise InputError(
                f"environment {name!r}: the ratio {tuple(ratio)} must be positive shares that sum to 1, of at most "
                f"{count} tasks"
            )
    supply = min(len(task.test) for task in benchmark.tasks)
    possible = {name: int(supply / max(ratio) + 1e-9) for name, ratio in ratios.items()}
    if options.size == "paper":
        sizes = dict.fromkeys(ratios, paper_size(count))
    else:
        largest = min(MOST, *(possible[name] for name in options.ratios or ratios))
        sizes = {name: min(largest, size) for name, size in possible.items()}
    return [
        _drawn(benchmark, name, ratio, variant, sizes[name])
        for name, ratio in ratios.items()
        for variant in options.draws(name)
    ]


def _drawn(benchmark: Benchmark, mixture: str, ratio: tuple[float, ...], variant: int, size: int) -> Environment:
    chosen = shuffled(len(benchmark.tasks), derived_seed(variant, mixture, "tasks"))[: len(ratio)]
    meta: list[int] = []
    rest: list[int] = []
    for t, wanted in zip(chosen, _counts(ratio, size), strict=True):
        supply = benchmark.tasks[t].test
        samples = [supply[k] for k in shuffled(len(supply), derived_seed(variant, mixture, "samples", t))[:wanted]]
        cut = max(1, round(KNOWN * len(samples)))
        meta += samples[:cut]
        rest += samples[cut:]
    if not rest:
        raise InputError(f"environment {mixture}/{variant} has {len(meta)} samples: none is left to evaluate on")
    return Environment(mixture, variant, tuple(chosen), ratio, tuple(sorted(meta)), tuple(sorted(rest)))


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
