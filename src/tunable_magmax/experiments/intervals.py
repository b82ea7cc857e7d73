"""Means and deviations over seeds, and how sure a paired difference is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tunable_magmax.experiments.results import Measured
from tunable_magmax.preference.arrays import Floats

REPLICATES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and their standard deviation (n - 1 below the line; None with one seed)."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Difference:
    """A row minus another in the same environments with the same seeds. `ahead`: in how many of the `pairs`."""

    mean: float
    low: float
    high: float
    pairs: int
    ahead: int
    behind: int
    seeds: int
    environments: int

    @property
    def verdict(self) -> str:
        """In a word: "ahead" or "behind" where the interval leaves 0 out."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "no clear difference"


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """One value for each seed.

    >>> mean_over_seeds([1.0, 3.0])
    Mean(mean=2.0, deviation=1.4142135623730951, seeds=2)
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), deviation, len(values))


def averaged(
    found: Iterable[Measured], value: Callable[[Measured], float | None] = lambda measured: measured.accuracy
) -> Mean | None:
    """The mean over seeds of the mean over mixtures of the mean over variants; None where nothing was measured."""
    tree: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for measured in found:
        number = value(measured)
        if number is not None:
            tree[measured.seed][measured.mixture].append(number)
    if not tree:
        return None
    return mean_over_seeds([float(np.mean([np.mean(each) for each in tree[seed].values()])) for seed in sorted(tree)])


def paired(row: Iterable[Measured], reference: Iterable[Measured], seed: int = 0) -> Difference | None:
    """Row minus reference over the seeds and environments that both have, with a bootstrap interval.

    Seeds and environments are resampled independently of each other (a difference is shared by neither alone), and the
    interval holds the middle `LEVEL` of the means of `REPLICATES` samples. With one seed, only environments vary.
    """
    ours = {(found.seed, found.environment): found.accuracy for found in row}
    theirs = {(found.seed, found.environment): found.accuracy for found in reference}
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    seeds = sorted({pair[0] for pair in both})
    places = sorted({pair[1] for pair in both})
    table = np.zeros((len(seeds), len(places)))
    there = np.zeros_like(table)
    for pair in both:
        at = seeds.index(pair[0]), places.index(pair[1])
        table[at], there[at] = ours[pair] - theirs[pair], 1.0
    by_seed, by_place = _resamples(len(seeds), len(places), seed)
    sums = ((by_seed @ table) * by_place).sum(axis=1)
    counts = ((by_seed @ there) * by_place).sum(axis=1)
    drawn = counts > 0  # a sample may hold no pair where some are missing
    low, high = np.quantile(sums[drawn] / counts[drawn], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    differences = table[there > 0]
    return Difference(
        float(differences.mean()),
        float(low),
        float(high),
        len(both),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        len(seeds),
        len(places),
    )


@lru_cache(maxsize=16)  # hundreds of differences share a few shapes
def _resamples(seeds: int, places: int, seed: int) -> tuple[Floats, Floats]:
    """How often each seed and each environment was drawn: [replicates, seeds] and [replicates, environments]."""
    rng = np.random.default_rng(seed)
    first, second = (rng.multinomial(n, np.full(n, 1 / n), REPLICATES).astype(np.float64) for n in (seeds, places))
    return first, second


def interval_note(seeds: int) -> str:
    """How intervals were made, for below a table."""
    drawn = "over environments alone (there is one seed)" if seeds < 2 else "over seeds and environments"
    rough = f" With {seeds} seeds it is a rough guide." if 2 <= seeds < 5 else ""
    return f"In brackets: {LEVEL:.0%} interval of a paired bootstrap {drawn}, {REPLICATES:,} samples, seed 0.{rough}"
