"""`auto`: chooses the estimator by a rule that needs no labels of the target, and says why.

The rule: labels if there are any; else `probe` if its expected error is at most `limit`; else `shift` if its is; else
whichever of `probe`, `shift` and `ot` expects the smallest error, which for `ot` was measured. The expected error comes
from simulation: draw targets of the estimated mixture, estimate again, and take the mean half-L1 distance to the
estimate. `probe` draws held-out rows of the tasks; `shift` draws histograms (also the tasks' own, since they are
samples too).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.preference.base_features import TaskProbe, base_estimate
from tunable_magmax.preference.estimate import JSON, WeightEstimate
from tunable_magmax.preference.features import Comparison, feature_estimate
from tunable_magmax.preference.labels import label_estimate
from tunable_magmax.preference.shift import SMOOTHING, shift_estimate, shift_outlook
from tunable_magmax.preference.uncertainty import RESAMPLING, TRANSPORT_ERROR, Resampling

# Transport's half-L1 error on CLINC150 was 0.37 to 0.48. A judgement from few settings, not a tuned constant.
LIMIT = 0.4


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that is known of a target, as the estimators take it, and the limit of `auto`'s rule.

    What is costly to make may be a function, which is called only if the rule asks for it: `predictions`,
    `target_features`, `target_base_features`. For the last and `fitted`, see `base_features.base_estimate`.
    """

    task_predictions: Any = None
    predictions: Any = None
    task_features: Any = None
    target_features: Any = None
    task_base_features: Any = None
    task_base_labels: Any = None
    target_base_features: Any = None
    fitted: TaskProbe | None = None
    task_label_counts: Any = None
    labels: Any = None
    limit: float = LIMIT
    smoothing: float = SMOOTHING
    resampling: Resampling = RESAMPLING

    def has(self, *names: str) -> bool:
        return all(getattr(self, name) is not None for name in names)


def auto_estimate(evidence: Evidence) -> WeightEstimate:
    """Returns the estimate by the best source in the evidence; the choice and its reason are in the provenance.

    >>> chosen = auto_estimate(Evidence([{"a": 90, "b": 10}, {"b": 100}], ["a"] * 30))
    >>> chosen.method, chosen.provenance["auto"]["chosen"]
    ('shift', 'shift')
    """
    predicts = evidence.has("task_predictions", "predictions")
    compares = evidence.has("task_features", "target_features")
    probes = evidence.has("task_base_features", "task_base_labels", "target_base_features")
    if evidence.labels is not None:
        return _by_labels(evidence, predicts)
    if not (probes or predicts or compares):
        raise InputError(
            "auto needs labels with task_label_counts, predictions with task_predictions, target_base_features with "
            "task_base_features and task_base_labels, or target_features with task_features; without any, use "
            "from_weights, from_alpha or equal"
        )
    tried: list[_Tried] = []
    for available, attempt in ((probes, _by_probe), (predicts, _by_shift)):
        if available:
            tried.append(attempt(evidence))
            if tried[-1].error <= evidence.limit:
                return _because(tried[-1], [one.words(evidence.limit) for one in tried], evidence.limit)
    if compares and all(one.error > TRANSPORT_ERROR for one in tried):
        comparison = Comparison(resampling=evidence.resampling)
        estimate = feature_estimate(evidence.task_features, _value(evidence.target_features), comparison)
        reasons = [one.words(evidence.limit) for one in tried] or ["only features are given"]
        return _because(_Tried(estimate, TRANSPORT_ERROR), reasons, None)
    best = min(tried, key=lambda one: one.error)
    reasons = [one.words(evidence.limit) for one in tried] + ["nothing expects less"]
    return _because(best, reasons, evidence.limit)


@dataclass(frozen=True)
class _Tried:
    """An estimate with the error that it expects, and further facts about it."""

    estimate: WeightEstimate
    error: float
    facts: Mapping[str, JSON] = field(default_factory=dict)

    def words(self, limit: float) -> str:
        side = "at most" if self.error <= limit else "above"
        return f"expected error of {self.estimate.method} {self.error:.2f}, {side} the limit {limit:g}"


def _by_probe(evidence: Evidence) -> _Tried:
    estimate = base_estimate(
        evidence.task_base_features,
        evidence.task_base_labels,
        _value(evidence.target_base_features),
        fitted=evidence.fitted,
        resampling=evidence.resampling,
    )
    # Features that are all alike have no expected error: nothing can be told from them.
    error = estimate.provenance.get("expected_error")
    return _Tried(estimate, float(error) if isinstance(error, (int, float)) else 1.0)


def _by_shift(evidence: Evidence) -> _Tried:
    tasks, smoothing, resampling = evidence.task_predictions, evidence.smoothing, evidence.resampling
    predictions = list(_value(evidence.predictions))
    estimate = shift_estimate(tasks, predictions, smoothing=smoothing, resampling=resampling)
    solver = str(estimate.provenance["solver"])
    error, fit = shift_outlook(tasks, predictions, estimate.weights, solver, smoothing, resampling)
    return _Tried(estimate, error, {"fit": fit})


def _by_labels(evidence: Evidence, predicts: bool) -> WeightEstimate:
    counts, labels, resampling = evidence.task_label_counts, evidence.labels, evidence.resampling
    if counts is None:
        raise InputError("task_label_counts is missing: the tasks' own class counts are needed to read labels")
    if not predicts:
        estimate = label_estimate(counts, labels, similarity="count", resampling=resampling)
        return _because(_Tried(estimate, 0.0), ["labels are given, and nothing says more"], None)
    estimate = shift_estimate(
        evidence.task_predictions,
        _value(evidence.predictions),
        method="em",
        task_label_counts=counts,
        labels=labels,
        smoothing=evidence.smoothing,
        resampling=resampling,
    )
    return _because(_Tried(estimate, 0.0), ["labels and predictions are given: one likelihood for both"], None)


def _value(value: Any) -> Any:
    return value() if callable(value) else value


def _because(tried: _Tried, reasons: Sequence[str], limit: float | None) -> WeightEstimate:
    """Adds the choice and its reasons; and the expected error, if it was compared with a limit."""
    estimate = tried.estimate
    facts = {} if limit is None else {"expected_error": tried.error, "limit": limit, **tried.facts}
    return estimate.with_facts(auto={"chosen": estimate.method, "reason": "; ".join(reasons), **facts})
