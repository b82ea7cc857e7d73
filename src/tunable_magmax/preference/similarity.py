"""From distances or similarities per task to weights."""

from __future__ import annotations

import math

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats


def weights_from_distances(distances: Floats, gamma: float) -> Floats:
    """exp(-gamma distance), normalised over the last axis: a softmax, so that large distances cannot underflow to 0/0.

    >>> weights_from_distances(np.array([1e6, 1e6 + 1]), gamma=100.0).round(6).tolist()
    [1.0, 0.0]
    """
    if not math.isfinite(gamma) or gamma < 0:
        raise InputError(f"gamma must be a finite number >= 0, not {gamma}")
    nearest = distances.min(axis=-1, keepdims=True)
    raised = np.exp(-gamma * (distances - nearest))
    shares: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return shares


def weights_from_similarities(similarities: Floats) -> Floats:
    """Similarities divided by their sum over the last axis; equal weights where all of them are 0.

    >>> weights_from_similarities(np.array([[3.0, 1.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    """
    total = similarities.sum(axis=-1, keepdims=True)
    tasks = similarities.shape[-1]
    shares: Floats = np.where(total > 0, similarities / np.where(total > 0, total, 1.0), 1.0 / tasks)
    return shares
