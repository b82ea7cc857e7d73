"""The cosine distance between mean embeddings."""

from __future__ import annotations

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats, Matrix


def cosine_distances(task: Matrix, target: Matrix, draws: Floats, name: str = "the task") -> Floats:
    """1 - cos(mean of task, mean of target) for each row of `draws`, which says how often each target sample counts.

    task [n, width], target [m, width], draws [k, m] -> [k]. The first draw is the sample itself and must have a mean
    with a direction; a later one whose mean is zero counts as orthogonal.

    >>> task, target = np.array([[2.0, 0.0]]), np.array([[0.0, 3.0], [1.0, 0.0]])
    >>> cosine_distances(task, target, np.array([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [1.0, 0.0]
    """
    own = _directions(task.mean(axis=0, dtype=np.float64)[None])
    means = draws @ target.astype(np.float64) / draws.sum(axis=1, keepdims=True)
    theirs = _directions(means)
    for direction, which in ((own[0], f"the mean embedding of {name}"), (theirs[0], f"the target's under {name}")):
        if not direction.any():
            raise InputError(f"{which} is zero, so it has no direction; use method='ot' or 'mmd'")
    distances: Floats = 1 - np.clip(theirs @ own[0], -1, 1)
    return distances


def _directions(vectors: Floats) -> Floats:
    # Dividing by the largest entry first keeps the squares from overflowing or vanishing. A zero vector stays zero.
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    vectors = vectors / np.where(largest > 0, largest, 1.0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions: Floats = vectors / np.where(lengths > 0, lengths, 1.0)
    return directions
