"""Section 4 of docs/method.md: the numbers themselves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import lottery

from tunable_magmax.lottery import lottery_state, ticket


def key(seed, stream, task, p):
    return ticket(lottery_state(seed, stream, task), p)


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
