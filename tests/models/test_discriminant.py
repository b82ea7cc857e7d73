"""The probe: a linear discriminant that knows how sure it may be."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tunable_magmax.data.arrays import unit_rows
from tunable_magmax.errors import InputError
from tunable_magmax.models.discriminant import FOLDS, stratified_folds
from tunable_magmax.preference.base_features import Probe

Floats = NDArray[np.float64]


def gaussians(seed: int, rows: int, classes: int = 3, noise: float = 0.02) -> tuple[Floats, NDArray[np.int64], Any]:
    """Classes near one point of the sphere in six dimensions: there, what is Gaussian stays so when normalised."""
    rng = np.random.default_rng(seed)
    spread = noise * np.array([1.0, 2.0, 0.5, 1.0, 1.5, 1.0])
    means = np.array([10.0, 0, 0, 0, 0, 0]) + rng.normal(size=(classes, 6)) * 10 * spread
    labels = rng.integers(0, classes, rows)
    return means[labels] + rng.normal(size=(rows, 6)) * 10 * spread, labels, (means, 10 * spread)


def bayes(points: Floats, means: Floats, spread: Floats) -> Floats:
    logs = -0.5 * np.square((points[:, None] - means[None]) / spread).sum(axis=2)
    raised = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: Floats = raised / raised.sum(axis=1, keepdims=True)
    return shares


def test_known_gaussians_have_the_posteriors_of_bayes() -> None:
    points, labels, (means, spread) = gaussians(0, 6000)
    # Lengths say nothing to the probe: the first coordinate is nearly the length, so its noise is not information.
    means[:, 0], points[:, 0] = 10.0, 10.0
    fresh, _, _ = gaussians(0, 7000)
    fresh[:, 0] = 10.0
    found = Probe(points, labels, 3).posterior(fresh[6000:])
    expected = bayes(fresh[6000:], means, spread)
    assert 0.55 < expected.max(axis=1).mean() < 0.95  # neither trivial nor hopeless
    assert np.abs(found - expected).mean() < 0.02
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_held_out_posteriors_are_those_of_fits_without_the_fold() -> None:
    points, labels, _ = gaussians(1, 90)
    probe = Probe(points, labels, 3)
    folds = stratified_folds(labels, 0)
    rows = unit_rows(points)
    for k in range(FOLDS):
        seen = folds != k
        means = np.stack([rows[seen & (labels == c)].mean(axis=0) for c in range(3)])
        rest = rows[seen] - means[labels[seen]]
        covariance = rest.T @ rest / (seen.sum() - 3)
        level = np.trace(covariance) / 6
        precision = np.linalg.inv((1 - probe.shrinkage) * covariance + probe.shrinkage * level * np.eye(6))
        gaps = rows[~seen][:, None] - means[None]
        squared = np.einsum("ncd,de,nce->nc", gaps, precision, gaps)
        logs = -0.5 * probe.fit.fit_factor * squared + np.log(np.bincount(labels) / len(labels))
        expected = np.exp(logs - logs.max(axis=1, keepdims=True))
        np.testing.assert_allclose(probe.held_out[~seen], expected / expected.sum(axis=1, keepdims=True), atol=1e-8)
        np.testing.assert_allclose(probe.held_out_distances[~seen], squared.min(axis=1), rtol=1e-6)


def test_many_dimensions_and_few_rows_do_not_make_it_sure() -> None:
    rng = np.random.default_rng(3)
    points, labels = rng.normal(size=(60, 200)), np.arange(60) % 3  # nothing to be learned
    found = Probe(points, labels, 3)
    assert found.fit.loss == pytest.approx(np.log(3), abs=0.1)
    assert found.posterior(rng.normal(size=(50, 200))).max() < 0.7


@pytest.mark.parametrize(
    ("points", "labels", "expected"),
    [
        (np.ones((7, 3)), [0, 0, 0, 0, 1, 1, 1], [4 / 7, 3 / 7]),  # constant: only the shares are left
        (np.zeros((4, 3)), [0, 0, 1, 1], [0.5, 0.5]),
        (np.ones((1, 3)), [0], [1, 0]),  # and a class without rows
    ],
)
def test_features_that_say_nothing(points: Floats, labels: list[int], expected: list[float]) -> None:
    found = Probe(points, labels, 2)
    np.testing.assert_allclose(found.posterior(points[:1]), [expected], atol=1e-6)
    assert np.isfinite(found.held_out).all()


def test_one_seed_one_result() -> None:
    points, labels, _ = gaussians(6, 50)
    first, second, other = (Probe(points, labels, 3, seed) for seed in (0, 0, 1))
    assert (first.held_out == second.held_out).all()
    assert (first.held_out != other.held_out).any()
    # Written down: the lottery is the same on every machine and with every version of numpy.
    assert stratified_folds(np.zeros(8, dtype=np.int64), 0).tolist() == [2, 1, 3, 0, 4, 0, 2, 1]


def test_another_width_is_refused() -> None:
    with pytest.raises(InputError, match="the features have width 2, but the probe was fitted to width 3"):
        Probe(np.eye(3), [0, 0, 1], 2).posterior(np.eye(2))
