"""Compares two models on the same samples: which of them is right where the other is not, and is that chance?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.errors import InputError

Verdict: TypeAlias = Literal["clearly better", "clearly worse", "cannot tell"]
ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Paired:
    """Two models on the same samples. `won`: the first alone is right, `lost`: the second alone is right.

    >>> pair = Paired(won=9, lost=1, samples=100)
    >>> pair.difference, round(pair.p_value, 4)
    (0.08, 0.0215)
    """

    won: int
    lost: int
    samples: int

    @property
    def difference(self) -> float:
        """The first model's accuracy less the second's."""
        return (self.won - self.lost) / self.samples if self.samples else 0.0

    @property
    def p_value(self) -> float:
        """The exact two-sided sign test (McNemar's exact test): small if the difference is hardly chance."""
        return min(1.0, 2 * sign_test(max(self.won, self.lost), min(self.won, self.lost)))

    def verdict(self, p_value: float, alpha: float = ALPHA) -> Verdict:
        """Returns the first model's difference in words, by a p-value that may be corrected for other comparisons."""
        if p_value > alpha or self.won == self.lost:
            return "cannot tell"
        return "clearly better" if self.won > self.lost else "clearly worse"

    def needed(self, alpha: float = ALPHA) -> int | None:
        """Returns about how many samples would show this difference, if it is real; None if there is none.

        Connor's formula (1987) for McNemar's test.

        >>> Paired(won=9, lost=1, samples=100).needed()
        121
        """
        if self.won == self.lost:
            return None
        apart, gap = (self.won + self.lost) / self.samples, abs(self.difference)
        z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(POWER)
        return ceil(((z_alpha * sqrt(apart) + z_power * sqrt(max(0.0, apart - gap * gap))) / gap) ** 2)


def paired(first: Any, second: Any) -> Paired:
    """Compares which of the same samples two models get right: two vectors of booleans.

    >>> paired([True, True, False], [False, True, False])
    Paired(won=1, lost=0, samples=3)
    """
    one, other = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if one.ndim != 1 or one.shape != other.shape:
        raise InputError(f"a paired comparison needs the same samples twice, found {one.shape} and {other.shape}")
    return Paired(int((one & ~other).sum()), int((other & ~one).sum()), len(one))


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
