"""The site prior: its shares, its eps, the bias that it gives a head, and its place in a preference file."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.preference.estimate import WeightEstimate
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.prior import LEAST_EPS, MOST_EPS, SitePrior, doubt, site_prior
from tunable_magmax.preference.uncertainty import expected_error

TASKS = [{"cat": 6, "dog": 2}, {"car": 5, "bus": 5}, {"cat": 1, "tree": 3}]


def test_shares_are_the_weighted_shares_of_the_tasks() -> None:
    found = site_prior([0.5, 0.3, 0.2], TASKS, 0.1)
    assert found.shares == pytest.approx(
        {"cat": 0.5 * 0.75 + 0.2 * 0.25, "dog": 0.5 * 0.25, "car": 0.15, "bus": 0.15, "tree": 0.2 * 0.75}
    )
    assert found.source == "tasks"


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(any), st.floats(0.001, 1))
def test_the_bias_is_the_log_of_a_distribution(weights: list[float], eps: float) -> None:
    classes = ["tree", "bus", "car", "dog", "cat", "unknown"]
    bias = site_prior(weights, TASKS, eps).bias(classes)
    assert np.exp(bias.astype(float)).sum() == pytest.approx(1, abs=1e-5)
    assert bias.min() >= math.log(eps / 6) - 1e-5  # no class is impossible


def test_labels_refine_and_five_of_them_make_no_class_impossible() -> None:
    plain = site_prior([1, 0, 0], TASKS, 0.01).shares
    refined = site_prior([1, 0, 0], TASKS, 0.01, ["dog"] * 5)
    assert refined.source == "labels"
    assert plain["cat"] > refined.shares["cat"] > 0.3
    assert refined.shares["dog"] == pytest.approx((5 * 0.25 + 5) / 10)  # five imagined labels, the fewest there are
    many = site_prior([1, 0, 0], TASKS, 0.01, ["dog"] * 2000).shares
    assert many["dog"] > 0.98


def test_labels_that_are_spread_as_in_the_tasks_change_little() -> None:
    even = [{str(k): 1 for k in range(40)}]
    rng = np.random.default_rng(0)
    as_in_tasks = [str(k) for k in rng.integers(0, 40, size=60)]
    uneven = [str(k) for k in rng.integers(0, 8, size=60)]
    half_l1 = [
        sum(abs(share - 1 / 40) for share in site_prior([1], even, 0.01, labels).shares.values()) / 2
        for labels in (as_in_tasks, uneven)
    ]
    counted = sum(abs(as_in_tasks.count(str(k)) / 60 - 1 / 40) for k in range(40)) / 2
    assert half_l1[0] < 0.4 * counted  # chance is not taken for a difference
    assert half_l1[1] > 0.6  # of at most 0.8


def test_labels_of_no_task_are_left_out() -> None:
    assert site_prior([1, 1, 1], TASKS, 0.1, ["ship"]) == site_prior([1, 1, 1], TASKS, 0.1)


def test_eps_follows_the_expected_error() -> None:
    values = [doubt(error) for error in np.linspace(0, 1, 50)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (LEAST_EPS, MOST_EPS)
    assert doubt(0.0, samples=3) > doubt(0.0, samples=30) > doubt(0.0, samples=300) == LEAST_EPS
    opinion = Preference((1, 0, 0)).with_prior(TASKS)
    transport = Preference((1, 0, 0), "ot", {"samples": 40}, expected_error=0.6).with_prior(TASKS)
    labels = Preference.from_labels(TASKS, ["dog"] * 30 + ["car"] * 10).with_prior(TASKS)
    assert opinion.prior is not None
    assert labels.prior is not None
    assert transport.prior is not None
    assert labels.prior.eps < opinion.prior.eps == 0.02 < transport.prior.eps == pytest.approx(0.36)


def test_samples_outside_all_tasks_are_doubts() -> None:
    facts = {"samples": 60, "expected_error": 0.02}
    inside, outside = (WeightEstimate((1, 0), "probe", {**facts, "outside": share}) for share in (0.05, 0.9))
    assert expected_error(inside) == 0.02
    assert expected_error(outside) == pytest.approx(0.82)


def test_a_few_samples_of_one_task_are_not_certain() -> None:
    errors = [expected_error(WeightEstimate((1, 0), "label", {"samples": samples})) for samples in (1, 4, 49)]
    assert errors == [1 / 4, 1 / 10, 1 / 100]
    assert expected_error(WeightEstimate((1,), "label", {"samples": 1})) == 0  # there is no other task


def test_it_goes_through_a_file_with_scale_and_tempering(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = Preference.from_labels(TASKS, ["dog", "car"]).with_prior(TASKS, ["dog", "car"]).tempered(0.2)
    found.save(tmp_path / "site.json")
    again = Preference.load(tmp_path / "site.json")
    assert again == found
    assert again.prior == found.prior
    assert (again.tempering, again.scale) == (0.2, None)
    assert '"version": 2' in found.to_json()
    assert '"version": 1' in Preference((1, 1)).to_json()  # as older programs read it


def test_tempering_leaves_the_prior_alone() -> None:
    found = Preference((1, 0, 0)).with_prior(TASKS, eps=0.1)
    assert found.tempered(0.3).prior == found.prior
    assert found.tempered(0.3).weights == pytest.approx((0.8, 0.1, 0.1))


def test_tempered_intervals_are_those_of_the_estimate_and_hold_the_weights() -> None:
    found = Preference((1, 0, 0), "label", {"samples": 1}, ((0, 1), (0, 0.5), (0, 0))).tempered(0.3)
    assert found.intervals == ((0, 1), (0, 0.5), (0, pytest.approx(0.1)))
    assert all(low <= w <= high for w, (low, high) in zip(found.weights, found.intervals, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SitePrior({}, 0.1), "must map class names to numbers"),
        (lambda: SitePrior({"cat": -1.0}, 0.1), "shares must be numbers >= 0"),
        (lambda: SitePrior({"cat": 1.0}, 0.0), "eps of a prior must be a number above 0 and at most 1, not 0.0"),
        (lambda: SitePrior({"cat": 1.0}, 0.1).bias(["ship"]), "no class of the prior ('cat') is a class of the head"),
        (lambda: site_prior([1, 1], TASKS, 0.1), "2 weights for the classes of 3 tasks"),
        (lambda: site_prior([1, 0], [{}, {"cat": 1}], 0.1), "all weight is on tasks without a sample"),
        (lambda: Preference((1, 1), scale=-1.0), "scale must be a finite number above 0, not -1.0"),
        (lambda: Preference((1, 1)).tempered(2), "tempering must lie between 0 and 1, not 2"),
    ],
)
def test_bad_values_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as error:
        make()
    assert message in str(error.value)
