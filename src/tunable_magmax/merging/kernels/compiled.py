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
    """numba's njit, kept on disk between runs where there is a place for it (a read-only install has none)."""

    def decorate(function):
        try:
            return njit(function, nogil=True, error_model="numpy", cache=True, **options)
        except RuntimeError:  # "cannot cache function": compile in every process instead
            return njit(function, nogil=True, error_model="numpy", **options)

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
def ticket(drum, element):
    """The lottery number of an element (rule 8)."""
    x = drum + _GOLDEN * (element + ONE)
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


@compiled()
def packed(octets, word):
    """64 bytes of 0 or 1, as eight integers from 8 * word on, as the bits of one word."""
    bits = np.uint64(0)
    for o in range(8):
        bits |= ((octets[word * 8 + o] * _GATHER_BITS) >> np.uint64(56)) << np.uint64(8 * o)
    return bits


@compiled()
def unpack(bits, octets, word):
    """The opposite: the bits of one word as 64 bytes of 0 or 1."""
    for o in range(8):
        # Eight copies of a byte, one bit of it left in each; adding 127 carries that bit, wherever it is, to the top.
        copies = ((bits >> np.uint64(8 * o)) & np.uint64(0xFF)) * _EIGHT_ONES
        octets[word * 8 + o] = (((copies & _DIAGONAL) + _SEVEN_BITS) >> np.uint64(7)) & _EIGHT_ONES
