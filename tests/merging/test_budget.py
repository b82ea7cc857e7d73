"""Section 2 of docs/method.md: from weights to a budget, in rational arithmetic."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_budget
from strategies import WEIGHTS

from tunable_magmax import budget
from tunable_magmax.errors import InputError

quick = settings(max_examples=150, deadline=None, derandomize=True)

elements = st.one_of(st.integers(0, 20), st.integers(0, 10**6), st.integers(10**12 - 1000, 10**12))
decimals = st.decimals(min_value=0, max_value=1000, places=6).map(float)
weights = st.lists(st.one_of(WEIGHTS, decimals, st.integers(0, 9)), min_size=1, max_size=80).filter(any)


def test_exact_where_float64_is_not():
    # 0.1 * 10^12 and friends land on the wrong side of an integer in binary, or lose their last digits in float32.
    assert budget([0.1, 0.2, 0.7], 10**12) == [10**11, 2 * 10**11, 7 * 10**11]
    assert budget([1, 2], 3 * 10**17) == [10**17, 2 * 10**17]
    assert budget([0.29, 0.71], 100) == [29, 71]  # 0.29 * 100 == 28.999999999999996
    assert budget([1e-12, 1], 10**12) == [1, 10**12 - 1]


def test_a_weight_is_the_decimal_it_prints_as():
    for tenth, rest in [
        ("0.1", "0.9"),
        (Decimal("0.1"), Decimal("0.9")),
        (np.float64(0.1), np.float64(0.9)),
        (np.float32(0.1), np.float32(0.9)),
        (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)),
        (torch.tensor(0.1), torch.tensor(0.9)),
        (np.int32(1), np.int64(9)),
        (torch.tensor(1), 9),
        ("1", 9.0),
    ]:
        assert budget([tenth, rest], 10) == [1, 9], (tenth, rest)


@quick
@given(weights, elements)
def test_equals_the_oracle(weights, elements):
    assert budget(weights, elements) == naive_budget(weights, elements)


@quick
@given(weights, elements)
def test_facts(weights, elements):
    n = budget(weights, elements)
    exact = [Fraction(str(w)) for w in weights]
    shares = [w / sum(exact) * elements for w in exact]
    assert sum(n) == elements
    assert all(count == 0 for count, w in zip(n, weights, strict=True) if w == 0)
    assert all(abs(count - share) < 1 or count == share for count, share in zip(n, shares, strict=True))
    # The ones go to the first tasks with weight, and to no task twice.
    extra = [count - math.floor(share) for count, share, w in zip(n, shares, weights, strict=True) if w]
    assert extra == sorted(extra, reverse=True)
    assert set(extra) <= {0, 1}


@pytest.mark.parametrize(
    ("weights", "elements", "fragments"),
    [
        ([1, -0.25], 10, ["weight", "-0.25"]),
        ([1, float("nan")], 10, ["weight", "nan"]),
        ([1, float("inf")], 10, ["weight", "inf"]),
        ([1, "inf"], 10, ["weight", "inf"]),
        ([0, 0.0], 10, ["weight", "0"]),
        ([], 10, ["weight"]),
        ([1, "heavy"], 10, ["weight", "heavy"]),
        ([1, None], 10, ["weight", "none"]),
        ([1, 1], -3, ["-3"]),
        ([1, 1], 2.5, ["2.5"]),
    ],
)
def test_refused(weights, elements, fragments):
    with pytest.raises(InputError) as refusal:
        budget(weights, elements)
    for fragment in fragments:
        assert fragment in str(refusal.value).lower()


@pytest.mark.parametrize("huge", ["1e400", "1e999999999", "-1e500", 10**400])
def test_numbers_beyond_float64_are_refused_at_once(huge):
    with pytest.raises(InputError, match="expected a number that a float64 can hold"):
        budget([huge, 1], 10)
