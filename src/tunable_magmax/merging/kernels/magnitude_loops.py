"""Loops over the magnitudes of a task vector, as integer codes that order like them.

A code is the bit pattern of a non-negative float. `unit`, a 1 of float32 or float64, makes the codes of all tensors one
type. Where all 64 elements of a word are candidates, or most, their codes are computed together; else one by one.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import numpy as np

from tunable_magmax.merging.kernels.compiled import ONE, WORD, compiled, ones, packed, pattern, ticket, trailing_zeros

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
def _digits(values, origins, unit, shift, first, bins, digits):
    for j in range(WORD):
        digits[j] = _digit(_code(values[j], origins[j], unit), shift, first, bins)


@compiled()
def magnitude_histogram(plane, free, base, values, unit, shift, first, bins, histogram):
    """Count free candidates by (code >> shift) - first; who is outside of the `bins` goes to one more at their end.

    `shift`, `first` and `bins` are integers of the codes' type: in 32 bits, twice as many fit in a vector.
    """
    digits = np.empty(WORD, np.uint32)
    for w in range(plane.shape[0]):
        candidates = plane[w] & free[w]
        start = w * WORD
        if candidates == _ALL:
            _digits(values[start : start + WORD], base[start : start + WORD], unit, shift, first, bins, digits)
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
def magnitude_cut(plane, free, base, values, unit, low, high, won, level):
    """Free candidates whose code is above `high` win; those with a code from `low` to `high` go to `level`."""
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
def magnitude_list(plane, base, values, unit, first_element, drum, codes, numbers, places):
    """The code, the lottery number and the place of each element in a plane."""
    found = 0
    for w in range(plane.shape[0]):
        listed = plane[w]
        while listed:
            p = np.uint64(w * WORD) + trailing_zeros(listed)
            listed &= listed - ONE
            codes[found] = _code(values[p], base[p], unit)
            numbers[found] = ticket(drum, first_element + p)
            places[found] = p
            found += 1
