"""Rule 8: the lottery, a fixed 64-bit mixing function of (seed, stream, task, element). Specified in docs/method.md."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *parts: int | str) -> int:
    """Returns a seed of 63 bits for one purpose.

    >>> derived_seed(0, "epoch", 1) == derived_seed(0, "epoch", 1) != derived_seed(0, "epoch", 2)
    True
    """
    digest = hashlib.sha256(repr((seed, *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB

KEEP = 0
LEFTOVERS = 1
RANDOM_MIX = 2
TIES_CUT = 3


def mix(x: int) -> int:
    """Mixes a 64-bit integer: a bijection that spreads every input bit over every output bit."""
    x = ((x ^ (x >> 30)) * MIX_A) & MASK
    x = ((x ^ (x >> 27)) * MIX_B) & MASK
    return x ^ (x >> 31)


def lottery_state(seed: int, stream: int, task: int) -> int:
    """Returns the state that all elements of one (seed, stream, task) share; `ticket` draws their numbers from it."""
    state = 0
    for value in (seed, stream, task):
        state = mix(((state + GOLDEN) ^ value) & MASK)
    return state


def ticket(lottery_state: int, element: int) -> int:
    """Returns the lottery number of one element, in [0, 2**64). The kernels do the same on whole arrays.

    >>> ticket(lottery_state(0, 0, 1), 0) == ticket(lottery_state(0, 0, 2), 0)
    False
    """
    return mix((lottery_state + GOLDEN * (element + 1)) & MASK)
