"""A head fitted in closed form: the discriminant it says it is, for the site's shares, and never worse than the old."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from tunable_magmax.models import fitting
from tunable_magmax.models.discriminant import Discriminant, class_totals
from tunable_magmax.models.fitting import LEAST_GAIN, FoldedRows, View
from tunable_magmax.models.head import Linear

CLASSES = 4


def draw(count: int, dim: int = 6, seed: int = 0, classes: int = CLASSES, spread: float = 1.0):
    """Labelled features of Gaussian classes that share one covariance, and the means."""
    rng = np.random.default_rng(seed)
    means = np.random.default_rng(99).normal(size=(classes, dim)) * 1.5
    labels = np.arange(count) % classes
    stretch = np.linspace(0.5, 1.5, dim) * spread
    return means[labels] + rng.normal(size=(count, dim)) * stretch, labels, means


def fit_head(features, labels, shares, old, views=(), **options):
    return fitting.fit_head(FoldedRows(features, labels, len(shares), old=old, **options), shares, views)


def noisy_head(means: np.ndarray, seed: int = 1) -> Linear:
    rng = np.random.default_rng(seed)
    return Linear(means + rng.normal(size=means.shape), rng.normal(size=len(means)))


def centred(logits: np.ndarray) -> np.ndarray:
    return logits - logits.mean(axis=1, keepdims=True)


def direct_scores(features: np.ndarray, labels: np.ndarray, shrinkage: float, points: np.ndarray) -> np.ndarray:
    """Log densities of points under Gaussians with one shrunk covariance, by the textbook."""
    classes = labels.max() + 1
    means = np.stack([features[labels == c].mean(axis=0) for c in range(classes)])
    within = features - means[labels]
    covariance = within.T @ within / (len(features) - classes)
    level = np.trace(covariance) / len(covariance)
    shrunk = (1 - shrinkage) * covariance + shrinkage * level * np.eye(len(covariance))
    away = points[:, None, :] - means[None]
    return -0.5 * np.einsum("ncd,de,nce->nc", away, np.linalg.inv(shrunk), away)


@pytest.mark.parametrize("shrinkage", [0.003, 0.2, 0.9])
def test_the_matrix_is_the_textbooks_discriminant(shrinkage):
    features, labels, _ = draw(60)
    points, _, _ = draw(20, seed=5)
    rows, counts = torch.from_numpy(features), torch.ones(len(features), dtype=torch.float64)
    found = Discriminant.of(class_totals(rows, torch.from_numpy(labels), CLASSES, counts), counts.new_zeros(6))
    weight, bias = (each.numpy() for each in found.linear(shrinkage))
    expected = direct_scores(features, labels, shrinkage, points)
    np.testing.assert_allclose(centred(points @ weight.T + bias), centred(expected), atol=1e-8)


def test_logits_are_discriminant_old_head_and_shares_and_nothing_else():
    features, labels, means = draw(80, spread=2.0)
    old, shares = noisy_head(means), np.array([0.4, 0.3, 0.2, 0.1])
    imbalance = np.array([0.7, 1.0, 1.3, 1.0])
    found = fit_head(features, labels, shares, old, old_shares=imbalance)
    assert found.kind == "fitted"
    points, _, _ = draw(20, seed=5)
    pooled = (
        found.fit_factor * direct_scores(features, labels, found.shrinkage, points)
        + found.old_factor * (old.logits(points) - np.log(imbalance))
        + np.log(shares)
    )
    np.testing.assert_allclose(log_softmax(found.linear.logits(points), axis=1), log_softmax(pooled, axis=1), atol=1e-8)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("count", [8, 40, 200])
def test_the_pooled_head_is_never_above_the_old_one_on_the_judged_rows(count, spread):
    features, labels, means = draw(count, spread=spread)
    found = fit_head(features, labels, [0.4, 0.3, 0.2, 0.1], noisy_head(means))
    assert found.loss <= found.old_loss + 1e-3
    if found.kind == "fitted":
        assert found.loss <= found.old_loss - LEAST_GAIN
    else:
        assert (found.fit_factor, found.loss) == (0.0, found.old_loss)


def test_a_head_that_is_right_already_is_kept():
    features, labels, means = draw(16, dim=40, spread=4.0)
    precise = 1 / np.square(np.linspace(0.5, 1.5, 40) * 4.0)
    truth = Linear(means * precise, -0.5 * (np.square(means) * precise).sum(axis=1))
    found = fit_head(features, labels, np.full(CLASSES, 0.25), truth)
    assert (found.kind, found.shrinkage, found.fit_factor) == ("old", None, 0.0)
    assert found.loss == found.old_loss


def test_the_old_heads_class_imbalance_counts_once():
    """Trained on 90:10, used at a site of 50:50: between the classes the logits are even."""
    means = np.array([[1.0, 0.0], [-1.0, 0.0]])
    learned = Linear(2 * means, np.log([0.9, 0.1]))
    middle = np.zeros((1, 2))
    even = fit_head(middle[:0], [], [0.5, 0.5], learned, old_shares=[1.8, 0.2])
    assert even.kind == "old"
    logits = even.linear.logits(middle)[0]
    assert logits[0] == pytest.approx(logits[1], abs=1e-9)
    there = fit_head(middle[:0], [], [0.9, 0.1], learned, old_shares=[1.8, 0.2]).linear.logits(middle)[0]
    assert there[0] - there[1] == pytest.approx(np.log(9))


def test_rows_of_90_to_10_make_no_prior_at_a_site_of_50_to_50():
    rng = np.random.default_rng(3)
    labels = np.array([0] * 180 + [1] * 20)
    features = rng.normal(size=(200, 3)) + np.where(labels == 0, 1.0, -1.0)[:, None]
    found = fit_head(features, labels, [0.5, 0.5], None)
    fresh = rng.normal(size=(4000, 3)) + np.where(np.arange(4000) % 2 == 0, 1.0, -1.0)[:, None]
    says = found.linear.logits(fresh).argmax(axis=1)
    assert abs((says == 0).mean() - 0.5) < 0.05
    assert (says == np.arange(4000) % 2).mean() > 0.93
    assert found.row_weights[labels[found.judged] == 1].sum() == pytest.approx(0.5)


def test_classes_without_rows_keep_the_old_heads_word():
    features, labels, means = draw(60)
    some = labels < 3
    found = fit_head(features[some], labels[some], np.full(CLASSES, 0.25), Linear(means, np.zeros(CLASSES)))
    assert np.isfinite(found.linear.weight).all()
    assert np.isfinite(found.linear.bias).all()
    fresh, truth, _ = draw(200, seed=8)
    says = found.linear.logits(fresh).argmax(axis=1)
    assert (says == truth)[truth == 3].mean() > 0.6


def test_a_view_that_the_old_head_does_not_read_is_used_only_if_every_class_has_rows():
    features, labels, means = draw(80)
    bad = np.random.default_rng(0).normal(size=features.shape)
    both = np.concatenate([bad, features], axis=1)
    old = Linear(np.concatenate([means, np.zeros_like(means)], axis=1), np.zeros(CLASSES))
    views = [View("input", slice(0, 6)), View("token", slice(6, 12), old=False)]
    found = fit_head(both, labels, np.full(CLASSES, 0.25), old, views=views)
    assert found.view == "token"
    assert not found.linear.weight[:, :6].any()
    assert found.old_factor == 0
    some = labels < 3
    assert fit_head(both[some], labels[some], np.full(CLASSES, 0.25), old, views=views).view != "token"


@pytest.mark.parametrize("constant", [0.0, 3.0])
def test_a_head_without_a_bias_has_constants_in_its_matrix(constant):
    """As good as one with a bias where features have a constant direction, and nowhere better than it says."""

    def rows_of(features):
        return np.concatenate([features + 1.0, np.full((len(features), 1), constant)], axis=1)

    features, labels, means = draw(400)
    fresh, truth, _ = draw(2000, seed=8)
    old, shares = Linear(rows_of(means), np.zeros(CLASSES)), np.array([0.4, 0.3, 0.2, 0.1])
    free, tied = (
        fit_head(rows_of(features), labels, shares, old, old_shares=4 * shares, views=[view])
        for view in (View("all", slice(None)), View("all", slice(None), bias=False))
    )
    assert not tied.linear.bias.any()
    assert tied.loss < tied.old_loss
    weights = shares[truth] / shares[truth].sum()
    loss = -weights @ log_softmax(tied.linear.logits(rows_of(fresh)), axis=1)[np.arange(len(truth)), truth]
    assert loss == pytest.approx(tied.loss, abs=0.06)
    if constant:
        assert tied.loss == pytest.approx(free.loss, abs=0.02)


def test_one_row_a_class_cannot_be_judged_and_is_trusted_little():
    features, labels, means = draw(CLASSES)
    found = fit_head(features, labels, np.full(CLASSES, 0.25), None)
    assert (found.kind, found.loss, found.accuracy) == ("fitted", None, None)
    assert (found.linear.logits(features).argmax(axis=1) == labels).all()
    pooled = fit_head(features, labels, np.full(CLASSES, 0.25), Linear(means, np.zeros(CLASSES)))
    assert pooled.old_factor == 1.0


def test_rows_that_may_not_judge_are_fitted_to_but_not_judged():
    features, labels, _ = draw(80)
    judged = np.arange(80) < 40
    found = fit_head(features, labels, np.full(CLASSES, 0.25), None, judges=judged)
    assert found.rows == 80
    assert set(found.judged) == set(range(40))


def test_rows_so_nearly_alike_that_rounding_decides_are_solved_all_the_same():
    generator = torch.Generator().manual_seed(0)
    covariance = torch.eye(4, dtype=torch.float64)
    covariance[3, 3] = -1.0
    means = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    found = Discriminant(means.new_zeros(4), means, covariance, 0.1, torch.ones(2, dtype=torch.bool))
    shrunk = 0.9 * covariance + 0.1 * 0.1 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(found.linear(0.1)[0] @ shrunk, means)
