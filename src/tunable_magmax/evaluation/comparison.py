"""Compares models on the same samples, which may count by the mix of tasks that a site has.

Held-out samples are as many of one task as of another, and a site sees tasks in other shares. So each sample counts by
the share of its task, divided by the number of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, Ints
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Share

Verdict: TypeAlias = Literal["clearly better", "clearly worse", "cannot tell"]
Bools: TypeAlias = NDArray[np.bool_]
ALPHA = 0.05
POWER = 0.8
SIGN_DRAWS = 9999
"""Draws of signs behind a p-value, where weights differ."""


def sample_weights(sample_tasks: Ints, mix: Sequence[float]) -> Floats:
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


def mixed_share(right: Bools, weights: Floats) -> Share:
    """Returns the weighted share of right answers, `weights` summing to 1, as one of samples of equal weight.

    The variance is that of independent answers with the weights of the samples: n = 1 / sum of squared weights.

    >>> mixed_share(np.array([True, False]), np.array([0.5, 0.5]))
    Share(right=1.0, samples=2.0)
    """
    value = min(1.0, float(weights[right].sum())) if not right[weights > 0].all() else 1.0
    samples = float(1 / np.square(weights).sum())
    return Share(value * samples, samples)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two models on the same samples. `won`: the first alone is right, `lost`: the second alone is right.

    `difference`: the first's share less the second's. `p_value`: of no difference. `apart`: the share of samples on
    which they differ. `samples`: so many of equal weight would say as much.
    """

    won: int
    lost: int
    samples: int
    difference: float
    p_value: float
    apart: float

    def verdict(self, p_value: float) -> Verdict:
        """Returns the first model's difference in words, by a p-value that may be corrected for other comparisons."""
        if p_value > ALPHA or not self.difference:
            return "cannot tell"
        return "clearly better" if self.difference > 0 else "clearly worse"

    def needed(self, alpha: float = ALPHA) -> int | None:
        """Returns about how many samples would show this difference, if it is real; None if there is none.

        Connor's formula (1987) for McNemar's test.

        >>> paired([True] * 9 + [False] * 91, [False] * 9 + [True] + [False] * 90).needed()
        121
        """
        if not self.difference:
            return None
        gap = abs(self.difference)
        z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(POWER)
        return ceil(((z_alpha * sqrt(self.apart) + z_power * sqrt(max(0.0, self.apart - gap * gap))) / gap) ** 2)


def paired(first: Any, second: Any, weights: Floats | None = None) -> Paired:
    """Compares which of the same samples two models get right: two vectors of booleans.

    Where all samples that count do so alike, the p-value is that of the exact two-sided sign test (McNemar's exact
    test). Else signs of the differences are drawn, with a fixed seed: if neither model is better, a difference is as
    likely to be the other way round.

    >>> found = paired([True, True, False], [False, True, False])
    >>> found.won, found.lost, found.samples, found.p_value
    (1, 0, 3, 1.0)
    """
    one, other = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if one.ndim != 1 or one.shape != other.shape:
        raise InputError(f"a paired comparison needs the same samples twice, found {one.shape} and {other.shape}")
    if weights is not None:
        counted = weights > 0
        one, other, weights = one[counted], other[counted], weights[counted]
    won, lost, count = int((one & ~other).sum()), int((other & ~one).sum()), len(one)
    if weights is None or np.allclose(weights, weights[0]):
        chance = min(1.0, 2 * sign_test(max(won, lost), min(won, lost)))
        of = max(1, count)
        return Paired(won, lost, count, (won - lost) / of, chance, (won + lost) / of)
    signed = (one.astype(np.float64) - other) * weights
    steps = signed[signed != 0]
    samples = 1 / float(np.square(weights).sum())
    difference = float(steps.sum())
    extreme = int((np.abs(_random_sums(np.abs(steps))) >= abs(difference) * (1 - 1e-9)).sum())
    apart = samples * float(np.square(steps).sum())
    return Paired(won, lost, round(samples), difference, (1 + extreme) / (1 + SIGN_DRAWS), apart)


def _random_sums(sizes: Floats) -> Floats:
    """Returns sums of steps with random signs, `SIGN_DRAWS` of them.

    Steps are as large as one another within a task, so the number of its positive ones is all that has to be drawn.
    """
    each, counts = np.unique(sizes, return_counts=True)
    sums = np.zeros(SIGN_DRAWS)
    for place, (size, count) in enumerate(zip(each.tolist(), counts.tolist(), strict=True)):
        sums += size * _random_signs(place, count)
    return sums


@lru_cache(256)
def _random_signs(place: int, count: int) -> NDArray[np.int32]:
    """Returns sums of `count` random signs; kept, since the points of a drag hardly differ in their counts."""
    positive = np.random.default_rng([0, place]).binomial(count, 0.5, SIGN_DRAWS)
    return (2 * positive - count).astype(np.int32)


def sign_test(lost: int, won: int) -> float:
    """Returns the chance of at least `lost` heads among lost + won throws of a fair coin.

    >>> sign_test(5, 0), sign_test(0, 0)
    (0.03125, 1.0)
    """
    throws = lost + won
    ways, total = 1, 0  # whole numbers: exact, however many throws
    for heads in range(throws, lost - 1, -1):
        total += ways
        ways = ways * heads // (throws - heads + 1)
    return total / (1 << throws)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for the number of comparisons (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for done, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[place]))
        corrected[place] = largest
    return corrected
