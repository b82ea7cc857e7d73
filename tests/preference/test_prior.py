"""The site prior: its shares, its eps, the bias that it gives a head, and its place in a preference file."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.shares import SitePrior

TASKS = [{"cat": 6, "dog": 2}, {"car": 5, "bus": 5}, {"cat": 1, "tree": 3}]


def test_shares_are_the_weighted_shares_of_the_tasks() -> None:
    found = SitePrior.of_tasks([0.5, 0.3, 0.2], TASKS, 0.1)
    assert found.shares == pytest.approx(
        {"cat": 0.5 * 0.75 + 0.2 * 0.25, "dog": 0.5 * 0.25, "car": 0.15, "bus": 0.15, "tree": 0.2 * 0.75}
    )
    assert found.source == "tasks"


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(any), st.floats(0.001, 1))
def test_the_bias_is_the_log_of_a_distribution(weights: list[float], eps: float) -> None:
    classes = ["tree", "bus", "car", "dog", "cat", "unknown"]
    bias = SitePrior.of_tasks(weights, TASKS, eps).bias(classes)
    assert np.exp(bias.astype(float)).sum() == pytest.approx(1, abs=1e-5)
    assert bias.min() >= math.log(eps / 6) - 1e-5  # no class is impossible


def test_by_hand_2_percent_are_spread_evenly_and_the_posterior_has_its_own_class_shares() -> None:
    by_hand = Preference((1, 0, 0)).with_prior(TASKS).prior
    estimated = Preference.from_labels(TASKS, ["dog"] * 30 + ["car"] * 10).with_prior(TASKS).prior
    assert by_hand is not None
    assert estimated is not None
    assert (by_hand.eps, estimated.eps, estimated.source) == (0.02, 0.002, "labels")
    assert by_hand.shares["cat"] == 0.75
    assert estimated.shares["dog"] > 0.5  # as the labels say, not as the task does
    assert all(share > 0 for share in estimated.shares.values())
    changed = Preference.from_labels(TASKS, ["dog"]).with_prior(TASKS, eps=0.3).prior
    assert changed is not None
    assert changed.eps == 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SitePrior({}, 0.1), "must map class names to numbers"),
        (lambda: SitePrior({"cat": -1.0}, 0.1), "shares must be numbers >= 0"),
        (lambda: SitePrior({"cat": 1.0}, 0.0), "eps of a prior must be a number above 0 and at most 1, not 0.0"),
        (lambda: SitePrior({"cat": 1.0}, 0.1).bias(["ship"]), "no class of the prior ('cat') is a class of the head"),
        (lambda: SitePrior.of_tasks([1, 1], TASKS, 0.1), "2 weights for the classes of 3 tasks"),
        (lambda: SitePrior.of_tasks([1, 0], [{}, {"cat": 1}], 0.1), "all weight is on tasks without a sample"),
        (lambda: Preference((1, 1), scale=-1.0), "scale must be a finite number above 0, not -1.0"),
    ],
)
def test_bad_values_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as error:
        make()
    assert message in str(error.value)
