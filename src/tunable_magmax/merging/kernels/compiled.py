"""The inner loops for the CPU, compiled by numba. Pure array code: no tensors, no files, no threads.

All of them release the GIL, work on one chunk and touch each input value once, in blocks that stay in the L1 cache.
Task values come as an array of addresses, so that one compiled version serves every number of tasks. A *plane* is a bit
set, one bit an element, in 64-bit words. None of them may use fast-math or fused operations: every rounding is part of
the specification (docs/method.md). `sum_of_squares` and `squared_distance` alone may reorder their additions.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B

BLOCK = 1024
WORD = 64
_GOLDEN = np.uint64(GOLDEN)
_MIX_A = np.uint64(MIX_A)
_MIX_B = np.uint64(MIX_B)
_ONE = np.uint64(1)
# Multiplying eight 0/1 bytes by this gathers them, first byte lowest, in the top byte of the product.
_GATHER_BITS = np.uint64(0x0102040810204080)


def compiled(**options: Any):
    """numba's njit, kept on disk between runs where there is a place for it (a read-only install has none)."""

    def decorate(function):
        try:
            return njit(function, nogil=True, error_model="numpy", cache=True, **options)
        except RuntimeError:  # "cannot cache function": compile in every process instead
            return njit(function, nogil=True, error_model="numpy", **options)

    return decorate


@intrinsic
def _pointer(typing_context, address):  # an integer address as a pointer that carray accepts
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _trailing_zeros(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.uint64(types.uint64), generate


@intrinsic
def _ones(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def _pattern(typing_context, value):  # the bits of a float as a signed integer of its width
    width = types.int32 if value == types.float32 else types.int64

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(width))

    return width(value), generate


@compiled()
def _ticket(drum, element):
    x = drum + _GOLDEN * (element + _ONE)
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


@compiled()
def survey(base, addresses, compared, rows, planes, first_word, changed, suspect):
    """Mark where each task is a candidate if nobody refuses it, and what the task vectors hold.

    Task k takes part in the comparison where compared[k]; its candidates go to planes[rows[k]] unless rows[k] < 0.
    changed[k] is set where a value differs from the base's, suspect[k] where a difference is NaN or infinite.
    """
    n = base.shape[0]
    largest = np.empty(BLOCK, base.dtype)
    bits = np.zeros(BLOCK, np.uint8)
    octets = bits.view(np.uint64)
    # As integers, the patterns of non-negative floats keep their order, with infinity and NaN above all numbers.
    finite = _pattern(np.finfo(base.dtype).max)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        largest[:] = 0
        if size < BLOCK:
            bits[:] = 0
        for k in range(addresses.shape[0]):
            values = carray(_pointer(addresses[k]), n, base.dtype)[start : start + size]
            peak = _pattern(base.dtype.type(0))
            if compared[k]:
                for j in range(size):
                    magnitude = abs(values[j] - origin[j])
                    peak = max(peak, _pattern(magnitude))
                    before = largest[j]
                    reached = magnitude >= before
                    bits[j] = reached
                    largest[j] = magnitude if reached else before
            else:
                for j in range(size):
                    peak = max(peak, _pattern(abs(values[j] - origin[j])))
            changed[k] |= peak > 0
            suspect[k] |= peak > finite
            if rows[k] >= 0:
                word = first_word + start // WORD
                for w in range((size + WORD - 1) // WORD):
                    packed = np.uint64(0)
                    for o in range(8):
                        packed |= ((octets[w * 8 + o] * _GATHER_BITS) >> np.uint64(56)) << np.uint64(8 * o)
                    planes[rows[k], word + w] = packed


@compiled(fastmath={"reassoc"})
def sum_of_squares(vector):
    """The squared length in float64; the order of the additions is the machine's choice."""
    total = 0.0
    for j in range(vector.shape[0]):
        value = np.float64(vector[j])
        total += value * value
    return total


@compiled(fastmath={"reassoc"})
def squared_distance(values, base):
    """The squared length of values - base, like `sum_of_squares`."""
    total = 0.0
    for j in range(base.shape[0]):
        difference = np.float64(values[j] - base[j])
        total += difference * difference
    return total


@compiled()
def subtract(values, base, out):
    """out = values - base."""
    for j in range(base.shape[0]):
        out[j] = values[j] - base[j]


@compiled()
def tally(plane, free):
    """How many bits the two have in common."""
    count = 0
    for w in range(plane.shape[0]):
        count += _ones(plane[w] & free[w])
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
                j = _trailing_zeros(candidates)
                candidates &= candidates - _ONE
                number = _ticket(drum, first + j)
                wins = number < low
                taken |= np.uint64(wins) << j  # no branch: a coin toss cannot be predicted
                if number - low <= high - low:
                    if undecided < keys.shape[0]:
                        keys[undecided] = number
                        places[undecided] = np.uint64(w * WORD) + j
                    undecided += 1
            won[w] = taken
            winners += _ones(taken)
    return winners, undecided


@compiled()
def award(won, places):
    """Set the bits at the given places."""
    for i in range(places.shape[0]):
        won[places[i] >> np.uint64(6)] |= _ONE << (places[i] & np.uint64(63))


@compiled()
def _magnitude_code(value, origin, unit):
    # Patterns of non-negative floats order like the floats; `unit`, a 1 of float32 or float64, makes them one type.
    return np.uint64(_pattern(abs(value - origin) * unit))


@compiled()
def magnitude_histogram(plane, free, base, values, unit, shift, bits, prefix, histogram):
    """Count free candidates by a digit (code >> shift) of their magnitude, where the higher digits are `prefix`."""
    mask = (_ONE << np.uint64(bits)) - _ONE
    for w in range(plane.shape[0]):
        candidates = plane[w] & free[w]
        while candidates:
            p = np.int64(w * WORD) + np.int64(_trailing_zeros(candidates))
            candidates &= candidates - _ONE
            code = _magnitude_code(values[p], base[p], unit)
            if (code >> np.uint64(shift + bits)) == prefix:
                histogram[(code >> np.uint64(shift)) & mask] += 1


@compiled()
def magnitude_cut(plane, free, base, values, unit, threshold, won, level):
    """Free candidates whose magnitude code is above the threshold win; those that equal it go to `level`."""
    for w in range(plane.shape[0]):
        candidates = plane[w] & free[w]
        above = np.uint64(0)
        equal = np.uint64(0)
        while candidates:
            j = _trailing_zeros(candidates)
            candidates &= candidates - _ONE
            p = np.int64(w * WORD) + np.int64(j)
            code = _magnitude_code(values[p], base[p], unit)
            above |= np.uint64(code > threshold) << j
            equal |= np.uint64(code == threshold) << j
        won[w] = above
        level[w] = equal


@compiled()
def gather(base, addresses, rows, planes, first_word, out):
    """out = the owner's value less the base's; task k owns the bits of planes[rows[k]]. Every element has one owner."""
    n = base.shape[0]
    for w in range((n + WORD - 1) // WORD):
        for k in range(addresses.shape[0]):
            if rows[k] >= 0:
                owned = planes[rows[k], first_word + w]
                if owned:
                    values = carray(_pointer(addresses[k]), n, base.dtype)
                    while owned:
                        p = np.int64(w * WORD) + np.int64(_trailing_zeros(owned))
                        owned &= owned - _ONE
                        out[p] = values[p] - base[p]


@compiled()
def largest(base, addresses, out, counts):
    """MAGMAX: out = the difference of largest magnitude, the later task's on a tie; counts[k] += what task k gave."""
    n = base.shape[0]
    owners = np.empty(BLOCK, np.int32)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        best = out[start : start + size]
        best[:] = 0
        owners[:] = 0
        for k in range(addresses.shape[0]):
            values = carray(_pointer(addresses[k]), n, base.dtype)[start : start + size]
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
def draw(base, addresses, tops, drum, first_element, out, counts):
    """Random mix: the first task whose top is not below the element's lottery number; the last top is 2**64 - 1."""
    n = base.shape[0]
    for p in range(n):
        number = _ticket(drum, first_element + np.uint64(p))
        k = 0
        while number > tops[k]:
            k += 1
        out[p] = carray(_pointer(addresses[k]), n, base.dtype)[p] - base[p]
        counts[k] += 1


@compiled()
def weighted_sum(base, addresses, factors, out):
    """out = the sum over tasks of factor * difference, in float64 and task order, rounded once."""
    n = base.shape[0]
    sums = np.empty(BLOCK, np.float64)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        sums[:] = 0.0
        for k in range(addresses.shape[0]):
            values = carray(_pointer(addresses[k]), n, base.dtype)[start : start + size]
            factor = factors[k]
            for j in range(size):
                sums[j] += factor * np.float64(values[j] - origin[j])
        for j in range(size):
            out[start + j] = sums[j]


@compiled()
def elect(base, addresses, factors, rows, planes, first_word, out):
    """TIES: the mean of the kept values (planes[rows[k]]) whose sign is that of their sum."""
    n = base.shape[0]
    for p in range(n):
        word = first_word + p // WORD
        bit = np.uint64(p % WORD)
        total = 0.0
        for k in range(addresses.shape[0]):
            if (planes[rows[k], word] >> bit) & _ONE:
                values = carray(_pointer(addresses[k]), n, base.dtype)
                total += factors[k] * np.float64(values[p] - base[p])
        agreed = 0.0
        votes = 0
        for k in range(addresses.shape[0]):
            if (planes[rows[k], word] >> bit) & _ONE:
                values = carray(_pointer(addresses[k]), n, base.dtype)
                value = factors[k] * np.float64(values[p] - base[p])
                if value * np.sign(total) > 0.0:
                    agreed += value
                    votes += 1
        out[p] = agreed / votes if votes else 0.0


@compiled()
def step(base, tau, scale, out):
    """out = base + scale * tau, each operation rounded. Returns whether every result is finite."""
    limit = np.finfo(base.dtype).max
    odd = np.uint8(0)
    for j in range(base.shape[0]):
        moved = scale * tau[j]
        value = base[j] + moved
        out[j] = value
        odd |= np.uint8(not abs(value) <= limit)
    return odd == 0
