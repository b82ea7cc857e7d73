"""`auto`: chooses the estimator by a rule that needs no labels of the target, and says why.

The rule: labels if there are any; else `probe` if its expected error is at most `limit`; else `shift` if its is; else
`ot`. The expected error comes from simulation: draw targets of the estimated mixture, estimate again, and take the mean
half-L1 distance to the estimate. `probe` draws held-out rows of the tasks; `shift` draws histograms (also the tasks'
own, since they are samples too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.preference.base_features import TaskProbe, base_estimate
from tunable_magmax.preference.estimate import JSON, WeightEstimate
from tunable_magmax.preference.features import Comparison, feature_estimate
from tunable_magmax.preference.labels import label_estimate
from tunable_magmax.preference.shift import SMOOTHING, shift_estimate, shift_outlook
from tunable_magmax.preference.uncertainty import RESAMPLING, Resampling

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
    limit, resampling = evidence.limit, evidence.resampling
    before, facts = "", dict[str, JSON]()
    if probes:
        estimate = base_estimate(
            evidence.task_base_features,
            evidence.task_base_labels,
            _value(evidence.target_base_features),
            fitted=evidence.fitted,
            resampling=resampling,
        )
        reason, good, facts = _judged("probe", estimate.provenance.get("expected_error"), limit)
        if good or not (predicts or compares):
            return _because(estimate, reason if good else f"{reason}, but there is nothing else to compare", facts)
        before, facts = f"{reason}; ", {"probe_expected_error": facts["expected_error"]}
    if predicts:
        tasks, smoothing = evidence.task_predictions, evidence.smoothing
        predictions = list(_value(evidence.predictions))
        estimate = shift_estimate(tasks, predictions, smoothing=smoothing, resampling=resampling)
        solver = str(estimate.provenance["solver"])
        error, fit = shift_outlook(tasks, predictions, estimate.weights, solver, smoothing, resampling)
        reason, good, more = _judged("shift", error, limit)
        facts |= {**more, "fit": fit}
        if good or not compares:
            shown = reason if good else f"{reason}, but there are no features to compare"
            return _because(estimate, before + shown, facts)
        before += f"{reason}: the classifier tells tasks apart too poorly"
    comparison = Comparison(resampling=resampling)
    estimate = feature_estimate(evidence.task_features, _value(evidence.target_features), comparison)
    return _because(estimate, before.removesuffix("; ") or "only features are given", facts)


def _by_labels(evidence: Evidence, predicts: bool) -> WeightEstimate:
    counts, labels, resampling = evidence.task_label_counts, evidence.labels, evidence.resampling
    if counts is None:
        raise InputError("task_label_counts is missing: the tasks' own class counts are needed to read labels")
    if not predicts:
        estimate = label_estimate(counts, labels, similarity="count", resampling=resampling)
        return _because(estimate, "labels are given, and nothing says more", {})
    estimate = shift_estimate(
        evidence.task_predictions,
        _value(evidence.predictions),
        method="em",
        task_label_counts=counts,
        labels=labels,
        smoothing=evidence.smoothing,
        resampling=resampling,
    )
    return _because(estimate, "labels and predictions are given: one likelihood for both", {})


def _judged(method: str, error: JSON, limit: float) -> tuple[str, bool, dict[str, JSON]]:
    """Compares an expected error with the limit: in words, whether it is good enough, and as facts."""
    # Features that are all alike have no expected error: nothing can be told from them.
    number = float(error) if isinstance(error, (int, float)) else 1.0
    good = number <= limit
    words = f"expected error of {method} {number:.2f}, {'at most' if good else 'above'} the limit {limit:g}"
    return words, good, {"expected_error": number, "limit": limit}


def _value(value: Any) -> Any:
    return value() if callable(value) else value


def _because(estimate: WeightEstimate, reason: str, facts: dict[str, JSON]) -> WeightEstimate:
    return estimate.with_facts(auto={"chosen": estimate.method, "reason": reason, **facts})
