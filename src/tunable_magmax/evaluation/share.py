"""A share of samples, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Share:
    """`right` of `samples`.

    >>> Share(3, 4).value, [round(end, 3) for end in Share(3, 4).interval()]
    (0.75, [0.301, 0.954])
    """

    right: int
    samples: int

    @property
    def value(self) -> float:
        """The share; NaN without samples."""
        return self.right / self.samples if self.samples else math.nan

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Wilson's score interval: also good for few samples and for shares near 0 and 1. Without samples, (0, 1)."""
        if not self.samples:
            return 0.0, 1.0
        z, n = NormalDist().inv_cdf((1 + level) / 2), self.samples
        centre = (self.right + z * z / 2) / (n + z * z)
        half = z / (n + z * z) * math.sqrt(self.right * (n - self.right) / n + z * z / 4)
        low = 0.0 if self.right == 0 else max(0.0, centre - half)
        high = 1.0 if self.right == n else min(1.0, centre + half)
        return low, high
