"""The cut that keeps so many elements of largest magnitude, exactly (TIES): where it may be, in ever smaller windows.

A scan of a window lists a random sample of what is inside, which shows where the next window must be; all that is in
the last one is listed. Elements of one magnitude are in the order of their keys, so that no two are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.lottery import MASK

Listed = NDArray[np.uint64]
"""Elements [2, n]: their magnitudes, as bit patterns of float64, and their keys."""
LISTED = 1 << 18
"""About so many elements are listed at a time, over all tasks."""
SAMPLE = 1 << 10
"""A sample has so many elements at least."""
LISTED_BYTES = 2 * 16 * LISTED


@dataclass(frozen=True, slots=True)
class Cut:
    """Which elements of a task vector are kept: those of a larger magnitude, and of equal ones those with keys up to
    `key`."""

    magnitude: float
    key: int


NOTHING, EVERYTHING = Cut(inf, 0), Cut(0.0, MASK)


@dataclass(frozen=True, slots=True)
class Window:
    """Two cuts of a task's vector, of which the second one keeps more: the cut that keeps `wanted` elements is between.

    A scan of it counts the elements that `above` keeps, and lists those that only `last` keeps, or a sample of these.
    Zeros are never listed: kept or not, they are nothing.
    """

    task: int
    lottery_state: int
    wanted: int
    elements: int
    """Of the task vector."""
    room: int
    """So many elements may be listed, about."""
    inside: int
    """About so many elements are between the cuts; at first all are."""
    above: Cut = NOTHING
    last: Cut = EVERYTHING
    attempt: int = 0
    """Each attempt has another sample."""
    stride: int = 1
    """The scan is of one in so many elements, drawn already."""

    @property
    def rate(self) -> float:
        """The share of the elements inside that is listed: after a sample of this size, the next window has room."""
        size = max(SAMPLE, (7 * self.inside / self.room) ** 2)
        return 1.0 if self.inside <= self.room else min(self.room, size) / self.inside

    @property
    def most(self) -> int:
        """The sample has the elements whose random number of 32 bits is at most this."""
        return int(min(1.0, self.rate * self.stride) * (2**32 - 1))

    def next(self, before: int, listed: Listed) -> Window | Cut:
        """Returns the cut, or a smaller window, by what a scan of this one has counted and listed."""
        left, found = self.wanted - before, listed.shape[1]
        if self.rate < 1:
            # Four deviations each side of the place where the last one is expected: a miss has odds of 1e-4.
            place = left * self.rate
            half = 4 * sqrt(max(1.0, place)) + 8
            first, end = max(0, int(place - half)), max(0, int(place + half))
            above = _cut(listed, min(first, found - 1)) if first and found else self.above
            last = _cut(listed, end) if end < found else self.last
            inside = int((max(0, min(end, found) - first) + 8) / self.rate)
            return replace(self, above=above, last=last, inside=inside)
        if 0 < left <= found:
            return _cut(listed, left - 1)
        if left > found and self.last == EVERYTHING:  # all but zeros
            return EVERYTHING
        # Chance has misled: from the beginning, by another sample.
        return replace(self, above=NOTHING, last=EVERYTHING, inside=self.elements, attempt=self.attempt + 1)


def _cut(listed: Listed, k: int) -> Cut:
    """Returns the cut whose last element is the k-th of those that are listed, from 0."""
    magnitude: Any = np.partition(listed[0], -k - 1)[-k - 1]
    larger = int((listed[0] > magnitude).sum())
    keys = np.partition(listed[1, listed[0] == magnitude], k - larger)
    return Cut(float(magnitude.view(np.float64)), int(keys[k - larger]))
