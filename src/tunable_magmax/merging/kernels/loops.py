"""How the CPU's inner loops are compiled by numba, and the few operations that numba lacks.

All loops release the GIL, work on one chunk and touch each input value once, in blocks that stay in the L1 cache. A
*plane* is a bit set, one bit an element, in 64-bit words. No loop may use fast-math or fused operations: every rounding
is part of the specification (docs/method.md). Only sums of squares may reorder their additions.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, check-untyped-defs=False

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit, types
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


def _cache_folder() -> Path | None:
    """Returns where compiled loops are kept between runs; None if there is no such place that is the user's alone.

    What numba keeps is run as it is, so nobody else may write there. Numba compares the file of a loop alone with what
    it has kept; the digest in the name stands for the loops that it calls.
    """
    sources = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("loops.py", "value_loops.py"))
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        own = (Path(chosen) if chosen else Path.home() / ".cache") / "tunable-magmax"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError("others may read it or write to it: remove it, or run chmod 700")
        folder = own / hashlib.sha256(sources).hexdigest()[:16]
        folder.mkdir(mode=0o700, exist_ok=True)
        _keep_intact(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        text = "note: compiled loops can't be kept, so that every run compiles them again: %s"
        logging.getLogger(__name__).warning(text, error)
        return None
    return folder


def _keep_intact(folder: Path) -> None:
    """Removes files that are not as they were at the end of a run, so that their loops are compiled again."""
    listed = folder / "sha256.json"
    try:
        known = dict(json.loads(listed.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    for name, digest in _digests(folder).items():
        if known.get(name) != digest:
            (folder / name).unlink(missing_ok=True)  # another run may have done so

    def write() -> None:
        with suppress(OSError):  # compiled again, next time
            if (found := _digests(folder)) != known:
                mine = listed.with_suffix(f".{os.getpid()}")
                mine.write_text(json.dumps(found), encoding="ascii")
                mine.replace(listed)

    atexit.register(write)


def _digests(folder: Path) -> dict[str, str]:
    """Returns the digest of each file that numba keeps."""
    return {
        str(kept.relative_to(folder)): hashlib.sha256(kept.read_bytes()).hexdigest() for kept in folder.rglob("*.nb?")
    }


_FOLDER = _cache_folder()


def compiled(**options: Any):
    """Compiles by numba, without fused operations; keeps the result on disk between runs."""

    def decorate(function):
        before = config.CACHE_DIR
        try:
            if _FOLDER is not None:
                config.CACHE_DIR = str(_FOLDER)  # read once, when the cache of a function is made
            return njit(function, nogil=True, error_model="numpy", cache=_FOLDER is not None, **options)
        finally:
            config.CACHE_DIR = before

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
    """Returns the lottery number of an element (docs/method.md, section 4)."""
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
def count_common(plane, free):
    """Returns how many bits two planes have in common."""
    count = 0
    for w in range(plane.shape[0]):
        count += ones(plane[w] & free[w])
    return count


@compiled()
def subtract_bits(plane, other):
    """Clears in a plane the bits of another one."""
    for w in range(plane.shape[0]):
        plane[w] &= ~other[w]


@compiled()
def scan_keys(plane, free, won, runs, lottery_state, window, found):
    """Draws a lottery number for each free candidate: below the window wins, inside it is kept for the threshold.

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
def set_slots(plane, slots):
    """Sets the bits at the given slots."""
    for i in range(slots.shape[0]):
        plane[slots[i] >> np.uint64(6)] |= ONE << (slots[i] & np.uint64(63))
