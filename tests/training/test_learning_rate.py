"""The learning rate rises, then falls as half a cosine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.training.trainer import learning_rate, warmup_steps


@given(st.integers(1, 400), st.integers(0, 500), st.sampled_from(["cosine", "constant"]))
def test_rises_to_the_peak_and_never_rises_again(steps, warmup, shape):
    rates = [learning_rate(step, steps, 0.3, warmup, shape) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(rate == pytest.approx(0.3 * (k + 1) / warmup) for k, rate in enumerate(rising))
    if falling:
        assert falling[0] == 0.3
    if shape == "constant":
        assert set(falling) <= {0.3}


@given(st.integers(2, 400))
def test_the_cosine_would_reach_zero_one_step_after_the_last(steps):
    assert learning_rate(steps, steps, 1.0, 0) == pytest.approx(0, abs=1e-12)
    middle = learning_rate(steps // 2, steps, 1.0, 0)
    assert middle == pytest.approx(0.5 * (1 + math.cos(math.pi * (steps // 2) / steps)))


def test_a_warm_up_longer_than_training_never_reaches_the_peak():
    assert learning_rate(99, 100, 1.0, 500) == pytest.approx(0.2)


@pytest.mark.parametrize(("given", "steps"), [(0, 0), (500, 500), (1, 1), (0.25, 50), (0.001, 0)])
def test_below_one_a_warm_up_is_a_share(given, steps):
    assert warmup_steps(given, 200) == steps
