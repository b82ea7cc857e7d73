"""Estimates from inputs of the target, embedded by each task's encoder: transport, cosine, MMD."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.data.arrays import (
    Floats,
    Matrix,
    choose_rows,
    require_one_width,
    rescaled,
    squared_distances,
    task_matrices,
    unit_rows,
)
from tunable_magmax.errors import InputError, closest
from tunable_magmax.preference.estimate import WeightEstimate
from tunable_magmax.preference.transport import SOLVER, Sinkhorn, transports
from tunable_magmax.preference.uncertainty import (
    RESAMPLING,
    Resampling,
    conclude,
    conclude_nothing,
    sample_replicates,
)

FeatureMethod: TypeAlias = Literal["ot", "cosine", "mmd"]
Bandwidth: TypeAlias = Literal["pooled", "authors"]
GAMMA: dict[str, float] = {"ot": 100.0, "cosine": 50.0, "mmd": 100.0}


@dataclass(frozen=True)
class Comparison:
    """How features are compared.

    `gamma`: None is the method's own. `solver`, `debias`, `raw` are for "ot", `bandwidth` for "mmd". Transport compares
    L2-normalised embeddings unless `raw`, which is the paper's way: their lengths differ more between tasks than
    between inputs. Of more than `max_samples` target samples a seeded draw is used: memory and time are bounded.
    """

    method: FeatureMethod = "ot"
    gamma: float | None = None
    solver: Sinkhorn = SOLVER
    debias: bool = False
    raw: bool = False
    bandwidth: Bandwidth = "pooled"
    max_samples: int | None = 5000
    resampling: Resampling = RESAMPLING

    def __post_init__(self) -> None:
        if self.method not in GAMMA:
            hint = closest(str(self.method), list(GAMMA))
            raise InputError(f"method must be one of {', '.join(GAMMA)}, not {self.method!r}{hint}")
        if self.gamma is not None and not 0 <= self.gamma < math.inf:
            raise InputError(f"gamma must be a finite number >= 0, not {self.gamma}")
        if self.bandwidth not in ("pooled", "authors"):
            raise InputError(f"bandwidth must be 'pooled' or 'authors', not {self.bandwidth!r}")

    @property
    def strength(self) -> float:
        """The gamma that is used."""
        return GAMMA[self.method] if self.gamma is None else float(self.gamma)


def feature_estimate(
    task_features: Sequence[Any], target_features: Sequence[Any], comparison: Comparison
) -> WeightEstimate:
    """Returns weights by exp(-gamma distance) between each task's features and the target's, both embedded by theta_t.

    `task_features`, `target_features`: T arrays [samples, width] each.

    >>> task, other = np.array([[0.0, 1.0], [0.1, 1.0]]), np.array([[5.0, 0.0], [5.0, 0.1]])
    >>> near = np.array([[0.0, 1.0], [0.0, 1.1]])
    >>> feature_estimate([task, other], [near, near], Comparison()).weights[0] > 0.99
    True
    """
    method, resampling = comparison.method, comparison.resampling
    tasks, targets = feature_pairs(task_features, target_features)
    record: dict[str, Any] = {"gamma": comparison.strength, "task_samples": [len(task) for task in tasks]}
    rows = choose_rows(len(targets[0]), comparison.max_samples, resampling.seed)
    if len(rows) < len(targets[0]):
        record["given_samples"] = len(targets[0])
        targets = [target[rows] for target in targets]
    samples = len(targets[0])
    if all(_constant(task, target) for task, target in zip(tasks, targets, strict=True)):
        return conclude_nothing(method, len(tasks), samples, record, resampling)
    if method == "ot":
        distances, replicates = _by_transport(tasks, targets, comparison, record)
    elif method == "cosine":
        distances, replicates = _by_draws(cosine_distances, tasks, targets, resampling)
    else:
        record["bandwidth"] = comparison.bandwidth
        discrepancy = partial(squared_mmd, bandwidth=comparison.bandwidth)
        distances, replicates = _by_draws(discrepancy, tasks, targets, resampling)
    record["distances"] = distances.tolist()
    weights, drawn = (weights_from_distances(table, comparison.strength) for table in (distances, replicates))
    return conclude(method, weights, drawn, samples, record, resampling)


def feature_pairs(task_features: Sequence[Any], target_features: Sequence[Any]) -> tuple[list[Matrix], list[Matrix]]:
    """Checks and returns the T pairs (task's own features, target's features), each pair embedded by theta_t."""
    tasks = task_matrices(task_features, "task features")
    targets = task_matrices(target_features, "target features")
    if len(tasks) != len(targets) or any(len(target) != len(targets[0]) for target in targets):
        raise InputError(
            f"{len(tasks)} tasks, and target features of {[len(target) for target in targets]} samples: the target's "
            "samples must be embedded once by each task's encoder"
        )
    for t, (task, target) in enumerate(zip(tasks, targets, strict=True), 1):
        require_one_width(task, target, t)
    return tasks, targets


def _by_transport(
    tasks: list[Matrix], targets: list[Matrix], comparison: Comparison, record: dict[str, Any]
) -> tuple[Floats, Floats]:
    """Returns distances [T] and those of the bootstrap draws [replicates, T]; adds how the solver did to `record`."""
    solver, debias = comparison.solver, comparison.debias
    if not comparison.raw:
        tasks, targets = [unit_rows(task) for task in tasks], [unit_rows(target) for target in targets]
    blocks = list(sample_replicates(len(targets[0]), comparison.resampling))
    results = transports(tasks, targets, solver, debias=debias, draws=np.concatenate(blocks) if blocks else None)
    failed = [result.residual for result in results if not result.converged]
    if failed:
        warnings.warn(
            f"transport did not converge within {solver.iterations} iterations for {len(failed)} of {len(results)} "
            f"tasks (largest residual {max(failed):.1e}, tolerance {solver.tolerance:g}); raise iterations, or the "
            f"regularisation above {solver.regularisation:g}",
            stacklevel=4,
        )
    distances = np.array([result.cost for result in results])
    replicates = np.stack([result.draws for result in results], axis=1)
    record["regularisation"] = solver.regularisation
    record["debiased"] = debias
    record["normalised"] = not comparison.raw
    record["iterations"] = [result.iterations for result in results]
    record["residuals"] = [result.residual for result in results]
    record["converged"] = not failed
    return distances, replicates


def _by_draws(
    distance: Callable[..., Floats],
    tasks: list[Matrix],
    targets: list[Matrix],
    resampling: Resampling,
) -> tuple[Floats, Floats]:
    """Returns distances [T] and those of the bootstrap draws [replicates, T], for distances that take draws."""
    samples = len(targets[0])
    columns = []
    for t, (task, target) in enumerate(zip(tasks, targets, strict=True), 1):
        blocks = [np.ones((1, samples)), *sample_replicates(samples, resampling)]
        columns.append(np.concatenate([distance(task, target, draws, name=f"task {t}") for draws in blocks]))
    table = np.stack(columns, axis=1)
    return table[0], table[1:]


def _constant(task: Matrix, target: Matrix) -> bool:
    return bool((task == task[0]).all() and (target == task[0]).all())


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


def cosine_distances(task: Matrix, target: Matrix, draws: Floats, name: str = "the task") -> Floats:
    """1 - cos(mean of task, mean of target) for each row of `draws`, which says how often each target sample counts.

    task [n, width], target [m, width], draws [k, m] -> [k]. The first draw is the sample itself and must have a mean
    with a direction; a later one whose mean is zero counts as orthogonal.

    >>> task, target = np.array([[2.0, 0.0]]), np.array([[0.0, 3.0], [1.0, 0.0]])
    >>> cosine_distances(task, target, np.array([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [1.0, 0.0]
    """
    own = unit_rows(task.mean(axis=0, dtype=np.float64)[None])
    means = draws @ target.astype(np.float64) / draws.sum(axis=1, keepdims=True)
    theirs = unit_rows(means)
    for direction, which in ((own[0], f"the mean embedding of {name}"), (theirs[0], f"the target's under {name}")):
        if not direction.any():
            raise InputError(f"{which} is zero, so it has no direction; use method='ot' or 'mmd'")
    distances: Floats = 1 - np.clip(theirs @ own[0], -1, 1)
    return distances


def weights_from_distances(distances: Floats, gamma: float) -> Floats:
    """Returns exp(-gamma distance), normalised over the last axis: a softmax, which cannot underflow to 0/0.

    >>> weights_from_distances(np.array([1e6, 1e6 + 1]), gamma=100.0).round(6).tolist()
    [1.0, 0.0]
    """
    nearest = distances.min(axis=-1, keepdims=True)
    raised = np.exp(-gamma * (distances - nearest))
    shares: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return shares
