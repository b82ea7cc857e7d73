"""Estimates from inputs of the target, embedded by the base: a probe tells tasks apart, EM finds their mixture.

The base never saw a task, so its embeddings of all tasks can be compared with each other, which those of different task
encoders cannot. And the tasks' rows are labelled: a discriminant learned from them knows more than a zero-shot head.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import (
    Floats,
    Matrix,
    choose_rows,
    feature_matrix,
    require_one_width,
    task_matrices,
)
from tunable_magmax.errors import InputError
from tunable_magmax.models.discriminant import Probe
from tunable_magmax.preference.estimate import JSON
from tunable_magmax.preference.labels import plain_list
from tunable_magmax.preference.mixture import Groups
from tunable_magmax.preference.uncertainty import half_l1

# Near the best of 0, 0.25, 0.5, 0.75 and 1 on each of six settings (docs/preferences.md), whose targets have few tasks.
CONCENTRATION = 0.5
SIMULATIONS = 100
# A sample that is impossible under every task that is left says nothing, rather than dividing by 0.
LEAST = 1e-12
FAR = 0.95
ITERATIONS = 500
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class TaskProbe:
    """A probe over groups, one for each class of each task: two tasks may share classes and look different.

    `owners` [groups]: the task of each; `names`: the class of each. `members` [rows]: the task of each row behind the
    probe. `labels` [rows]: its group.
    """

    probe: Probe
    owners: NDArray[np.int64]
    members: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: tuple[Any, ...]

    @classmethod
    def fit(cls, task_features: Sequence[Matrix], task_labels: Sequence[Sequence[Any]], seed: int = 0) -> TaskProbe:
        """Fits a probe to T arrays [rows, width] and T lists of the rows' classes, names or indices."""
        groups: dict[tuple[int, Any], int] = {}
        labels = [groups.setdefault((t, label), len(groups)) for t, own in enumerate(task_labels) for label in own]
        owners = np.array([t for t, _ in groups], dtype=np.int64)
        indices = np.array(labels, dtype=np.int64)
        probe = Probe.fit(np.concatenate([*task_features]), indices, len(groups), seed)
        return cls(probe, owners, owners[indices], indices, tuple(name for _, name in groups))

    @property
    def tasks(self) -> int:
        return int(self.owners[-1]) + 1

    def likelihoods(self, posterior: Floats) -> Floats:
        """Returns p(x | task) [n, T] from posteriors [n, groups], with a scale of its own in each row."""
        belongs = np.eye(self.tasks)[self.owners]
        priors = np.bincount(self.members, minlength=self.tasks) / len(self.members)
        likelihoods = posterior @ belongs / priors
        likelihoods /= likelihoods.max(axis=1, keepdims=True)
        return np.maximum(likelihoods, LEAST)

    def evidence(self, features: Any, groups: Groups) -> Floats:
        """Returns p(x | group) [n, groups] of embeddings [n, width], up to a factor for each row.

        A group without a row behind the probe is taken for an average one of its task.
        """
        shares = np.bincount(self.labels, minlength=len(self.owners)) / len(self.labels)
        own = self.probe.posterior(features) / shares
        belongs = np.eye(groups.tasks)[self.owners] * shares[:, None]
        rows = belongs.sum(axis=0)
        evidence: Floats = np.where(rows > 0, own @ belongs / np.where(rows > 0, rows, 1.0), 1.0)[:, groups.owners]
        columns = {key: k for k, key in enumerate(zip(groups.owners.tolist(), groups.names, strict=True))}
        for k, key in enumerate(zip(self.owners.tolist(), self.names, strict=True)):
            if key in columns:
                evidence[:, columns[key]] = own[:, k]
        evidence /= evidence.max(axis=1, keepdims=True)
        return evidence.clip(min=LEAST)

    def facts(self) -> dict[str, JSON]:
        """Returns the probe's settings and how well it tells held-out rows."""
        probe = self.probe
        settings: dict[str, JSON] = {"covariance_shrinkage": probe.shrinkage, "temperature": probe.temperature}
        return {**settings, "log_loss": probe.loss, **self.accuracies()}

    def accuracies(self) -> dict[str, JSON]:
        """Returns the shares of held-out rows whose class and whose task the probe tells; the latter also by task."""
        guesses = self.probe.held_out.argmax(axis=1)
        right = (self.probe.held_out @ np.eye(self.tasks)[self.owners]).argmax(axis=1) == self.members
        each = np.bincount(self.members, weights=right) / np.bincount(self.members)
        return {
            "class_accuracy": float((guesses == self.labels).mean()),
            "task_accuracy": float(right.mean()),
            "task_accuracies": each.tolist(),
        }


def input_evidence(
    task_features: Sequence[Any],
    task_labels: Sequence[Any],
    target_features: Any,
    *,
    task_label_counts: Sequence[Mapping[Any, float]] | None = None,
    max_samples: int | None = 5000,
    fitted: TaskProbe | None = None,
    seed: int = 0,
) -> tuple[Floats, Groups, TaskProbe, Matrix]:
    """Returns the evidence [samples, groups] of the target's embeddings, the groups, the probe, and the rows used.

    `task_features`: T arrays [rows, width], `task_labels`: the classes of their rows, `target_features` [n, width], all
    embedded by one encoder, the base. `task_label_counts`: samples by class of each task, by default those of its rows.
    Of more than `max_samples` target samples a seeded draw is used. `fitted`: the probe of these tasks, where it was
    made for another target already.
    """
    tasks, labels, target = _checked(task_features, task_labels, target_features)
    target = target[choose_rows(len(target), max_samples, seed)]
    if all((part == target[0]).all() for part in (*tasks, target)):
        warnings.warn(
            "all features are identical, in every task and in the target: they say nothing; check the encoder and the "
            "inputs",
            stacklevel=3,
        )
    fitted = TaskProbe.fit(tasks, labels, seed) if fitted is None else fitted
    tables = [Counter(own) for own in labels] if task_label_counts is None else task_label_counts
    groups = Groups.of(tables)
    return fitted.evidence(target, groups), groups, fitted, target


def mixture_weights(
    likelihoods: Floats,
    counts: Floats,
    concentration: float = 1.0,
    iterations: int = ITERATIONS,
    tolerance: float = TOLERANCE,
) -> Floats:
    """Returns weights [B, T] of mixtures that explain samples by their `likelihoods` [n, T]: EM from equal weights.

    `counts` [B, n]: how often each sample counts, in each of B cases. Likelihoods may have any scale in each row.
    `concentration` is the exponent of a Dirichlet prior: 1 is maximum likelihood; below it, a task must explain more
    than 1 - `concentration` samples or it drops out (unless none would stay), and those that stay then get their
    likeliest weights. Each case stops when no weight moves by more than `tolerance`.

    >>> mixture_weights(np.array([[0.9, 0.1]] * 3 + [[0.2, 0.8]]), np.ones((1, 4))).round(2).tolist()
    [[0.97, 0.03]]
    """
    weights = np.full((len(counts), likelihoods.shape[1]), 1 / likelihoods.shape[1])
    # Without the second pass, those that stay would be too few by what each had to pay. A weight of 0 stays 0.
    for exponent in (concentration, 1.0) if concentration < 1 else (concentration,):
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
    return weights


def expected_error(fitted: TaskProbe, weights: Floats, samples: int, concentration: float, seed: int = 0) -> float:
    """Returns the mean half-L1 error over simulated targets of mixture `weights`: draws of the tasks' held-out rows."""
    likelihoods = fitted.likelihoods(fitted.probe.held_out)
    rows = [np.flatnonzero(fitted.members == t) for t in range(fitted.tasks)]
    rng = np.random.default_rng([seed, 1])
    shares, ones = weights / weights.sum(), np.ones((1, samples))
    errors = []
    for _ in range(SIMULATIONS):
        sizes = rng.multinomial(samples, shares)
        chosen = np.concatenate([rng.choice(own, size) for own, size in zip(rows, sizes, strict=True) if size])
        again = mixture_weights(likelihoods[chosen], ones, concentration)[0]
        errors.append(float(half_l1(again, shares)))
    return float(np.mean(errors))


def outside(fitted: TaskProbe, weights: Floats, distances: Floats) -> float:
    """Returns the share of target samples that are farther from every class than 95% of the tasks' own held-out rows.

    About 0.05 for a target that is a mixture of the tasks.
    """
    return float((distances > farthest(fitted, weights)).mean())


def farthest(fitted: TaskProbe, weights: Floats) -> float:
    """Returns the distance within which 95% of the tasks' own held-out rows lie; tasks count by their weights."""
    own = fitted.probe.held_out_distances
    importance = (weights / np.bincount(fitted.members, minlength=fitted.tasks))[fitted.members]
    order = np.argsort(own, kind="stable")
    reached = np.cumsum(importance[order])
    return float(own[order][min(int(np.searchsorted(reached, FAR * reached[-1])), len(own) - 1)])


def _checked(
    task_features: Sequence[Any], task_labels: Sequence[Any], target_features: Any
) -> tuple[list[Matrix], list[list[Any]], Matrix]:
    tasks = task_matrices(task_features, "base features")
    target = feature_matrix(target_features, "base features of the target")
    lists = plain_list(task_labels, "task_labels")
    labels = [plain_list(own, f"labels of task {t}") for t, own in enumerate(lists, 1)]
    rows, given = [*map(len, tasks)], [*map(len, labels)]
    if rows != given:
        raise InputError(f"the tasks have {rows} rows of features and {given} labels: give one for each row")
    for t, task in enumerate(tasks, 1):
        require_one_width(task, target, t)
    return tasks, labels, target
