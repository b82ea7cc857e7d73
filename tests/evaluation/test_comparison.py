"""Two models on the same samples: exact chances, and corrections that another implementation gives too."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.comparison import Paired, holm, paired, sign_test


def test_the_sign_test_counts_coins():
    for lost, won in itertools.product(range(5), range(5)):
        throws = list(itertools.product([0, 1], repeat=lost + won))
        assert sign_test(lost, won) == np.mean([sum(coins) >= lost for coins in throws])


def two_sided(won, lost):
    """Adds up the chances of all outcomes that are no likelier than this one, as textbooks define it."""
    throws = won + lost
    chances = [Fraction(math.comb(throws, heads), 2**throws) for heads in range(throws + 1)]
    return float(sum(chance for chance in chances if chance <= chances[won]))


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_two_sided_test_is_mcnemars(won, lost):
    assert Paired(won, lost, 200).p_value == pytest.approx(two_sided(won, lost), rel=1e-12)


def test_thousands_of_samples_are_no_trouble():
    assert Paired(4000, 4000, 10_000).p_value == 1
    assert Paired(9000, 1000, 10_000).p_value == 0  # less than any float
    normal = math.erfc(99 / math.sqrt(10_000) / math.sqrt(2))
    assert Paired(5050, 4950, 10_000).p_value == pytest.approx(normal, rel=1e-2)


def test_pairs_are_counted_sample_by_sample():
    first = np.array([True, True, False, True, False])
    second = np.array([True, False, True, False, False])
    assert paired(first, second) == Paired(won=2, lost=1, samples=5)
    assert paired(second, first) == Paired(won=1, lost=2, samples=5)
    assert paired(first, second).difference == pytest.approx(first.mean() - second.mean())
    with pytest.raises(InputError, match=r"the same samples twice, found \(5,\) and \(4,\)"):
        paired(first, second[1:])


def test_words():
    assert Paired(8, 0, 20).verdict(0.01) == "clearly better"
    assert Paired(0, 8, 20).verdict(0.05) == "clearly worse"
    assert Paired(0, 8, 20).verdict(0.051) == "cannot tell"
    assert Paired(0, 0, 3).verdict(0.0) == "cannot tell"


def test_the_samples_needed_are_about_right():
    """With that many samples, four of five draws show the difference."""
    pair = Paired(won=12, lost=4, samples=100)
    needed = pair.needed()
    generator = np.random.default_rng(0)
    draws = generator.multinomial(needed, [0.12, 0.04, 0.84], size=2000)
    shown = np.mean([Paired(int(won), int(lost), needed).p_value <= 0.05 for won, lost, _ in draws])
    assert 0.7 < shown < 0.88
    assert Paired(3, 3, 10).needed() is None


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
