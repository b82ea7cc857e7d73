"""Accuracy on a mix of tasks, measured on samples of each: a weighted share with an interval, and two models compared.

Held-out samples are as many of one task as of another, and a site sees tasks in other shares. So each sample counts by
the share of its task, divided by the number of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import LEVEL, wilson_interval
from tunable_magmax.evaluation.comparison import ALPHA, POWER, paired

FLIPS = 9999
"""Draws of signs behind a p-value, where weights differ."""
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MixedShare:
    """The share of right answers on a mix, and the samples of equal weight that would say as much of it."""

    value: float
    samples: float

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Returns Wilson's score interval for so many samples.

        >>> [round(end, 3) for end in MixedShare(0.75, 4).interval()]
        [0.301, 0.954]
        """
        return wilson_interval(self.value * self.samples, self.samples, level)


@dataclass(frozen=True)
class MixedPair:
    """Two models on the same mix. `difference`: the first's share less the second's. `p_value`: of no difference.

    `samples`: so many of equal weight would say as much.
    """

    won: int
    lost: int
    samples: int
    difference: float
    p_value: float
    needed: int | None
    """About how many samples of the mix would show the difference, if it is real; None if there is none."""

    def verdict(self, p_value: float) -> str:
        """Returns the difference in words, by a p-value that may be corrected for other comparisons."""
        if p_value > ALPHA or not self.difference:
            return "cannot tell"
        return "clearly better" if self.difference > 0 else "clearly worse"


def sample_weights(sample_tasks: NDArray[np.int64], mix: Sequence[float]) -> Floats:
    """Returns what each sample counts: the share of its task, spread over the task's samples; together 1.

    Tasks without samples are left out, and so are samples of no task (-1).

    >>> sample_weights(np.array([0, 0, 1]), [0.5, 0.5]).tolist()
    [0.25, 0.25, 0.5]
    """
    counts = np.bincount(sample_tasks[sample_tasks >= 0], minlength=len(mix))
    each = np.divide(np.asarray(mix, dtype=np.float64), counts, out=np.zeros(len(mix)), where=counts > 0)
    weights = np.where(sample_tasks >= 0, each[sample_tasks], 0.0)
    if not weights.sum() > 0:
        raise InputError("no sample belongs to a task of the mix: give another mix, or samples of its tasks")
    result: Floats = weights / weights.sum()
    return result


def mixed_share(right: Bools, weights: Floats) -> MixedShare:
    """Returns the weighted share of right answers, `weights` summing to 1.

    The variance is that of independent answers with the weights of the samples: n = 1 / sum of squared weights.

    >>> mixed_share(np.array([True, False]), np.array([0.5, 0.5]))
    MixedShare(value=0.5, samples=2.0)
    """
    value = min(1.0, float(weights[right].sum())) if not right[weights > 0].all() else 1.0
    return MixedShare(value, float(1 / np.square(weights).sum()))


def mixed_pair(first: Bools, second: Bools, weights: Floats) -> MixedPair:
    """Compares two models on the same samples of a mix.

    Where all samples that count do so alike, this is the exact sign test. Else signs of the differences are drawn, with
    a fixed seed: if neither model is better, a difference is as likely to be the other way round.
    """
    counted = weights > 0
    pair, own = paired(first[counted], second[counted]), weights[counted]
    if np.allclose(own, own[0]):
        return MixedPair(pair.won, pair.lost, pair.samples, pair.difference, pair.p_value, pair.needed())
    signed = (first[counted].astype(np.float64) - second[counted]) * own
    steps = signed[signed != 0]
    difference, samples = float(steps.sum()), round(1 / float(np.square(own).sum()))
    if not len(steps):
        return MixedPair(0, 0, samples, 0.0, 1.0, None)
    extreme = int((np.abs(_flipped(np.abs(steps))) >= abs(difference) * (1 - 1e-9)).sum())
    needed = _needed(samples, difference, float(np.square(steps).sum()))
    return MixedPair(pair.won, pair.lost, samples, difference, (1 + extreme) / (1 + FLIPS), needed)


def _flipped(sizes: Floats) -> Floats:
    """Returns sums of steps with random signs, `FLIPS` of them.

    Steps are as large as one another within a task, so the number of its positive ones is all that has to be drawn.
    """
    each, counts = np.unique(sizes, return_counts=True)
    sums = np.zeros(FLIPS)
    for place, (size, count) in enumerate(zip(each.tolist(), counts.tolist(), strict=True)):
        sums += size * _signs(place, count)
    return sums


@lru_cache(256)
def _signs(place: int, count: int) -> NDArray[np.int32]:
    """Returns sums of `count` random signs; kept, since the points of a drag hardly differ in their counts."""
    positive = np.random.default_rng([0, place]).binomial(count, 0.5, FLIPS)
    return (2 * positive - count).astype(np.int32)


def _needed(samples: int, difference: float, variance: float) -> int | None:
    """Returns about how many samples would show a difference, from the variance that these have."""
    if not difference:
        return None
    z = NormalDist().inv_cdf(1 - ALPHA / 2) + NormalDist().inv_cdf(POWER)
    return math.ceil(samples * z * z * variance / (difference * difference))
