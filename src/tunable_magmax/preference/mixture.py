"""Which mixture of known distributions explains a histogram: maximum likelihood (EM), least squares on the simplex."""

from __future__ import annotations

import numpy as np

from tunable_magmax.preference.arrays import Floats

ITERATIONS = 300
TOLERANCE = 1e-7


def likeliest(emissions: Floats, counts: Floats, iterations: int = ITERATIONS, tolerance: float = TOLERANCE) -> Floats:
    """Maximum-likelihood weights [B, T] of histograms `counts` [B, C] under `emissions` [T, C]: EM from equal weights.

    emissions[t, c] is the probability of c in task t (positive wherever counts are); columns may come from several
    kinds of evidence at once. Stops when no row's mean log-likelihood can gain more than `tolerance`.

    >>> likeliest(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[3.0, 1.0]])).tolist()
    [[0.75, 0.25]]
    """
    tasks = len(emissions)
    shares = counts / counts.sum(axis=1, keepdims=True)
    weights = np.full((len(counts), tasks), 1 / tasks)
    for _ in range(iterations):
        expected = weights @ emissions
        ratio = np.divide(shares, expected, out=np.zeros_like(shares), where=(shares > 0) & (expected > 0))
        gain = ratio @ emissions.T
        weights = weights * gain
        # The likelihood is concave: its maximum exceeds the present value by at most max_t gain_t - 1.
        if gain.max() - 1 <= tolerance:
            break
    # EM approaches 0 but never arrives: what is left below the tolerance is no evidence for a task.
    weights = np.where(weights > tolerance, weights, 0.0)
    normalised: Floats = weights / weights.sum(axis=1, keepdims=True)
    return normalised


def closest_mixture(emissions: Floats, counts: Floats, iterations: int = 2000, tolerance: float = 1e-10) -> Floats:
    """Weights [B, T] on the simplex that minimise the squared distance between mixture and histogram shares.

    Accelerated projected gradient with restarts; stops when no row's objective can fall by more than `tolerance`.

    >>> closest_mixture(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[3.0, 1.0]])).round(6).tolist()
    [[0.75, 0.25]]
    """
    tasks = len(emissions)
    shares = counts / counts.sum(axis=1, keepdims=True)
    gram, linear = emissions @ emissions.T, shares @ emissions.T
    step = 1 / max(float(np.linalg.eigvalsh(gram)[-1]), np.finfo(np.float64).tiny)
    weights = np.full((len(counts), tasks), 1 / tasks)
    ahead, momentum = weights, np.ones((len(counts), 1))
    for _ in range(iterations):
        slope = weights @ gram - linear
        # The objective is convex: its minimum lies at most this far below the present value.
        if ((weights * slope).sum(axis=1) - slope.min(axis=1)).max() <= tolerance:
            break
        moved = on_simplex(ahead - step * (ahead @ gram - linear))
        overshot = ((ahead - moved) * (moved - weights)).sum(axis=1, keepdims=True) > 0
        following = np.where(overshot, 1.0, (1 + np.sqrt(1 + 4 * momentum**2)) / 2)
        ahead = moved + np.where(overshot, 0.0, (momentum - 1) / following) * (moved - weights)
        weights, momentum = moved, following
    return weights


def on_simplex(points: Floats) -> Floats:
    """The nearest points [B, T] with non-negative coordinates that sum to 1.

    >>> on_simplex(np.array([[0.5, 0.5], [2.0, 0.0]])).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    ordered = -np.sort(-points, axis=1)
    excess = (np.cumsum(ordered, axis=1) - 1) / np.arange(1, points.shape[1] + 1)
    last = (ordered > excess).sum(axis=1) - 1
    projected: Floats = np.maximum(points - np.take_along_axis(excess, last[:, None], axis=1), 0)
    return projected


def log_likelihood(emissions: Floats, counts: Floats, weights: Floats) -> Floats:
    """Log-likelihood [B] of histograms `counts` [B, C] under the mixtures `weights` [B, T]."""
    expected = weights @ emissions
    logs = np.log(expected, out=np.zeros_like(expected), where=(counts > 0) & (expected > 0))
    impossible = ((counts > 0) & (expected <= 0)).any(axis=1)
    total: Floats = np.where(impossible, -np.inf, (counts * logs).sum(axis=1))
    return total
