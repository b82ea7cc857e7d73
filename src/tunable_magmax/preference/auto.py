"""`auto`: choose the source by a rule that needs no labels of the target, and say why.

The rule: labels if there are any; else `probe` if its expected error is at most `limit`; else `shift` if its is; else
`ot`. The expected error comes from simulation: draw targets of the estimated mixture, estimate again, and take the mean
half-L1 distance to the estimate. `probe` draws held-out rows of the tasks; `shift` draws histograms (also the tasks'
own, since they are samples too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats
from tunable_magmax.preference.base_features import TaskProbe, probe_preference
from tunable_magmax.preference.features import feature_preference
from tunable_magmax.preference.labels import count_classes, label_preference
from tunable_magmax.preference.mixture import log_likelihood
from tunable_magmax.preference.preference import JSON, Preference
from tunable_magmax.preference.shift import SMOOTHING, SOLVERS, shift_preference, smoothed
from tunable_magmax.preference.uncertainty import DEFAULT, Resampling, half_l1

# Transport's half-L1 error on CLINC150 was 0.37 to 0.48. A judgement from few settings, not a tuned constant.
LIMIT = 0.4


@dataclass(frozen=True)
class ShiftOutlook:
    """How far label-shift estimation can be trusted.

    `error`: expected half-L1 error of the weights. `fit`: the share of simulated targets that the mixture explains no
    better than the real one; near 0, no mixture of the tasks explains the target.
    """

    error: float
    fit: float


def auto_preference(
    *,
    task_predictions: Sequence[Any] | None = None,
    predictions: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    task_features: Sequence[Any] | None = None,
    target_features: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
    task_base_features: Sequence[Any] | None = None,
    task_base_labels: Sequence[Any] | None = None,
    target_base_features: Any = None,
    fitted: TaskProbe | None = None,
    task_label_counts: Sequence[Any] | None = None,
    labels: Iterable[Any] | None = None,
    limit: float = LIMIT,
    smoothing: float = SMOOTHING,
    resampling: Resampling = DEFAULT,
) -> Preference:
    """The preference of the best source for what is given; the choice and its reason are in the provenance.

    What is costly to make may be given as a function, which is called only if the rule asks for it: `predictions`,
    `target_features`, `target_base_features`. For the last and `fitted`, see `base_features.probe_preference`.

    >>> chosen = auto_preference(task_predictions=[{"a": 90, "b": 10}, {"b": 100}], predictions=["a"] * 30)
    >>> chosen.method, chosen.provenance["auto"]["chosen"]
    ('shift', 'shift')
    """
    predicts = task_predictions is not None and predictions is not None
    compares = task_features is not None and target_features is not None
    probes = task_base_features is not None and task_base_labels is not None and target_base_features is not None
    if labels is not None:
        if task_label_counts is None:
            raise InputError("task_label_counts is missing: the tasks' own class counts are needed to read labels")
        if task_predictions is None or predictions is None:
            found = label_preference(task_label_counts, labels, similarity="count", resampling=resampling)
            return _because(found, "labels are given, and nothing says more")
        found = shift_preference(
            task_predictions,
            _made(predictions),
            method="em",
            task_label_counts=task_label_counts,
            labels=labels,
            smoothing=smoothing,
            resampling=resampling,
        )
        return _because(found, "labels and predictions are given: one likelihood for both")
    if not (probes or predicts or compares):
        raise InputError(
            "auto needs labels with task_label_counts, predictions with task_predictions, target_base_features with "
            "task_base_features and task_base_labels, or target_features with task_features; without any, use "
            "from_weights, from_alpha or equal"
        )
    before, facts = "", dict[str, JSON]()
    if probes:
        assert task_base_features is not None
        assert task_base_labels is not None
        found = probe_preference(
            task_base_features, task_base_labels, _made(target_base_features), fitted=fitted, resampling=resampling
        )
        told, good, facts = _judged("probe", found.provenance.get("expected_error"), limit)
        if good or not (predicts or compares):
            return _because(found, told if good else f"{told}, but there is nothing else to compare", facts)
        before, facts = f"{told}; ", {"probe_expected_error": facts["expected_error"]}
    if predicts:
        assert task_predictions is not None
        assert predictions is not None
        seen = list(_made(predictions))
        found = shift_preference(task_predictions, seen, smoothing=smoothing, resampling=resampling)
        solver = str(found.provenance["solver"])
        outlook = shift_outlook(task_predictions, seen, found.weights, solver, smoothing, resampling)
        told, good, more = _judged("shift", outlook.error, limit)
        facts |= {**more, "fit": outlook.fit}
        if good or not compares:
            shown = told if good else f"{told}, but there are no features to compare"
            return _because(found, before + shown, facts)
        before += f"{told}: the classifier tells tasks apart too poorly"
    assert task_features is not None
    found = feature_preference(task_features, _made(target_features), resampling=resampling)
    return _because(found, before.removesuffix("; ") or "only features are given", facts)


def _judged(method: str, error: JSON, limit: float) -> tuple[str, bool, dict[str, JSON]]:
    """How an expected error compares with the limit: in words, whether it is good enough, and as facts."""
    # Features that are all alike have no expected error: nothing can be told from them.
    number = float(error) if isinstance(error, (int, float)) else 1.0
    good = number <= limit
    told = f"expected error of {method} {number:.2f}, {'at most' if good else 'above'} the limit {limit:g}"
    return told, good, {"expected_error": number, "limit": limit}


def _made(given: Any) -> Any:
    return given() if callable(given) else given


def shift_outlook(
    task_predictions: Sequence[Any],
    predictions: Iterable[Any],
    weights: Sequence[float],
    solver: str = "em",
    smoothing: float = SMOOTHING,
    resampling: Resampling = DEFAULT,
) -> ShiftOutlook:
    """Simulate targets of mixture `weights` from the tasks' histograms, and see how well the mixture is found again."""
    counts = count_classes(task_predictions, predictions)
    emissions = smoothed(counts.tasks, smoothing)
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
    return ShiftOutlook(error, float((deviance >= observed).mean()))


def _deviance(emissions: Floats, counts: Floats, weights: Floats) -> Floats:
    """How far the mixture is from explaining the histogram: the gap to the likelihood of the histogram itself."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    gap: Floats = (counts * logs).sum(axis=1) - log_likelihood(emissions, counts, weights)
    return gap


def _because(found: Preference, reason: str, facts: dict[str, JSON] | None = None) -> Preference:
    record: dict[str, JSON] = {**found.provenance, "auto": {"chosen": found.method, "reason": reason, **(facts or {})}}
    return Preference(found.weights, found.method, record, found.intervals, found.tasks)
