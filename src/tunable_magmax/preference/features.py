"""Preferences from inputs of the target, embedded by each task's encoder: transport, cosine, MMD."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.errors import InputError, closest
from tunable_magmax.preference.arrays import Floats, Matrix, feature_pairs
from tunable_magmax.preference.cosine import cosine_distances
from tunable_magmax.preference.mmd import Bandwidth, squared_mmd
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.similarity import weights_from_distances
from tunable_magmax.preference.transport import DEFAULT as SOLVER
from tunable_magmax.preference.transport import Sinkhorn, transports, warn_unconverged
from tunable_magmax.preference.uncertainty import DEFAULT, Resampling, conclude, sample_replicates

Method: TypeAlias = Literal["ot", "cosine", "mmd"]
GAMMA: dict[str, float] = {"ot": 100.0, "cosine": 50.0, "mmd": 100.0}


def feature_preference(
    task_features: Sequence[Any],
    target_features: Sequence[Any],
    *,
    method: Method = "ot",
    gamma: float | None = None,
    solver: Sinkhorn = SOLVER,
    debias: bool = False,
    bandwidth: Bandwidth = "pooled",
    max_samples: int | None = 5000,
    resampling: Resampling = DEFAULT,
) -> Preference:
    """Weights by exp(-gamma distance) between each task's features and the target's, both embedded by theta_t.

    `task_features`, `target_features`: T arrays [samples, width] each. `solver`, `debias` are for "ot", `bandwidth` for
    "mmd". Of more than `max_samples` target samples a seeded draw is used, so that memory and time are bounded.

    >>> task, other = np.array([[0.0, 1.0], [0.1, 1.0]]), np.array([[5.0, 0.0], [5.0, 0.1]])
    >>> near = np.array([[0.0, 1.0], [0.0, 1.1]])
    >>> feature_preference([task, other], [near, near]).weights[0] > 0.99
    True
    """
    if method not in GAMMA:
        raise InputError(f"method must be one of {', '.join(GAMMA)}, not {method!r}{closest(str(method), list(GAMMA))}")
    strength = GAMMA[method] if gamma is None else float(gamma)
    if not math.isfinite(strength) or strength < 0:
        raise InputError(f"gamma must be a finite number >= 0, not {gamma}")
    tasks, targets = feature_pairs(task_features, target_features)
    samples = len(targets[0])
    record: dict[str, Any] = {"gamma": strength, "task_samples": [len(task) for task in tasks]}
    if max_samples is not None and samples > max_samples:
        if max_samples < 1:
            raise InputError(f"max_samples must be >= 1, not {max_samples}")
        drawn = np.sort(np.random.default_rng(resampling.seed).permutation(samples)[:max_samples])
        targets = [target[drawn] for target in targets]
        record["given_samples"], samples = samples, max_samples
    if all(_constant(task, target) for task, target in zip(tasks, targets, strict=True)):
        warnings.warn(
            "all features are identical, in every task and in the target: they say nothing, so the weights are equal; "
            "check the encoder and the inputs",
            stacklevel=3,
        )
        record["reason"] = "all features are identical"
        return conclude(method, np.full(len(tasks), 1 / len(tasks)), None, samples, record, resampling)
    if method == "ot":
        distances, replicates = _by_transport(tasks, targets, solver, debias, resampling, record)
    elif method == "cosine":
        distances, replicates = _by_draws(cosine_distances, tasks, targets, resampling)
    else:
        record["bandwidth"] = bandwidth

        def discrepancy(task: Matrix, target: Matrix, draws: Floats, name: str) -> Floats:
            return squared_mmd(task, target, draws, bandwidth=bandwidth, name=name)

        distances, replicates = _by_draws(discrepancy, tasks, targets, resampling)
    record["distances"] = distances.tolist()
    weights = weights_from_distances(distances, strength)
    return conclude(method, weights, weights_from_distances(replicates, strength), samples, record, resampling)


def _by_transport(
    tasks: list[Matrix],
    targets: list[Matrix],
    solver: Sinkhorn,
    debias: bool,
    resampling: Resampling,
    record: dict[str, Any],
) -> tuple[Floats, Floats]:
    """Distances [T] and those of the bootstrap draws [replicates, T]; how the solver did goes into `record`."""
    blocks = list(sample_replicates(len(targets[0]), resampling))
    results = transports(tasks, targets, solver, debias=debias, draws=np.concatenate(blocks) if blocks else None)
    warn_unconverged(results, solver)
    distances = np.array([result.cost for result in results])
    replicates = np.stack([result.draws for result in results], axis=1)
    record["regularisation"] = solver.regularisation
    record["debiased"] = debias
    record["iterations"] = [result.iterations for result in results]
    record["residuals"] = [result.residual for result in results]
    record["converged"] = all(result.converged for result in results)
    return distances, replicates


def _by_draws(
    distance: Callable[[Matrix, Matrix, Floats, str], Floats],
    tasks: list[Matrix],
    targets: list[Matrix],
    resampling: Resampling,
) -> tuple[Floats, Floats]:
    """Distances [T] and those of the bootstrap draws [replicates, T], for distances that take draws."""
    samples = len(targets[0])
    columns = []
    for t, (task, target) in enumerate(zip(tasks, targets, strict=True), 1):
        blocks = [np.ones((1, samples)), *sample_replicates(samples, resampling)]
        columns.append(np.concatenate([distance(task, target, draws, f"task {t}") for draws in blocks]))
    table = np.stack(columns, axis=1)
    return table[0], table[1:]


def _constant(task: Matrix, target: Matrix) -> bool:
    return bool((task == task[0]).all() and (target == task[0]).all())
