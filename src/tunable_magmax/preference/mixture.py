"""Which mixture of known distributions explains a histogram, or samples: EM, or least squares on the simplex."""

from __future__ import annotations

import numpy as np

from tunable_magmax.preference.arrays import Floats

ITERATIONS = 300
TOLERANCE = 1e-7
SAMPLE_ITERATIONS = 500
SAMPLE_TOLERANCE = 1e-6


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


def mixture_weights(
    likelihoods: Floats,
    counts: Floats,
    concentration: float = 1.0,
    iterations: int = SAMPLE_ITERATIONS,
    tolerance: float = SAMPLE_TOLERANCE,
) -> Floats:
    """Weights [B, T] of mixtures that explain samples by their `likelihoods` [n, T]: EM from equal weights.

    `counts` [B, n]: how often each sample counts, in each of B cases. Likelihoods may have any scale in each row.
    `concentration` is the exponent of a Dirichlet prior: 1 is maximum likelihood; below it, a task must explain more
    than 1 - `concentration` samples or it drops out (unless none would stay), and those that stay then get their
    likeliest weights. Each case stops when no weight moves by more than `tolerance`.

    >>> mixture_weights(np.array([[0.9, 0.1]] * 3 + [[0.2, 0.8]]), np.ones((1, 4))).round(2).tolist()
    [[0.97, 0.03]]
    """
    weights = np.full((len(counts), likelihoods.shape[1]), 1 / likelihoods.shape[1])
    # Without the second pass, those that stay would be too few by what each had to pay.
    for exponent in (concentration, 1.0) if concentration < 1 else (concentration,):
        _maximise(weights, likelihoods, counts, exponent, iterations, tolerance)
    return weights


def _maximise(
    weights: Floats, likelihoods: Floats, counts: Floats, exponent: float, iterations: int, tolerance: float
) -> None:
    """EM from `weights`, which are overwritten. A weight of 0 stays 0."""
    moving = np.arange(len(counts))
    for _ in range(iterations):
        present, seen = weights[moving], counts[moving]
        expected = present @ likelihoods.T
        ratio = np.divide(seen, expected, out=np.zeros_like(expected), where=expected > 0)
        explained = present * (ratio @ likelihoods)
        kept = np.maximum(explained + exponent - 1, 0)
        # Early, or of few samples, no task may explain enough: then the penalty waits.
        kept = np.where(kept.any(axis=1, keepdims=True), kept, explained)
        moved = kept / kept.sum(axis=1, keepdims=True)
        weights[moving] = moved
        # Cases that have converged stand still, so that no result depends on which others share its batch.
        moving = moving[np.abs(moved - present).max(axis=1) > tolerance]
        if not len(moving):
            break
