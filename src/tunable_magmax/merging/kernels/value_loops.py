"""Loops over the values of base and tasks.

Task values come as an array of addresses, so that one compiled version serves every number of tasks.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from tunable_magmax.merging.kernels.loops import (
    BLOCK,
    ONE,
    WORD,
    compiled,
    packed,
    pattern,
    pointer,
    ticket,
    trailing_zeros,
    unpack,
)


@compiled()
def survey(base, addresses, compared, rows, planes, first_word, changed, suspect):
    """Marks the candidates of each task, and notes which task vectors are not zero or not finite.

    Task k takes part in the comparison where compared[k]; its candidates go to planes[rows[k]] unless rows[k] < 0.
    changed[k] is set where a value differs from the base's, suspect[k] where a difference is NaN or infinite.
    """
    n = base.shape[0]
    largest = np.empty(BLOCK, base.dtype)
    bits = np.zeros(BLOCK, np.uint8)
    octets = bits.view(np.uint64)
    # As integers, the patterns of non-negative floats keep their order, with infinity and NaN above all numbers.
    finite = pattern(np.finfo(base.dtype).max)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        largest[:] = 0
        if size < BLOCK:
            bits[:] = 0
        for k in range(addresses.shape[0]):
            values = carray(pointer(addresses[k]), n, base.dtype)[start : start + size]
            peak = pattern(base.dtype.type(0))
            if compared[k]:
                for j in range(size):
                    magnitude = abs(values[j] - origin[j])
                    peak = max(peak, pattern(magnitude))
                    before = largest[j]
                    reached = magnitude >= before
                    bits[j] = reached
                    largest[j] = magnitude if reached else before
            else:
                for j in range(size):
                    peak = max(peak, pattern(abs(values[j] - origin[j])))
            changed[k] |= peak > 0
            suspect[k] |= peak > finite
            if rows[k] >= 0:
                word = first_word + start // WORD
                for w in range((size + WORD - 1) // WORD):
                    planes[rows[k], word + w] = packed(octets, w)


@compiled(fastmath={"reassoc"})
def sum_of_squares(vector):
    """Returns the squared length in float64; the additions may be in any order."""
    total = 0.0
    for j in range(vector.shape[0]):
        value = np.float64(vector[j])
        total += value * value
    return total


@compiled(fastmath={"reassoc"})
def squared_distance(values, base):
    """Returns the squared length of values - base, like `sum_of_squares`."""
    total = 0.0
    for j in range(base.shape[0]):
        difference = np.float64(values[j] - base[j])
        total += difference * difference
    return total


@compiled()
def subtract(values, base, out):
    """Writes values - base."""
    for j in range(base.shape[0]):
        out[j] = values[j] - base[j]


@compiled()
def gather(base, addresses, rows, planes, first_word, out):
    """Writes the owner's value less the base's; task k owns the bits of planes[rows[k]], and somebody each element."""
    n = base.shape[0]
    for w in range((n + WORD - 1) // WORD):
        for k in range(addresses.shape[0]):
            if rows[k] >= 0:
                owned = planes[rows[k], first_word + w]
                if owned:
                    values = carray(pointer(addresses[k]), n, base.dtype)
                    while owned:
                        p = np.int64(w * WORD) + np.int64(trailing_zeros(owned))
                        owned &= owned - ONE
                        out[p] = values[p] - base[p]


@compiled()
def largest(base, addresses, out, counts):
    """Writes the difference of largest magnitude (MAGMAX), the later task's on a tie; counts what each task gave."""
    n = base.shape[0]
    owners = np.empty(BLOCK, np.int32)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        best = out[start : start + size]
        best[:] = 0
        owners[:] = 0
        for k in range(addresses.shape[0]):
            values = carray(pointer(addresses[k]), n, base.dtype)[start : start + size]
            task = np.int32(k)
            for j in range(size):
                difference = values[j] - origin[j]
                before = best[j]
                owner = owners[j]
                reached = abs(difference) >= abs(before)
                best[j] = difference if reached else before
                owners[j] = task if reached else owner
        for j in range(size):
            counts[owners[j]] += 1


@compiled()
def draw(base, addresses, tops, lottery_state, first_element, out, counts):
    """Writes the difference of the first task whose top is not below the lottery number; the last is 2**64 - 1."""
    n = base.shape[0]
    for p in range(n):
        number = ticket(lottery_state, first_element + np.uint64(p))
        k = 0
        while number > tops[k]:
            k += 1
        out[p] = carray(pointer(addresses[k]), n, base.dtype)[p] - base[p]
        counts[k] += 1


@compiled()
def weighted_sum(base, addresses, factors, out):
    """Writes the sum over tasks of factor * difference, in float64 and task order, rounded once."""
    n = base.shape[0]
    sums = np.empty(BLOCK, np.float64)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        sums[:] = 0.0
        for k in range(addresses.shape[0]):
            values = carray(pointer(addresses[k]), n, base.dtype)[start : start + size]
            factor = factors[k]
            for j in range(size):
                sums[j] += factor * np.float64(values[j] - origin[j])
        for j in range(size):
            out[start + j] = sums[j]


@compiled()
def _vote(values, origin, factor, kept, ballots, sums):
    for j in range(origin.shape[0]):
        ballot = factor * np.float64(values[j] - origin[j])
        ballot = ballot if kept[j] else 0.0
        ballots[j] = ballot
        sums[j] += ballot


@compiled()
def _signs(sums, signs):
    for j in range(sums.shape[0]):
        total = sums[j]
        signs[j] = np.float64(total > 0.0) - np.float64(total < 0.0)


@compiled()
def _agree(ballots, signs, share, agreed, votes):
    for j in range(ballots.shape[0]):
        ballot = ballots[j] * signs[j]
        agrees = ballot > 0.0
        agreed[j] += ballot if agrees else 0.0
        votes[j] += share if agrees else 0.0


@compiled()
def _mean(signs, agreed, votes, out):
    for j in range(out.shape[0]):
        out[j] = signs[j] * agreed[j] / (votes[j] if votes[j] != 0.0 else 1.0)


@compiled()
def elect(base, addresses, factors, shares, rows, planes, first_word, out):
    """Writes the mean, by shares, of the kept values (planes[rows[k]]) whose sign is that of their sum (TIES).

    Values that are not kept count as 0. A sum that begins at +0 is never -0, so adding one changes nothing. Those who
    agree are summed as if positive and the sign comes last: rounding is the same either side of 0. The small loops are
    functions of their own because LLVM makes vector code of them there, and not in one large function.
    """
    n = base.shape[0]
    tasks = addresses.shape[0]
    ballots = np.empty((tasks, BLOCK), np.float64)
    sums, signs = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    agreed, votes = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    kept = np.empty(BLOCK, np.uint8)
    octets = kept.view(np.uint64)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        word = first_word + start // WORD
        sums[:] = 0.0
        agreed[:] = 0.0
        votes[:] = 0.0
        for k in range(tasks):
            values = carray(pointer(addresses[k]), n, base.dtype)[start : start + size]
            for w in range((size + WORD - 1) // WORD):
                unpack(planes[rows[k], word + w], octets, w)
            _vote(values, origin, factors[k], kept, ballots[k], sums)
        _signs(sums, signs)
        for k in range(tasks):
            _agree(ballots[k, :size], signs, shares[k], agreed, votes)
        _mean(signs, agreed, votes, out[start : start + size])


@compiled()
def step(base, tau, scale, out):
    """Writes base + scale * tau, each operation rounded. Returns whether every result is finite."""
    limit = np.finfo(base.dtype).max
    odd = np.uint8(0)
    for j in range(base.shape[0]):
        moved = scale * tau[j]
        value = base[j] + moved
        out[j] = value
        odd |= np.uint8(not abs(value) <= limit)
    return odd == 0
