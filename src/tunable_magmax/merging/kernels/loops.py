"""How the CPU's inner loops are compiled by numba, and the few operations that numba lacks.

All loops release the GIL, work on one chunk and touch each input value once, in blocks that stay in the L1 cache. A
*plane* is a bit set, one bit an element, in 64-bit words. No loop may use fast-math or fused operations: every rounding
is part of the specification (docs/method.md). Only sums of squares may reorder their additions.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B
from tunable_magmax.merging.kernels.loop_cache import LoopCache

BLOCK = 1024
WORD = 64
_GOLDEN = np.uint64(GOLDEN)
_MIX_A = np.uint64(MIX_A)
_MIX_B = np.uint64(MIX_B)
ONE = np.uint64(1)
# Multiplying eight 0/1 bytes by this gathers them, first byte lowest, in the top byte of the product.
_GATHER_BITS = np.uint64(0x0102040810204080)
_EIGHT_ONES = np.uint64(0x0101010101010101)
_DIAGONAL = np.uint64(0x8040201008040201)
_SEVEN_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)


def compiled(**options: Any):
    """numba's njit, kept on disk between runs."""

    def decorate(function):
        dispatcher = njit(function, nogil=True, error_model="numpy", **options)
        dispatcher._cache = LoopCache(function)  # in place of numba's own, which runs whatever it finds
        return dispatcher

    return decorate


@intrinsic
def pointer(typing_context, address):  # an integer address as a pointer that carray accepts
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def trailing_zeros(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], cgutils.true_bit)

    return types.uint64(types.uint64), generate


@intrinsic
def ones(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def pattern(typing_context, value):  # the bits of a float as a signed integer of its width
    width = types.int32 if value == types.float32 else types.int64

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(width))

    return width(value), generate


@compiled()
def ticket(lottery_state, element):
    """Returns the lottery number of an element (rule 8)."""
    x = lottery_state + _GOLDEN * (element + ONE)
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


@compiled()
def packed(octets, word):
    """Packs 64 bytes of 0 or 1, in eight integers from 8 * word on, into the bits of one word."""
    bits = np.uint64(0)
    for o in range(8):
        bits |= ((octets[word * 8 + o] * _GATHER_BITS) >> np.uint64(56)) << np.uint64(8 * o)
    return bits


@compiled()
def unpack(bits, octets, word):
    """Does the opposite: spreads the bits of one word over 64 bytes of 0 or 1."""
    for o in range(8):
        # Eight copies of a byte, one bit of it left in each; adding 127 carries that bit, wherever it is, to the top.
        copies = ((bits >> np.uint64(8 * o)) & np.uint64(0xFF)) * _EIGHT_ONES
        octets[word * 8 + o] = (((copies & _DIAGONAL) + _SEVEN_BITS) >> np.uint64(7)) & _EIGHT_ONES


@compiled()
def tally(plane, free):
    """Returns how many bits two planes have in common."""
    count = 0
    for w in range(plane.shape[0]):
        count += ones(plane[w] & free[w])
    return count


@compiled()
def retire(free, won):
    """Takes the winners out of the free elements."""
    for w in range(free.shape[0]):
        free[w] &= ~won[w]


@compiled()
def split(plane, free, won, runs, lottery_state, window, found):
    """Draws a lottery number for each free candidate: below the window wins, inside it is kept for a closer look.

    The planes are slices of equal length; run r covers words starts[r]:stops[r] of them and its first element has
    index elements[r]. Returns (winners, undecided); undecided numbers and slots (bit positions in the slice) go to
    `found` as far as it has room: the caller makes more and calls again if `undecided` exceeds it.
    """
    starts, stops, elements = runs
    low, high = window
    keys, slots = found
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
                number = ticket(lottery_state, first + j)
                wins = number < low
                taken |= np.uint64(wins) << j  # no branch: a coin toss cannot be predicted
                if number - low <= high - low:
                    if undecided < keys.shape[0]:
                        keys[undecided] = number
                        slots[undecided] = np.uint64(w * WORD) + j
                    undecided += 1
            won[w] = taken
            winners += ones(taken)
    return winners, undecided


@compiled()
def award(won, slots):
    """Sets the bits at the given slots."""
    for i in range(slots.shape[0]):
        won[slots[i] >> np.uint64(6)] |= ONE << (slots[i] & np.uint64(63))


_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_MANY = 16
"""Candidates of a word from which on comparing all 64 elements is quicker."""


@compiled()
def _code(value, origin, unit):
    return pattern(abs(value - origin) * unit)


@compiled()
def _digit(code, shift, first, bins):
    digit = (code >> shift) - first
    return np.uint32(digit if (digit >= 0) & (digit < bins) else bins)


@compiled()
def _digits(values, origins, unit, digit, digits):
    shift, first, bins = digit
    for j in range(WORD):
        digits[j] = _digit(_code(values[j], origins[j], unit), shift, first, bins)


@compiled()
def magnitude_histogram(plane, free, base, values, unit, digit, histogram):
    """Counts free candidates by (code >> shift) - first; those outside of the `bins` go to one more at their end.

    `digit` is (shift, first, bins), integers of the codes' type: in 32 bits, twice as many fit in a vector.
    """
    shift, first, bins = digit
    digits = np.empty(WORD, np.uint32)
    for w in range(plane.shape[0]):
        candidates = plane[w] & free[w]
        start = w * WORD
        if candidates == _ALL:
            _digits(values[start : start + WORD], base[start : start + WORD], unit, digit, digits)
            for j in range(WORD):
                histogram[digits[j]] += 1
        else:
            while candidates:
                p = np.int64(start) + np.int64(trailing_zeros(candidates))
                candidates &= candidates - ONE
                histogram[_digit(_code(values[p], base[p], unit), shift, first, bins)] += 1


@compiled()
def _compare(values, origins, unit, low, high, above, within):
    for j in range(WORD):
        code = _code(values[j], origins[j], unit)
        above[j] = code > high
        within[j] = (code >= low) & (code <= high)


@compiled()
def magnitude_cut(plane, free, base, values, unit, limits, won, level):
    """Free candidates whose code is above the limits (low, high) win; those with a code between them go to `level`."""
    low, high = limits
    above, within = np.empty(WORD, np.uint8), np.empty(WORD, np.uint8)
    above_octets, within_octets = above.view(np.uint64), within.view(np.uint64)
    for w in range(plane.shape[0]):
        candidates = plane[w] & free[w]
        start = w * WORD
        winners = np.uint64(0)
        undecided = np.uint64(0)
        if ones(candidates) >= _MANY and start + WORD <= base.shape[0]:
            _compare(values[start : start + WORD], base[start : start + WORD], unit, low, high, above, within)
            winners = packed(above_octets, 0) & candidates
            undecided = packed(within_octets, 0) & candidates
        else:
            while candidates:
                j = trailing_zeros(candidates)
                candidates &= candidates - ONE
                p = np.int64(start) + np.int64(j)
                code = _code(values[p], base[p], unit)
                winners |= np.uint64(code > high) << j
                undecided |= np.uint64((code >= low) & (code <= high)) << j
        won[w] = winners
        level[w] = undecided


@compiled()
def magnitude_list(plane, base, values, unit, first_element, lottery_state, into):
    """Writes the code, the lottery number and the slot of each element in a plane to three arrays."""
    codes, numbers, slots = into
    found = 0
    for w in range(plane.shape[0]):
        listed = plane[w]
        while listed:
            p = np.uint64(w * WORD) + trailing_zeros(listed)
            listed &= listed - ONE
            codes[found] = _code(values[p], base[p], unit)
            numbers[found] = ticket(lottery_state, first_element + p)
            slots[found] = p
            found += 1
