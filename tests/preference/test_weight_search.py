"""A search begins with its starts, gets better, and ends when it does no more."""

from __future__ import annotations

import pytest

pytest.importorskip("optuna", reason="optuna is not installed (extra: tune)")

from tunable_magmax.preference.search import PATIENCE, search


def peak(weights):
    """Best at weights (0.7, 0.3, 0)."""
    return -sum((w - p) ** 2 for w, p in zip(weights, (0.7, 0.3, 0.0), strict=True))


def test_starts_come_first():
    found = search(peak, [(1, 1, 1), (0.7, 0.3, 0), (1, 0, 1)], trials=4, seed=1)
    assert [weights for _, weights in found[:3]] == [
        pytest.approx((1 / 3,) * 3),
        pytest.approx((0.7, 0.3, 0)),
        pytest.approx((0.5, 0, 0.5)),
    ]
    assert max(found) == found[1]


def test_a_search_gets_better():
    told = []
    found = search(peak, [(1, 1, 1)], trials=120, progress=lambda *given: told.append(given))
    assert max(found)[0] > found[0][0] + 0.05
    assert all(sum(weights) == pytest.approx(1) for _, weights in found)
    assert told == [("searching", k, 120) for k in range(1, len(found) + 1)]


def test_it_ends_after_some_trials_that_get_no_better():
    assert len(search(lambda weights: 1.0, [(1, 1), (1, 0), (0, 1)])) == 3 + PATIENCE
