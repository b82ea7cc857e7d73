"""Accuracy on a mix is the weighted mean of the tasks'; the comparison is the exact test where samples count alike."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.mixture import mixed_pair, mixed_share, sample_weights

TASKS = np.repeat([0, 1, 2], [40, 20, 10])


def test_a_mix_is_the_mean_of_the_tasks_by_their_shares():
    right = np.random.default_rng(0).random(70) < 0.6
    share = mixed_share(right, sample_weights(TASKS, [0.5, 0.2, 0.3]))
    means = [right[t == TASKS].mean() for t in range(3)]
    assert share.value == pytest.approx(0.5 * means[0] + 0.2 * means[1] + 0.3 * means[2])
    low, high = share.interval()
    assert 0 <= low < share.value < high <= 1
    with pytest.raises(InputError, match="no sample belongs"):
        sample_weights(np.array([-1, 0]), [0.0, 1.0])


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng, chances, mix = np.random.default_rng(1), np.array([0.9, 0.5, 0.3]), [0.6, 0.3, 0.1]
    weights, truth = sample_weights(TASKS, mix), float(chances @ mix)
    ends = [mixed_share(rng.random(70) < chances[TASKS], weights).interval() for _ in range(400)]
    assert np.mean([low <= truth <= high for low, high in ends]) >= 0.93


def test_equal_weights_give_the_exact_sign_test():
    first, second = np.arange(40) % 4 != 0, np.arange(40) % 3 != 0
    pair = mixed_pair(first, second, np.full(40, 1 / 40))
    assert pair.p_value == pytest.approx(binomtest(pair.won, pair.won + pair.lost).pvalue)
    assert pair.difference == pytest.approx(first.mean() - second.mean())


def test_chance_is_rarely_taken_for_a_difference_and_a_large_one_is_seen():
    rng, weights = np.random.default_rng(2), sample_weights(TASKS, [0.2, 0.3, 0.5])
    draws = [mixed_pair(rng.random(70) < 0.5, rng.random(70) < 0.5, weights).p_value for _ in range(200)]
    assert np.mean(np.array(draws) <= 0.05) <= 0.09
    seen = mixed_pair(rng.random(70) < 0.95, rng.random(70) < 0.2, weights)
    assert seen.verdict(seen.p_value) == "clearly better"
    assert seen.needed < 70
    same = np.ones(70, dtype=bool)
    assert mixed_pair(same, same, weights).p_value == 1


def test_samples_count_by_their_weight_in_the_mix():
    tasks, rng = np.repeat([0, 1, 2], 50), np.random.default_rng(3)
    first, second = rng.random(150) < 0.6, rng.random(150) < 0.5
    pairs = [mixed_pair(first, second, sample_weights(tasks, mix)) for mix in ([1, 1, 0], [2, 1, 0], [1, 1e-9, 1e-9])]
    assert [pair.samples for pair in pairs] == [100, 90, 50]
    alone = mixed_pair(first[:50], second[:50], np.full(50, 0.02))
    assert pairs[2].needed == pytest.approx(alone.needed, rel=0.1)
