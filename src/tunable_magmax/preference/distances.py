"""Squared Euclidean distances between the rows of two samples, without overflow or needless cancellation."""

from __future__ import annotations

import numpy as np

from tunable_magmax.preference.arrays import Floats, Matrix


def rescaled(x: Matrix, y: Matrix) -> tuple[Floats, Floats]:
    """Both samples moved and divided by the same numbers, so that all values lie in [-1, 1].

    For what does not depend on a common shift and factor. The shift is a row, not the mean, so that identical rows
    become exact zeros.

    >>> rescaled(np.array([[1e300, 5.0]]), np.array([[3e300, 5.0]]))
    (array([[0., 0.]]), array([[1., 0.]]))
    """
    # Halves, because the difference of two finite numbers may not be finite.
    origin = x[0].astype(np.float64) / 2
    first: Floats = np.multiply(x, 0.5, dtype=np.float64)
    second: Floats = np.multiply(y, 0.5, dtype=np.float64)
    first -= origin
    second -= origin
    spread = max(_largest(first), _largest(second)) or 1.0
    first /= spread
    second /= spread
    return first, second


def squared_distances(x: Floats, y: Floats) -> Floats:
    """The matrix [n, m] of squared distances between rows of x [n, width] and y [m, width].

    >>> squared_distances(np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 1.0]])).tolist()
    [[25.0, 1.0]]
    """
    distances: Floats = x @ y.T
    distances *= -2
    distances += np.einsum("nw,nw->n", x, x)[:, None]
    distances += np.einsum("mw,mw->m", y, y)[None, :]
    return np.maximum(distances, 0, out=distances)


def _largest(values: Floats) -> float:
    return max(float(values.max()), -float(values.min()))
