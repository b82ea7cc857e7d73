"""The mixture that explains samples: against brute force, and what a prior changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tunable_magmax.preference.base_features import mixture_weights
from tunable_magmax.preference.shift import likeliest

Floats = NDArray[np.float64]


def likelihoods(seed: int, samples: int, tasks: int, sharpness: float = 2.0) -> Floats:
    rng = np.random.default_rng(seed)
    return np.exp(sharpness * rng.normal(size=(samples, tasks)))


def simplex(steps: int) -> Floats:
    """All points of the triangle with coordinates that are multiples of 1 / steps."""
    points = [(a, b, steps - a - b) for a in range(steps + 1) for b in range(steps + 1 - a)]
    return np.array(points) / steps


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_of_all_mixtures(seed: int) -> None:
    table = likelihoods(seed, 30, 3)
    counts = np.random.default_rng(seed).integers(0, 4, (1, 30)).astype(float)
    grid = simplex(200)
    with np.errstate(divide="ignore"):
        values = np.log(grid @ table.T) @ counts[0]
    found = mixture_weights(table, counts, iterations=20_000, tolerance=1e-10)[0]
    assert np.log(found @ table.T) @ counts[0] >= values.max() - 1e-6
    assert np.abs(found - grid[values.argmax()]).max() < 0.02


def test_histograms_are_a_special_case() -> None:
    emissions = np.random.default_rng(0).dirichlet(np.ones(6), size=4)
    counts = np.array([[5.0, 0, 9, 2, 1, 3], [1.0, 1, 1, 1, 1, 20]])
    expected = likeliest(emissions, counts, iterations=20_000, tolerance=1e-12)
    np.testing.assert_allclose(mixture_weights(emissions.T, counts, 1, 20_000, 1e-12), expected, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), concentration=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_order_scale_copies_and_company_do_not_matter(seed: int, concentration: float) -> None:
    rng = np.random.default_rng(seed)
    table = likelihoods(seed, 12, 4)
    counts = rng.integers(0, 3, (3, 12)).astype(float)
    counts[:, 0] += 1
    found = mixture_weights(table, counts, concentration)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    order = rng.permutation(4)
    np.testing.assert_allclose(mixture_weights(table[:, order], counts, concentration), found[:, order], atol=1e-4)
    scaled = table * rng.uniform(0.1, 10, (12, 1))
    np.testing.assert_allclose(mixture_weights(scaled, counts, concentration), found, atol=1e-4)
    repeated = np.repeat(table, counts[0].astype(int), axis=0)
    alone = mixture_weights(repeated, np.ones((1, len(repeated))), concentration)
    np.testing.assert_allclose(alone[0], found[0], atol=1e-4)
    for k in range(3):
        np.testing.assert_array_equal(mixture_weights(table, counts[k : k + 1], concentration)[0] > 0, found[k] > 0)


def test_copies_of_a_task_share() -> None:
    table = likelihoods(1, 40, 2)
    counts = np.ones((1, 40))
    one, other = mixture_weights(table, counts)[0]
    found = mixture_weights(table[:, [0, 0, 1]], counts, iterations=5000, tolerance=1e-9)[0]
    assert found == pytest.approx([one / 2, one / 2, other], abs=1e-3)


def test_a_task_must_explain_half_a_sample_to_stay() -> None:
    # By hand: 19 samples are surely of the first task; the last one is 0.4 of it and 0.6 of another.
    table = np.array([[1.0, 1e-12, 1e-12]] * 19 + [[0.4, 0.6, 1e-12]])
    counts = np.ones((1, 20))
    plain = mixture_weights(table, counts)[0]
    assert 0 < plain[1] < 0.05
    assert mixture_weights(table, counts, 0.5)[0] == pytest.approx([1, 0, 0], abs=1e-9)
    # One that surely explains two stays, and pays nothing.
    table[-2:] = [1e-12, 1.0, 1e-12]
    assert mixture_weights(table, counts, 0.5)[0] == pytest.approx([0.9, 0.1, 0], abs=1e-9)


def test_with_too_few_samples_for_any_task_the_penalty_waits() -> None:
    assert mixture_weights(np.ones((1, 4)), np.ones((1, 1)), 0.5)[0] == pytest.approx([0.25] * 4)
    lone = mixture_weights(np.array([[0.3, 0.3, 0.4]]), np.ones((1, 1)), 0.5)[0]
    assert lone.argmax() == 2
    assert lone.sum() == pytest.approx(1)


def test_above_one_it_smooths() -> None:
    table = np.array([[1.0, 1e-12]] * 9)
    assert mixture_weights(table, np.ones((1, 9)), 2.0)[0] == pytest.approx([10 / 11, 1 / 11])
