"""Section 4 of docs/method.md: the numbers themselves, and that drawing by them is fair.

All seeds are fixed, so each test gives the same answer every time; thresholds are at p = 1e-4 for a fair lottery.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import lottery

from tunable_magmax import merge_state_dicts
from tunable_magmax.lottery import lottery_state, ticket


def key(seed, stream, task, p):
    return ticket(lottery_state(seed, stream, task), p)


UNLIKELY = 1e-4

GOLDEN = {
    (0, 0, 1, 0): 0x62A4ED4055D278DB,
    (0, 0, 1, 1): 0xF62003D438AE59CA,
    (0, 1, 1, 0): 0x3839455CB9C39765,
    (0, 0, 2, 0): 0x179C548F212A6056,
    (1, 0, 1, 0): 0xAA2AD814F2255C10,
    (7, 0, 3, 4): 0x26F93DDB07760D6A,
    (2**63, 2, 0, 2**32): 0x171376EF8A0BCF06,
    (2**64 - 1, 3, 70, 10**12): 0xA8B0CE35704B08D2,
}


@pytest.mark.parametrize("quadruple", GOLDEN)
def test_golden(quadruple):
    assert key(*quadruple) == GOLDEN[quadruple]


word = st.one_of(st.integers(0, 5), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(word, st.integers(0, 3), st.integers(0, 70), word)
def test_equals_the_oracle(seed, stream, task, p):
    assert key(seed, stream, task, p) == lottery(seed, stream, task, p)


# --- fairness of the numbers ------------------------------------------------------------------------


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom >= statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def uniform_p_value(values: np.ndarray, bins: int) -> float:
    counts = np.bincount(values.astype(np.int64), minlength=bins)
    expected = len(values) / bins
    return tail(float(((counts - expected) ** 2 / expected).sum()), bins - 1)


@pytest.fixture(scope="module")
def numbers() -> dict[str, np.ndarray]:
    """16384 numbers along each argument, the others held still."""
    n = range(16_384)
    return {
        "p": np.array([key(0, 0, 1, i) for i in n], dtype=np.uint64),
        "far p": np.array([key(0, 0, 1, i << 30) for i in n], dtype=np.uint64),
        "task": np.array([key(0, 0, i, 0) for i in n], dtype=np.uint64),
        "seed": np.array([key(i, 0, 1, 0) for i in n], dtype=np.uint64),
    }


@pytest.mark.parametrize("along", ["p", "far p", "task", "seed"])
def test_top_and_low_bits_are_uniform(numbers, along):
    assert uniform_p_value(numbers[along] >> np.uint64(56), 256) > UNLIKELY
    assert uniform_p_value(numbers[along] & np.uint64(255), 256) > UNLIKELY


# --- fairness of keeping ----------------------------------------------------------------------------

CANDIDATES, KEPT = 40, 13


def fairness_p_value(kept: np.ndarray) -> float:
    """P-value of "each candidate is kept equally often"; kept: bool [trials, m], equally many in each trial.

    The indicators of one trial have covariance c (I - J / m) with c = share (1 - share) m / (m - 1): chi-square, m - 1.
    """
    trials, m = kept.shape
    share = kept[0].sum() / m
    assert (kept.sum(axis=1) == kept[0].sum()).all()
    variance = trials * share * (1 - share) * m / (m - 1)
    return tail(float(((kept.sum(axis=0) - trials * share) ** 2 / variance).sum()), m - 1)


# --- and of the merge that uses them ----------------------------------------------------------------


def test_a_merge_keeps_each_candidate_equally_often():
    base = {"w": torch.zeros(CANDIDATES)}
    tasks = [{"w": torch.full((CANDIDATES,), 1.0)}, {"w": torch.full((CANDIDATES,), 2.0)}]
    kept = np.zeros((300, CANDIDATES), dtype=bool)
    for seed in range(len(kept)):
        out = merge_state_dicts(base, tasks, budget=[CANDIDATES - KEPT, KEPT], scale=1, seed=seed)
        kept[seed] = out.state_dict["w"].numpy() == 2
    assert fairness_p_value(kept) > UNLIKELY
