"""Loops over planes: who is free, who has won, and the lottery among candidates."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import numpy as np

from tunable_magmax.merging.kernels.compiled import ONE, WORD, compiled, ones, ticket, trailing_zeros


@compiled()
def tally(plane, free):
    """How many bits the two have in common."""
    count = 0
    for w in range(plane.shape[0]):
        count += ones(plane[w] & free[w])
    return count


@compiled()
def retire(free, won):
    """Take the winners out of the free elements."""
    for w in range(free.shape[0]):
        free[w] &= ~won[w]


@compiled()
def split(plane, free, won, starts, stops, elements, drum, low, high, keys, places):
    """Draw a lottery number for each free candidate: below `low` wins, up to `high` is kept for a closer look.

    The planes are slices of equal length; run r covers words starts[r]:stops[r] of them and its first element has
    index elements[r]. Returns (winners, undecided); undecided numbers and places (bit positions in the slice) are
    stored as far as `keys` has room: the caller makes more and calls again if `undecided` exceeds it.
    """
    winners = 0
    undecided = 0
    for r in range(starts.shape[0]):
        for w in range(starts[r], stops[r]):
            candidates = plane[w] & free[w]
            taken = np.uint64(0)
            first = elements[r] + np.uint64((w - starts[r]) * WORD)
            while candidates:
                j = trailing_zeros(candidates)
                candidates &= candidates - ONE
                number = ticket(drum, first + j)
                wins = number < low
                taken |= np.uint64(wins) << j  # no branch: a coin toss cannot be predicted
                if number - low <= high - low:
                    if undecided < keys.shape[0]:
                        keys[undecided] = number
                        places[undecided] = np.uint64(w * WORD) + j
                    undecided += 1
            won[w] = taken
            winners += ones(taken)
    return winners, undecided


@compiled()
def award(won, places):
    """Set the bits at the given places."""
    for i in range(places.shape[0]):
        won[places[i] >> np.uint64(6)] |= ONE << (places[i] & np.uint64(63))
