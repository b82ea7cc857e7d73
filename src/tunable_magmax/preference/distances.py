"""The paper's estimators from inputs: a distance between each task's embeddings and the site's, both by theta_t.

They are transport ("ot"), the cosine of the means, and the maximum mean discrepancy; w_t ~ exp(-gamma distance_t).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.data.arrays import Floats, Matrix, feature_matrix, unit_rows
from tunable_magmax.errors import InputError, closest

FeatureMethod: TypeAlias = Literal["ot", "cosine", "mmd"]
# The authors' settings.
GAMMA: dict[str, float] = {"ot": 100.0, "cosine": 50.0, "mmd": 100.0}
REGULARISATION, ITERATIONS, TOLERANCE = 0.1, 100, 1e-6


def feature_distances(
    task_features: Sequence[Any], site_features: Sequence[Any], method: FeatureMethod = "ot", raw: bool = False
) -> Floats:
    """Returns a distance for each of T pairs of arrays [samples, width], both embedded by theta_t.

    Transport compares embeddings of unit length unless `raw`, which is the paper's way: their lengths differ more
    between tasks than between inputs.

    >>> feature_distances([[[0.0], [2.0]], [[1.0], [1.0]]], [[[0.0]]] * 2, raw=True).round(6).tolist()
    [0.5, 1.0]
    """
    if method not in GAMMA:
        raise InputError(f"method must be one of {', '.join(GAMMA)}, not {method!r}{closest(str(method), list(GAMMA))}")
    tasks, sites = task_matrices(task_features, "task features"), task_matrices(site_features, "site features")
    if len(tasks) != len(sites) or any(len(site) != len(sites[0]) for site in sites):
        raise InputError(
            f"{len(tasks)} tasks, and site features of {[len(site) for site in sites]} samples: the site's samples "
            "must be embedded once by each task's encoder"
        )
    for t, (task, site) in enumerate(zip(tasks, sites, strict=True), 1):
        require_one_width(task, site, t)
    pairs = list(zip(tasks, sites, strict=True))
    if all((task == task[0]).all() and (site == task[0]).all() for task, site in pairs):
        warnings.warn(
            "all features are identical, in every task and at the site: they say nothing, so the weights are equal; "
            "check the encoder and the inputs",
            stacklevel=3,
        )
        return np.zeros(len(tasks))
    if method == "ot":
        return np.array([_transport(task, site, raw, t) for t, (task, site) in enumerate(pairs, 1)])
    if method == "cosine":
        return np.array([_cosine(task, site, t) for t, (task, site) in enumerate(pairs, 1)])
    return np.array([squared_mmd(task, site, f"task {t}") for t, (task, site) in enumerate(pairs, 1)])


def task_matrices(values: Any, name: str) -> list[Matrix]:
    """Returns T arrays [samples, width], one for each task, checked as `feature_matrix` does."""
    listed = hasattr(values, "__len__") and not isinstance(values, (str, Mapping)) and getattr(values, "ndim", 3) == 3
    if not listed or not len(values):
        raise InputError(f"{name}: expected a list of arrays [samples, width], one for each task")
    return [feature_matrix(value, f"{name} of task {t}") for t, value in enumerate(values, 1)]


def require_one_width(task: Matrix, site: Matrix, t: int) -> None:
    """Refuses features of task `t` and of the site that cannot come from one encoder."""
    if task.shape[1] != site.shape[1]:
        raise InputError(
            f"task {t}: its features have width {task.shape[1]} and the site's have width {site.shape[1]}; embed "
            "both with the same encoder"
        )


def weights_from_distances(distances: Floats, gamma: float) -> Floats:
    """Returns exp(-gamma distance), normalised: a softmax, which cannot underflow to 0/0.

    >>> weights_from_distances(np.array([1e6, 1e6 + 1]), gamma=100.0).round(6).tolist()
    [1.0, 0.0]
    """
    raised = np.exp(-gamma * (distances - distances.min()))
    shares: Floats = raised / raised.sum()
    return shares


# -- transport ---------------------------------------------------------------------------------------------------------


def _transport(task: Matrix, site: Matrix, raw: bool, t: int) -> float:
    first, second = _rescaled(task, site) if raw else (unit_rows(task), unit_rows(site))
    cost = _squared_distances(first, second)
    cost /= cost.max() or 1.0
    found, residual = sinkhorn(cost)
    if residual > TOLERANCE:
        warnings.warn(
            f"transport did not converge within {ITERATIONS} iterations for task {t}: residual {residual:.1e}",
            stacklevel=4,
        )
    return found


def sinkhorn(
    cost: Floats, regularisation: float = REGULARISATION, iterations: int = ITERATIONS, tolerance: float = TOLERANCE
) -> tuple[float, float]:
    """Returns <P, C> of the entropic plan P between uniform samples, and how far its row sums are from uniform (L1).

    Sinkhorn's iterations in the log domain, rows first; its column sums are exact.

    >>> cost, residual = sinkhorn(np.array([[0.0, 1.0], [1.0, 0.0]]), regularisation=1.0)
    >>> round(cost, 6)  # e^-1 / (1 + e^-1)
    0.268941
    """
    n, m = cost.shape
    kernel = -cost / regularisation
    rows, residual = _logsumexp(kernel, axis=1), np.inf
    for _ in range(iterations):
        f = -np.log(n) - rows
        g = -np.log(m) - _logsumexp(kernel + f[:, None], axis=0)
        rows = _logsumexp(kernel + g, axis=1)
        residual = float(np.abs(np.exp(f + rows) - 1 / n).sum())
        if residual <= tolerance:
            break
    return float((np.exp(kernel + f[:, None] + g) * cost).sum()), residual


def _logsumexp(values: Floats, axis: int) -> Floats:
    largest = values.max(axis=axis, keepdims=True)
    total: Floats = np.log(np.exp(values - largest).sum(axis=axis)) + largest.squeeze(axis)
    return total


def _rescaled(x: Matrix, y: Matrix) -> tuple[Floats, Floats]:
    """Returns both moved and divided by the same numbers, so that all values lie in [-1, 1]: nothing overflows.

    The shift is a row, not the mean, so that identical rows become exact zeros.
    """
    # Halves, because the difference of two finite numbers may not be finite.
    origin = x[0].astype(np.float64) / 2
    first, second = (np.multiply(rows, 0.5, dtype=np.float64) - origin for rows in (x, y))
    spread = max(np.abs(first).max(), np.abs(second).max()) or 1.0
    return first / spread, second / spread


def _squared_distances(x: Floats, y: Floats) -> Floats:
    lengths = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1)
    distances: Floats = np.maximum(lengths - 2 * (x @ y.T), 0)
    return distances


# -- cosine and mmd ----------------------------------------------------------------------------------------------------


def _cosine(task: Matrix, site: Matrix, t: int) -> float:
    """Returns 1 - cos(mean of the task, mean of the site)."""
    own, theirs = (unit_rows(rows.mean(axis=0, dtype=np.float64)[None])[0] for rows in (task, site))
    for direction, which in ((own, f"the mean embedding of task {t}"), (theirs, f"the site's under task {t}")):
        if not direction.any():
            raise InputError(f"{which} is zero, so it has no direction; use method='ot' or 'mmd'")
    return 1 - float(np.clip(own @ theirs, -1, 1))


def squared_mmd(task: Matrix, site: Matrix, name: str = "the task") -> float:
    """Returns the unbiased estimate of MMD^2, which can be negative, with the kernel exp(-d^2 / (2 s^2)).

    s is the median distance between two different samples of task and site together.

    >>> round(squared_mmd(np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])), 6)  # exp(-1/2) - 1
    -0.393469
    """
    for rows, side in ((task, name), (site, "the site")):
        if len(rows) < 2:
            raise InputError(
                f"mmd needs at least 2 samples on each side and {side} has {len(rows)}; give more, or use method='ot' "
                "or 'cosine'"
            )
    x, y = _rescaled(task, site)
    across = _squared_distances(x, y).ravel()
    own, theirs = (_squared_distances(rows, rows)[np.triu_indices(len(rows), 1)] for rows in (x, y))
    scale = float(np.median(np.sqrt(np.concatenate([own, across, theirs]))))
    within, between, inside = (_kernel(values, scale) for values in (own, across, theirs))
    return within + inside - 2 * between


def _kernel(squared: Floats, scale: float) -> float:
    # At 0 more than half of the pairs coincide: the limit of the kernel as its bandwidth goes to 0.
    kernel = np.exp(squared / (-2 * scale * scale)) if scale else squared == 0
    return float(kernel.mean())
