"""Sharpens a head whose logits are too flat before a site's prior is added to them.

A prior is the log of a probability, so it fits logits that are calibrated. If they are too flat, as those of a head
with a small logit scale, it overrules the model. What the right scale is, the tasks' labelled rows in the profiles say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.models.head import Head
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.profile import Profile

MOST = 100.0
STEPS = 16
"""Halvings of the interval from 1 to MOST, on a logarithmic scale: more than the three digits that are kept need."""


def site_head(head: Head, preference: Preference, profiles: Sequence[Profile | None] = ()) -> Head:
    """Returns the head for a site: with its prior as the bias, and sharper if its logits are too flat for that.

    Without a prior, the bias is removed and the logit scale stays.
    """
    if preference.prior is None:
        return head.with_prior(None)
    return head.with_prior(preference.prior, logit_factor(head, profiles, preference.weights))


def logit_factor(head: Head, profiles: Sequence[Profile | None], weights: Sequence[float]) -> float:
    """Returns by what to multiply a head's logit scale so that its probabilities are calibrated; at least 1.

    It makes the labels of the tasks' rows likeliest, among all classes of the head, tasks counted by `weights`. The
    rows are embedded by the base, which was not trained on them; by the tasks' own checkpoints they look better than
    new samples do, so those only keep the factor down. Logits that are too sharp are left alone: then, and where the
    profiles hold no labelled rows, it is 1. It is rounded to three digits.
    """
    if head.own:
        return 1.0
    known = [profile for profile in profiles if profile is not None and profile.base_features is not None]
    if not known or len(known) != len(profiles) or len(known) != len(weights):
        return 1.0
    return min(
        _likeliest(head, known, weights, rows)
        for rows in (lambda profile: profile.base_features, lambda profile: profile.features)
    )


def _likeliest(
    head: Head, profiles: Sequence[Profile], weights: Sequence[float], rows: Callable[[Profile], Any]
) -> float:
    """Returns the likeliest factor by some rows of each profile, from 1 to MOST."""
    place = {name: index for index, name in enumerate(head.classes)}
    parts: list[tuple[float, NDArray[np.float64], NDArray[np.int64]]] = []
    for profile, weight in zip(profiles, weights, strict=True):
        features = np.asarray(rows(profile), dtype=np.float64)
        if features.shape[1] != head.weight.shape[1]:
            return 1.0
        truth = np.array([place.get(profile.classes[label], -1) for label in np.asarray(profile.row_labels)])
        kept = np.flatnonzero(truth >= 0)
        if weight > 0 and len(kept):
            parts.append((weight, head.logits(features[kept]), truth[kept]))
    # A row that was not seen may be of any class: without it, rows that are all right would ask for an endless factor.
    unseen = 1 / (1 + sum(len(truth) for _, _, truth in parts))

    def slope(factor: float) -> float:
        """The derivative of the log-likelihood, which falls as the factor grows."""
        total = 0.0
        for weight, logits, truth in parts:
            raised = np.exp(factor * (logits - logits.max(axis=1, keepdims=True)))
            expected = (raised * logits).sum(axis=1) / raised.sum(axis=1)
            right = (1 - unseen) * logits[np.arange(len(truth)), truth] + unseen * logits.mean(axis=1)
            total += weight * float((right - expected).mean())
        return total

    low, high = 1.0, MOST
    if slope(low) <= 0:
        return low
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return float(f"{low:.3g}")
