"""Sharpens a head whose logits are too flat before a site's prior is added to them.

A prior is the log of a probability, so it fits logits that are calibrated. If they are too flat, as those of a head
with a small logit scale, it overrules the model. What the right scale is, the tasks' labelled rows in the profiles say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.models.head import Head
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.profile import Profile

MOST = 100.0
STEPS = 16
"""Halvings of the interval from 1 to MOST, on a logarithmic scale: more than the three digits that are kept need."""


def site_head(head: Head, preference: Preference, profiles: Sequence[Profile | None] = ()) -> Head:
    """Returns the head for a site: with its prior as the bias, and sharper if its logits are too flat for that.

    Without a prior, the bias is removed and the logit scale stays.
    """
    if preference.prior is None:
        return head.with_bias(None)
    return head.with_bias(preference.prior.bias(head.classes), logit_factor(head, profiles, preference.weights))


def logit_factor(head: Head, profiles: Sequence[Profile | None], weights: Sequence[float]) -> float:
    """Returns by what to multiply a head's logit scale so that its probabilities are calibrated; see `Calibration`."""
    return Calibration(head, profiles).factor(weights)


class Calibration:
    """Finds how much sharper a head should be, again and again for other weights of the tasks.

    The factor makes the labels of the tasks' rows likeliest, among all classes of the head, tasks counted by their
    weights. The rows are embedded by the base, which was not trained on them; by the tasks' own checkpoints they look
    better than new samples do, so those only keep the factor down. Logits that are too sharp are left alone: then, and
    where the profiles hold no labelled rows, it is 1. It is rounded to three digits.
    """

    def __init__(self, head: Head, profiles: Sequence[Profile | None]) -> None:
        """Scores the profiles' rows once."""
        known = [profile for profile in profiles if profile is not None and profile.base_features is not None]
        self._tables: list[_Rows] = []
        self._tasks = len(profiles)
        if head.builtin or not known or len(known) != len(profiles):
            return
        place = {name: index for index, name in enumerate(head.classes)}
        features = [[np.asarray(profile.base_features), np.asarray(profile.features)] for profile in known]
        if any(rows.shape[1] != head.weight.shape[1] for pair in features for rows in pair):
            return
        truth = [
            np.array([place.get(profile.classes[label], -1) for label in np.asarray(profile.row_labels)], np.int64)
            for profile in known
        ]
        self._tables = [_Rows(head, [pair[kind] for pair in features], truth) for kind in (0, 1)]

    def factor(self, weights: Sequence[float]) -> float:
        """Returns by what to multiply the logit scale, at least 1."""
        if not self._tables or len(weights) != self._tasks:
            return 1.0
        shares = np.asarray(weights, dtype=np.float64)

        def too_flat(factor: float) -> bool:
            """Whether both kinds of rows would be likelier with a larger factor."""
            return all(table.slope(factor, shares) > 0 for table in self._tables)

        low, high = 1.0, MOST
        if not too_flat(low):
            return low
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if too_flat(middle) else (low, middle)
        return float(f"{low:.3g}")


class _Rows:
    """The logits of all tasks' labelled rows, of one kind of embedding."""

    def __init__(self, head: Head, features: Sequence[NDArray[Any]], truth: Sequence[NDArray[np.int64]]) -> None:
        kept = [np.flatnonzero(labels >= 0) for labels in truth]
        self._counts = np.array([len(rows) for rows in kept])
        logits = head.logits(np.concatenate([rows[own] for rows, own in zip(features, kept, strict=True)]))
        labels = np.concatenate([labels[own] for labels, own in zip(truth, kept, strict=True)])
        self._logits, self._lowered = logits, logits - logits.max(axis=1, keepdims=True, initial=-np.inf)
        self._right = self._means(logits[np.arange(len(labels)), labels])
        self._usual = self._means(logits.mean(axis=1))
        self._expected: dict[float, NDArray[np.float64]] = {}

    def _means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the mean of each task's rows, 0 for a task without."""
        parts = np.split(values, np.cumsum(self._counts)[:-1])
        return np.array([part.mean() if len(part) else 0.0 for part in parts])

    def slope(self, factor: float, weights: NDArray[np.float64]) -> float:
        """Returns the derivative of the log-likelihood, which falls as the factor grows."""
        # A row that was not seen may be of any class: without it, rows that are all right would ask for an endless
        # factor.
        unseen = 1 / (1 + int(self._counts[weights > 0].sum()))
        right = (1 - unseen) * self._right + unseen * self._usual
        return float(weights @ (right - self._expected_at(factor)))

    def _expected_at(self, factor: float) -> NDArray[np.float64]:
        """Returns the logit that the probabilities at a factor expect, of each task. Weights do not matter to it."""
        if factor not in self._expected:
            raised = np.exp(factor * self._lowered)
            expected = np.einsum("nc,nc->n", raised, self._logits) / raised.sum(axis=1)
            self._expected[factor] = self._means(expected)
        return self._expected[factor]
