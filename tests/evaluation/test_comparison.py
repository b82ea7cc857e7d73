"""Two models on the same samples: exact chances, and corrections that another implementation gives too."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.comparison import holm, mixed_share, paired, sample_weights, sign_test


def test_the_sign_test_counts_coins():
    for lost, won in itertools.product(range(5), range(5)):
        throws = list(itertools.product([0, 1], repeat=lost + won))
        assert sign_test(lost, won) == np.mean([sum(coins) >= lost for coins in throws])


def two_sided(won, lost):
    """Adds up the chances of all outcomes that are no likelier than this one, as textbooks define it."""
    throws = won + lost
    chances = [Fraction(math.comb(throws, heads), 2**throws) for heads in range(throws + 1)]
    return float(sum(chance for chance in chances if chance <= chances[won]))


def pair(won, lost, samples):
    alone = np.arange(samples)
    return paired(alone < won, (alone >= won) & (alone < won + lost))


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_two_sided_test_is_mcnemars(won, lost):
    assert pair(won, lost, 200).p_value == pytest.approx(two_sided(won, lost), rel=1e-12)


def test_pairs_are_counted_sample_by_sample():
    first = np.array([True, True, False, True, False])
    second = np.array([True, False, True, False, False])
    found = paired(first, second)
    assert (found.won, found.lost, found.samples, found.apart) == (2, 1, 5, 0.6)
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert paired(second, first).difference == -found.difference
    with pytest.raises(InputError, match=r"found \(5,\) and \(4,\)"):
        paired(first, second[1:])


def test_a_difference_is_clear_or_not():
    assert pair(8, 0, 20).verdict(0.01) == "clearly better"
    assert pair(0, 8, 20).verdict(0.05) == "clearly worse"
    assert pair(0, 8, 20).verdict(0.051) == pair(0, 0, 3).verdict(0.0) == "cannot tell"


def test_the_samples_needed_are_about_right():
    """With that many samples, four of five draws show the difference."""
    needed = pair(12, 4, 100).needed()
    draws = np.random.default_rng(0).multinomial(needed, [0.12, 0.04, 0.84], size=2000)
    shown = np.mean([pair(int(won), int(lost), needed).p_value <= 0.05 for won, lost, _ in draws])
    assert 0.7 < shown < 0.88
    assert pair(3, 3, 10).needed() is None


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_refuses_what_the_step_down_procedure_refuses(values):
    corrected = holm(values)
    for alpha in (0.01, 0.05, 0.5):
        refused = set()
        for done, place in enumerate(sorted(range(len(values)), key=lambda k: values[k])):
            if values[place] * (len(values) - done) > alpha:
                break
            refused.add(place)
        assert {k for k, value in enumerate(corrected) if value <= alpha} == refused


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


def test_chance_is_rarely_taken_for_a_difference_and_a_large_one_is_seen():
    rng, weights = np.random.default_rng(2), sample_weights(TASKS, [0.2, 0.3, 0.5])
    draws = [paired(rng.random(70) < 0.5, rng.random(70) < 0.5, weights).p_value for _ in range(200)]
    assert np.mean(np.array(draws) <= 0.05) <= 0.09
    seen = paired(rng.random(70) < 0.95, rng.random(70) < 0.2, weights)
    assert seen.verdict(seen.p_value) == "clearly better"
    assert seen.needed() < 70
    same = np.ones(70, dtype=bool)
    assert paired(same, same, weights).p_value == 1
