"""The cosine distance between mean embeddings."""

from __future__ import annotations

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats, Matrix


def cosine_distances(task: Matrix, target: Matrix, draws: Floats, name: str = "the task") -> Floats:
    """1 - cos(mean of task, mean of target) for each row of `draws`, which says how often each target sample counts.

    task [n, width], target [m, width], draws [k, m] -> [k].

    >>> task, target = np.array([[2.0, 0.0]]), np.array([[0.0, 3.0], [1.0, 0.0]])
    >>> cosine_distances(task, target, np.array([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [1.0, 0.0]
    """
    own = _direction(task.mean(axis=0, dtype=np.float64)[None], f"the mean embedding of {name}")
    means = draws @ target.astype(np.float64) / draws.sum(axis=1, keepdims=True)
    theirs = _direction(means, f"the target's mean embedding under {name}")
    distances: Floats = 1 - np.clip(theirs @ own[0], -1, 1)
    return distances


def _direction(vectors: Floats, name: str) -> Floats:
    # Dividing by the largest entry first keeps the squares from overflowing or vanishing.
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    if not largest.all():
        raise InputError(f"{name} is zero, so it has no direction; use method='ot' or 'mmd'")
    vectors = vectors / largest
    directions: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return directions
