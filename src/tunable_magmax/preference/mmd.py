"""The maximum mean discrepancy between two samples: unbiased estimate of its square, RBF kernel, median bandwidth."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats, Matrix
from tunable_magmax.preference.distances import rescaled, squared_distances

Bandwidth: TypeAlias = Literal["pooled", "authors"]


def squared_mmd(
    task: Matrix, target: Matrix, draws: Floats, *, bandwidth: Bandwidth = "pooled", name: str = "the task"
) -> Floats:
    """The unbiased estimate of MMD^2 for each row of `draws`, which says how often each target sample counts.

    task [n, width], target [m, width], draws [k, m] -> [k]. It can be negative. The kernel is exp(-d^2 / (2 s^2)).
    "pooled": s is the median distance between two different samples of task and target together. "authors": each of
    the three terms takes the median distance inside its own first argument, as in the authors' code. Two draws of one
    sample are not a pair, so that a bootstrap draw is not biased by the samples it holds twice.

    >>> task, target = np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> round(float(squared_mmd(task, target, np.ones((1, 2)))[0]), 6)  # exp(-1/2) - 1
    -0.393469
    """
    if bandwidth not in ("pooled", "authors"):
        raise InputError(f"bandwidth must be 'pooled' or 'authors', not {bandwidth!r}")
    n, m = len(task), len(target)
    for size, side in ((n, name), (m, "the target")):
        if size < 2:
            raise InputError(
                f"mmd needs at least 2 samples on each side and {side} has {size}; give more, or use method='ot' or "
                "'cosine'"
            )
    x, y = rescaled(task, target)
    within, across, inside = squared_distances(x, x), squared_distances(x, y), squared_distances(y, y)
    own, theirs = _pairs(within), _pairs(inside)
    if bandwidth == "pooled":
        scales = [_median(np.concatenate([own, across.ravel(), theirs]))] * 3
    else:
        scales = [_median(own), _median(own), _median(theirs)]
    first = float(_kernel(own, scales[0]).mean())
    cross = _kernel(across, scales[1]).mean(axis=0)
    kernel = _kernel(inside, scales[2])
    np.fill_diagonal(kernel, 0)
    drawn = draws.sum(axis=1)
    pairs = np.square(drawn) - np.square(draws).sum(axis=1)
    second = np.einsum("km,km->k", draws @ kernel, draws) / np.where(pairs > 0, pairs, 1.0)
    estimate: Floats = first + second - 2 * (draws @ cross) / drawn
    return estimate


def _pairs(distances: Floats) -> Floats:
    """The distances between two different samples, each once."""
    return distances[np.triu_indices(len(distances), 1)]


def _median(squared: Floats) -> float:
    return float(np.median(np.sqrt(squared)))


def _kernel(squared: Floats, scale: float) -> Floats:
    # More than half of the pairs coincide: the limit of the kernel as its bandwidth goes to 0.
    if scale == 0:
        return np.where(squared == 0, 1.0, 0.0)
    kernel: Floats = np.exp(squared / (-2 * scale * scale))
    return kernel
