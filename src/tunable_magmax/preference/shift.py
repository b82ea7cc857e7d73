"""Preferences from a fixed classifier's predictions: estimate the mixture over tasks by label-shift estimation.

The classifier errs, but it errs on the target as it erred on the tasks. Its predicted-class histogram on each task's
own sample is known, so the target's histogram is, up to sampling, a mixture of those. Its weights are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.errors import InputError, closest
from tunable_magmax.preference.arrays import Floats
from tunable_magmax.preference.labels import ClassCounts, OnZero, count_classes, label_preference
from tunable_magmax.preference.mixture import closest_mixture, likeliest, log_likelihood
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.uncertainty import DEFAULT, Resampling, conclude, histogram_replicates

Method: TypeAlias = Literal["shift", "em", "least_squares", "pseudo"]
METHODS = ("shift", "em", "least_squares", "pseudo")
SOLVERS: dict[str, Callable[[Floats, Floats], Floats]] = {"em": likeliest, "least_squares": closest_mixture}
# Half a sample per class (Jeffreys); on five simulated settings EM's half-L1 error was 0.006 to 0.021 below 0.01's.
SMOOTHING = 0.5
# With many classes and few samples the added ones would drown the counts.
MOST_ADDED = 0.2


def shift_preference(
    task_predictions: Sequence[Any],
    predictions: Iterable[Any],
    *,
    method: Method = "shift",
    task_label_counts: Sequence[Any] | None = None,
    labels: Iterable[Any] | None = None,
    smoothing: float = SMOOTHING,
    on_zero: OnZero = "error",
    resampling: Resampling = DEFAULT,
) -> Preference:
    """Weights from one classifier's predictions on the target and its predicted-class counts on each task's sample.

    `task_predictions`: per task, a class-to-count mapping or counts by class index. `predictions`: the class
    predicted for each target sample. "em" and "least_squares" solve for the mixture, "shift" takes the one with more
    evidence. "pseudo" counts predictions as labels of the tasks whose classes `task_label_counts` names. `labels`, if
    there are some for other samples of the target, join the likelihood (EM only) and need `task_label_counts`.

    >>> shift_preference([{"a": 9, "b": 1}, {"a": 1, "b": 9}], ["a"] * 7 + ["b"] * 3, method="em").weights
    (0.77..., 0.22...)
    """
    if method not in METHODS:
        raise InputError(f"method must be one of {', '.join(METHODS)}, not {method!r}{closest(str(method), METHODS)}")
    if not 0 <= smoothing < np.inf:
        raise InputError(f"smoothing must be a number >= 0, not {smoothing}")
    if (labels is not None or method == "pseudo") and task_label_counts is None:
        raise InputError("task_label_counts is missing: the tasks' own class counts are needed to read labels")
    if method == "pseudo":
        if labels is not None:
            raise InputError("pseudo labels and labels: use method='em', or Preference.combined on one of each")
        return label_preference(
            task_label_counts if task_label_counts is not None else (),
            predictions,
            similarity="count",
            on_zero=on_zero,
            resampling=resampling,
            method="pseudo",
        )
    evidence = [_evidence(task_predictions, predictions, smoothing, "predictions")]
    if labels is not None and task_label_counts is not None:
        if method == "least_squares":
            raise InputError("labels join the likelihood, which least_squares does not use; choose method='em'")
        evidence.append(_evidence(task_label_counts, labels, smoothing, "labels"))
        if len(evidence[1][0]) != len(evidence[0][0]):
            raise InputError(
                f"task_predictions has {len(evidence[0][0])} tasks and task_label_counts {len(evidence[1][0])}"
            )
        method = "em"
    emissions = np.concatenate([table for table, _, _ in evidence], axis=1)
    target = np.concatenate([counts.target for _, counts, _ in evidence])
    record: dict[str, Any] = {"smoothing": smoothing}
    for _, counts, kind in evidence:
        record[kind] = {"used": round(counts.target.sum()), "unknown": sum(counts.unknown.values())}
    weights, record["solver"], record["evidence"] = solve_by_evidence(emissions, target, method)
    parts = [histogram_replicates(counts.target, resampling, kind) for kind, (_, counts, _) in enumerate(evidence)]
    replicates = SOLVERS[record["solver"]](emissions, np.concatenate(parts, axis=1)) if resampling.replicates else None
    name = "shift" if len(evidence) == 1 else "shift+label"
    return conclude(name, weights, replicates, round(target.sum()), record, resampling)


def solve_by_evidence(emissions: Floats, target: Floats, method: str) -> tuple[Floats, str, dict[str, float] | None]:
    """Weights, the solver used, and the evidence for each: the log-likelihood of left-out samples, per sample.

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


def smoothed(task_counts: Floats, smoothing: float) -> Floats:
    """Class probabilities per task [T, C] after adding `smoothing` samples to every class.

    All that is added makes up at most a fifth of the task's sample.

    >>> smoothed(np.array([[7.0, 0.0]]), 0.5).tolist()
    [[0.9375, 0.0625]]
    """
    most = MOST_ADDED * task_counts.sum(axis=1, keepdims=True) / task_counts.shape[1]
    raised = task_counts + np.minimum(smoothing, most)
    totals = raised.sum(axis=1, keepdims=True)
    table: Floats = raised / np.where(totals > 0, totals, 1.0)
    return table


def _evidence(
    task_counts: Sequence[Any], labels: Iterable[Any], smoothing: float, kind: str
) -> tuple[Floats, ClassCounts, str]:
    counts = count_classes(task_counts, labels)
    if not counts.target.any():
        raise InputError(
            f"none of the {sum(counts.unknown.values())} {kind} is a class that any task shows, so the mixture cannot "
            "be estimated; check that tasks and target were read by the same classifier, with the same class names"
        )
    empty = [t for t, row in enumerate(counts.tasks, 1) if not row.any()]
    if empty:
        raise InputError(f"no counts for task {empty[0]}: every task needs a sample that the classifier has seen")
    return smoothed(counts.tasks, smoothing), counts, kind
