"""A head's logit scale by the profiles' labelled rows: the temperature that made the labels is found again."""

from __future__ import annotations

import numpy as np
import pytest

from tunable_magmax.models.head import Head
from tunable_magmax.preference.calibration import Calibration, logit_factor, site_head
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.profile import Profile

CLASSES = tuple("abcdef")
WIDTH, SHARP = 16, 12.0


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def head_of(scale):
    return Head.of(unit(np.random.default_rng(1).normal(size=(len(CLASSES), WIDTH))), CLASSES, scale)


def profile_of(draw, scale, rows=20_000, task="one", own=None):
    """Rows whose labels are drawn with the probabilities of a head of this scale; `own`: embeddings by theta_t."""
    features = draw.normal(size=(rows, WIDTH)).astype(np.float32)
    shares = head_of(scale).probabilities(features)
    labels = (shares.cumsum(axis=1) < draw.random((rows, 1))).sum(axis=1).clip(max=len(CLASSES) - 1)
    counts = tuple(np.bincount(labels, minlength=len(CLASSES)).tolist())
    embedded = features if own is None else own(features, labels)
    found = {"base": "sha256:0", "base_features": features, "row_labels": labels.astype(np.int64)}
    return Profile(task, CLASSES, counts, rows, embedded, "sha256:1", **found)


@pytest.mark.parametrize("flatter", [1.5, 4.0, 12.0])
def test_the_temperature_that_made_the_labels_is_found(draw, flatter):
    found = logit_factor(head_of(SHARP / flatter), [profile_of(draw, SHARP)], [1.0])
    assert found == pytest.approx(flatter, rel=0.03)
    assert found == float(f"{found:.3g}")


def test_logits_that_are_too_sharp_are_left_alone(draw):
    assert logit_factor(head_of(3 * SHARP), [profile_of(draw, SHARP)], [1.0]) == 1.0


def test_tasks_count_by_their_weights(draw):
    profiles = [profile_of(draw, 6.0), profile_of(draw, 12.0, task="two")]
    one, both, two = (logit_factor(head_of(3.0), profiles, weights) for weights in ((1, 0), (1, 1), (0, 1)))
    assert one == pytest.approx(2, rel=0.03)
    assert two == pytest.approx(4, rel=0.03)
    assert one < both < two


def test_rows_by_a_checkpoint_that_was_trained_on_them_do_not_raise_it(draw):
    head = head_of(SHARP / 2)

    def learnt(features, labels):
        return (features + 9 * head.weight[labels]).astype(np.float32)

    assert logit_factor(head, [profile_of(draw, SHARP, own=learnt)], [1.0]) == pytest.approx(2, rel=0.03)

    def forgotten(features, labels):
        return np.roll(features, 1, axis=0)

    assert logit_factor(head, [profile_of(draw, SHARP, own=forgotten)], [1.0]) == 1.0


def test_a_few_rows_that_are_all_right_do_not_ask_for_an_endless_factor():
    head = head_of(1.0)
    labels = np.arange(len(CLASSES))
    found = {"base": "sha256:0", "base_features": head.weight, "row_labels": labels}
    profile = Profile("one", CLASSES, (1,) * len(CLASSES), len(CLASSES), head.weight, "sha256:1", **found)
    assert 2 < logit_factor(head, [profile], [1.0]) < 20


def test_without_labelled_rows_of_every_task_nothing_is_known(draw):
    whole = profile_of(draw, SHARP, rows=50)
    bare = Profile("two", CLASSES, whole.label_counts, 50, whole.features, "sha256:1")
    head = head_of(1.0)
    for profiles in ([], [whole, None], [whole, bare]):
        assert logit_factor(head, profiles, [0.5, 0.5]) == 1.0
    wide = Head.of(np.eye(len(CLASSES), WIDTH + 1), CLASSES, 1.0)
    assert logit_factor(wide, [whole], [1.0]) == 1.0


def test_a_sites_head_is_sharper_only_with_a_prior_and_only_once(draw):
    head, profiles = head_of(SHARP / 4), [profile_of(draw, SHARP)]
    plain = Preference((1.0,))
    informed = plain.with_prior([dict.fromkeys(CLASSES, 1)], eps=0.1)
    assert site_head(head, plain, profiles).logit_scale == head.logit_scale
    sharper = site_head(head, informed, profiles)
    assert sharper.logit_scale == pytest.approx(SHARP, rel=0.03)
    np.testing.assert_array_equal(sharper.bias, informed.prior.bias(CLASSES))
    assert site_head(sharper, informed, profiles).logit_scale == pytest.approx(sharper.logit_scale, rel=0.01)


def test_one_calibration_serves_all_weights(draw):
    profiles = [profile_of(draw, sharp) for sharp in (6.0, 12.0)]
    calibration = Calibration(head_of(3.0), profiles)
    for weights in ((1, 0), (0.3, 0.7), (0, 1), (1, 0)):
        assert calibration.factor(weights) == logit_factor(head_of(3.0), profiles, weights) > 1
    assert calibration.factor((1, 1, 1)) == 1.0
