"""The alpha schedule: w_t proportional to alpha^(T - t)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.preference.preference import Preference


def test_the_papers_equation_by_hand() -> None:
    # alpha = 2, T = 3: 4, 2, 1 over 7. alpha = 0.5: 1, 2, 4 over 7.
    assert Preference.from_alpha(2, 3).weights == pytest.approx((4 / 7, 2 / 7, 1 / 7), abs=1e-16)
    assert Preference.from_alpha(0.5, 3).weights == pytest.approx((1 / 7, 2 / 7, 4 / 7), abs=1e-16)
    assert Preference.from_alpha(1, 4).weights == (0.25,) * 4
    assert Preference.from_alpha(0, 3).weights == (0, 0, 1)
    assert Preference.from_alpha(7, 1).weights == (1,)


@pytest.mark.parametrize("alpha", [2.0, 1e-3, 0.999, 1.001, 1e300, 5e-324])
def test_a_thousand_tasks_neither_overflow_nor_lose_the_ratio(alpha: float) -> None:
    weights = Preference.from_alpha(alpha, 1000).weights
    assert math.fsum(weights) == pytest.approx(1, abs=1e-15)
    assert all(math.isfinite(weight) for weight in weights)
    for earlier, later in pairwise(weights):
        if min(earlier, later) > 1e-290:
            assert earlier / later == pytest.approx(alpha, rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "tasks", "message"),
    [
        (-1, 3, "alpha must be a finite number >= 0, not -1; 0 gives everything to the last task"),
        (1, 0, "the number of tasks must be a whole number >= 1, not 0"),
    ],
)
def test_bad_input(alpha: object, tasks: object, message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.from_alpha(alpha, tasks)  # type: ignore[arg-type]
    assert message in str(error.value)
    with pytest.raises(InputError, match="the number of tasks"):
        Preference.equal(0)
