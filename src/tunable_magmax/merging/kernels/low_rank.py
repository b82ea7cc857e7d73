"""base + scaling * (left @ right), with every rounding fixed, so that no cut into tiles can show.

A matrix product of a library sums in an order that depends on the shapes. Here each element is a sum of its own:
s = 0, then s = round(s + round(left[i, k] * right[k, j])) for k in order, all in float64; at the end
out = round(out + delta), where delta is scaling * s rounded to float64 and then to the type of `out`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class LowRankKernels(Protocol):
    """The two steps of a product."""

    def accumulate(self, left: Floats, rank: int, right: Floats, column: int, sums: Floats) -> None:
        """Go on with `sums` [n, m], over the ranks that `right` holds: its first is the given one of left [n, r].

        The sums are of the columns of `right` from the given one on. All arrays are contiguous.
        """

    def settle(self, sums: Floats, scaling: float, out: NDArray[Any], first: int, stride: int) -> None:
        """Add scaling * sums to `out`, which is flat: row i begins at first + i * stride."""


class PortableLowRank:
    """`LowRankKernels` on numpy, for machines without numba.

    >>> sums, out = np.zeros((2, 2)), np.ones(6, np.float32)
    >>> PortableLowRank().accumulate(np.array([[1.0], [2.0]]), 0, np.array([[1.0, 10.0]]), 0, sums)
    >>> PortableLowRank().settle(sums, 0.5, out, first=0, stride=3)
    >>> out.tolist()
    [1.5, 6.0, 1.0, 2.0, 11.0, 1.0]
    """

    def accumulate(self, left: Floats, rank: int, right: Floats, column: int, sums: Floats) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found and named by the survey
            for k, line in enumerate(right[:, column : column + sums.shape[1]], start=rank):
                sums += left[:, k : k + 1] * line

    def settle(self, sums: Floats, scaling: float, out: NDArray[Any], first: int, stride: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            deltas = (scaling * sums).astype(out.dtype)
            for i, delta in enumerate(deltas):
                out[first + i * stride :][: delta.size] += delta


class NativeLowRank:
    """`LowRankKernels` on compiled loops."""

    def __init__(self) -> None:
        from tunable_magmax.merging.kernels import low_rank_compiled

        self._loops = low_rank_compiled

    def accumulate(self, left: Floats, rank: int, right: Floats, column: int, sums: Floats) -> None:
        self._loops.accumulate(left, rank, right, column, sums)

    def settle(self, sums: Floats, scaling: float, out: NDArray[Any], first: int, stride: int) -> None:
        self._loops.settle(sums, np.float64(scaling), out, first, stride)


@cache
def low_rank_kernels() -> LowRankKernels:
    """The fastest at hand."""
    return PortableLowRank() if find_spec("numba") is None else NativeLowRank()
