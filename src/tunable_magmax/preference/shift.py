"""Estimates from a fixed classifier's predictions: the mixture of tasks, by label-shift estimation.

The classifier errs, but it errs on the target as it erred on the tasks. Its predicted-class histogram on each task's
own sample is known, so the target's histogram is, up to sampling, a mixture of those: EM or least squares finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError, closest
from tunable_magmax.preference.estimate import WeightEstimate
from tunable_magmax.preference.labels import (
    ClassCounts,
    OnZero,
    class_shares,
    count_classes,
    label_estimate,
    warn_unknown,
)
from tunable_magmax.preference.uncertainty import RESAMPLING, Resampling, conclude, half_l1, histogram_replicates

ITERATIONS = 300
TOLERANCE = 1e-7


def likeliest(emissions: Floats, counts: Floats, iterations: int = ITERATIONS, tolerance: float = TOLERANCE) -> Floats:
    """Returns maximum-likelihood weights [B, T] of histograms `counts` [B, C] under `emissions` [T, C].

    EM from equal weights. emissions[t, c] is the probability of c in task t (positive wherever counts are); columns may
    come from several kinds of evidence at once. Stops when no row's mean log-likelihood can gain more than `tolerance`.

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
    """Returns weights [B, T] on the simplex that minimise the squared distance between mixture and histogram shares.

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
    """Returns the nearest points [B, T] with non-negative coordinates that sum to 1.

    >>> on_simplex(np.array([[0.5, 0.5], [2.0, 0.0]])).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    ordered = -np.sort(-points, axis=1)
    excess = (np.cumsum(ordered, axis=1) - 1) / np.arange(1, points.shape[1] + 1)
    last = (ordered > excess).sum(axis=1) - 1
    projected: Floats = np.maximum(points - np.take_along_axis(excess, last[:, None], axis=1), 0)
    return projected


def log_likelihood(emissions: Floats, counts: Floats, weights: Floats) -> Floats:
    """Returns the log-likelihood [B] of histograms `counts` [B, C] under the mixtures `weights` [B, T]."""
    expected = weights @ emissions
    logs = np.log(expected, out=np.zeros_like(expected), where=(counts > 0) & (expected > 0))
    impossible = ((counts > 0) & (expected <= 0)).any(axis=1)
    total: Floats = np.where(impossible, -np.inf, (counts * logs).sum(axis=1))
    return total


ShiftMethod: TypeAlias = Literal["shift", "em", "least_squares", "pseudo"]
SHIFT_METHODS: tuple[ShiftMethod, ...] = get_args(ShiftMethod)
SOLVERS: dict[str, Callable[[Floats, Floats], Floats]] = {"em": likeliest, "least_squares": closest_mixture}
# Half a sample per class (Jeffreys); on five simulated settings EM's half-L1 error was 0.006 to 0.021 below 0.01's.
SMOOTHING = 0.5


def shift_estimate(
    task_predictions: Sequence[Any],
    predictions: Iterable[Any],
    *,
    method: ShiftMethod = "shift",
    task_label_counts: Sequence[Any] | None = None,
    labels: Iterable[Any] | None = None,
    smoothing: float = SMOOTHING,
    on_zero: OnZero = "error",
    resampling: Resampling = RESAMPLING,
) -> WeightEstimate:
    """Returns weights from a classifier's predictions on the target and its predicted-class counts on each task.

    `task_predictions`: per task, a class-to-count mapping or counts by class index. `predictions`: the class
    predicted for each target sample. "em" and "least_squares" solve for the mixture, "shift" takes the one with more
    evidence. "pseudo" counts predictions as labels of the tasks whose classes `task_label_counts` names. `labels`, if
    there are some for other samples of the target, join the likelihood (EM only) and need `task_label_counts`.

    >>> shift_estimate([{"a": 9, "b": 1}, {"a": 1, "b": 9}], ["a"] * 7 + ["b"] * 3, method="em").weights
    (0.77..., 0.22...)
    """
    if method not in SHIFT_METHODS:
        raise InputError(
            f"method must be one of {', '.join(SHIFT_METHODS)}, not {method!r}{closest(str(method), SHIFT_METHODS)}"
        )
    if not 0 <= smoothing < np.inf:
        raise InputError(f"smoothing must be a number >= 0, not {smoothing}")
    if (labels is not None or method == "pseudo") and task_label_counts is None:
        raise InputError("task_label_counts is missing: the tasks' own class counts are needed to read labels")
    if labels is not None and method in ("pseudo", "least_squares"):
        raise InputError(f"labels join a likelihood, which {method} does not use; choose method='em'")
    if method == "pseudo":
        options: dict[str, Any] = {"similarity": "count", "on_zero": on_zero, "resampling": resampling}
        return label_estimate(task_label_counts or (), predictions, method="pseudo", **options)
    evidence = {"predictions": _counted(task_predictions, predictions, "predictions")}
    if labels is not None and task_label_counts is not None:
        evidence["labels"] = _counted(task_label_counts, labels, "labels")
        warn_unknown(evidence["labels"])
        sizes = [len(counts.tasks) for counts in evidence.values()]
        if sizes[0] != sizes[1]:
            raise InputError(f"task_predictions has {sizes[0]} tasks and task_label_counts {sizes[1]}")
        method = "em"
    emissions = np.concatenate([class_shares(counts.tasks, smoothing) for counts in evidence.values()], axis=1)
    target = np.concatenate([counts.target for counts in evidence.values()])
    record: dict[str, Any] = {"smoothing": smoothing}
    for kind, counts in evidence.items():
        record[kind] = {"used": round(counts.target.sum()), "unknown": sum(counts.unknown.values())}
    weights, record["solver"], record["evidence"] = _solve(emissions, target, method)
    draws = [histogram_replicates(counts.target, resampling, k) for k, counts in enumerate(evidence.values())]
    replicates = SOLVERS[record["solver"]](emissions, np.concatenate(draws, axis=1)) if resampling.replicates else None
    name = "shift" if len(evidence) == 1 else "shift+label"
    return conclude(name, weights, replicates, round(target.sum()), record, resampling)


def _solve(emissions: Floats, target: Floats, method: str) -> tuple[Floats, str, dict[str, float] | None]:
    """Returns weights, the solver used, and the evidence for each: the log-likelihood of left-out samples, per sample.

    Leaving one sample out changes its class's count by one, so there are as many fits as predicted classes and the
    result depends on no order and no draw.
    """
    if method != "shift":
        return SOLVERS[method](emissions, target[None])[0], method, None
    seen = np.flatnonzero(target)
    samples = target.sum()
    if samples < 2:
        return likeliest(emissions, target[None])[0], "em", None
    left_out = np.eye(len(target))[seen]
    scores = {}
    for name, solver in SOLVERS.items():
        fitted = solver(emissions, target - left_out)
        scores[name] = float(target[seen] @ log_likelihood(emissions, left_out, fitted) / samples)
    best = max(SOLVERS, key=lambda name: scores[name])
    # A histogram that a solver calls impossible has no finite score, and JSON has no infinity.
    known = {name: score for name, score in scores.items() if np.isfinite(score)}
    return SOLVERS[best](emissions, target[None])[0], best, known


def _counted(task_counts: Sequence[Any], labels: Iterable[Any], kind: str) -> ClassCounts:
    """Counts classes of tasks and target; refuses a target without a known class and a task without a sample."""
    counts = count_classes(task_counts, labels)
    if not counts.target.any():
        raise InputError(
            f"none of the {sum(counts.unknown.values())} {kind} is a class that any task shows, so the mixture cannot "
            "be estimated; check that tasks and target were read by the same classifier, with the same class names"
        )
    empty = [t for t, row in enumerate(counts.tasks, 1) if not row.any()]
    if empty:
        raise InputError(f"no counts for task {empty[0]}: every task needs a sample that the classifier has seen")
    return counts


def shift_outlook(
    task_predictions: Sequence[Any],
    predictions: Iterable[Any],
    weights: Sequence[float],
    solver: str = "em",
    smoothing: float = SMOOTHING,
    resampling: Resampling = RESAMPLING,
) -> tuple[float, float]:
    """Returns how far `weights` can be trusted: their expected half-L1 error, and the fit.

    Simulates targets of that mixture from the tasks' histograms and estimates them again. The fit is the share of them
    that the mixture explains no better than the real target; near 0, no mixture of the tasks explains the target.
    """
    counts = count_classes(task_predictions, predictions)
    emissions = class_shares(counts.tasks, smoothing)
    truth = np.asarray(weights, dtype=np.float64)
    rng = np.random.default_rng(resampling.seed)
    samples, replicates = round(counts.target.sum()), max(resampling.replicates, 1)
    sizes = np.maximum(np.rint(counts.tasks.sum(axis=1)), 1).astype(np.int64)
    drawn: Floats = np.empty((replicates, emissions.shape[1]))
    for row in drawn:
        tables = np.stack([rng.multinomial(size, table) / size for size, table in zip(sizes, emissions, strict=True)])
        mixed = truth @ tables
        row[:] = rng.multinomial(samples, mixed / mixed.sum())
    solve = SOLVERS[solver]
    again = solve(emissions, drawn)
    error = float(half_l1(again, truth).mean())
    deviance = _deviance(emissions, drawn, again)
    observed = _deviance(emissions, counts.target[None], truth[None])[0]
    return error, float((deviance >= observed).mean())


def _deviance(emissions: Floats, counts: Floats, weights: Floats) -> Floats:
    """Returns the gap between the likelihood of the mixture and that of the histogram itself."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    gap: Floats = (counts * logs).sum(axis=1) - log_likelihood(emissions, counts, weights)
    return gap
