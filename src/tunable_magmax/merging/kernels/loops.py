"""The CPU's inner loops, compiled by numba: over planes, then over the values of base and tasks.

All loops release the GIL, work on one chunk and touch each input value once, in blocks that stay in the L1 cache. A
*plane* is a bit set, one bit an element, in 64-bit words. Task values come as an array of addresses, so that one
compiled version serves every number of tasks. No loop may use fast-math or fused operations: every rounding
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
from numba import carray, config, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B

BLOCK = 1024
WORD = 64
_GOLDEN = np.uint64(GOLDEN)
_MIX_A = np.uint64(MIX_A)
_MIX_B = np.uint64(MIX_B)
ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
# Multiplying eight 0/1 bytes by this gathers them, first byte lowest, in the top byte of the product.
_GATHER_BITS = np.uint64(0x0102040810204080)


def _cache_folder() -> Path | None:
    """Returns where compiled loops are kept between runs; None if there is no such place that is the user's alone.

    What numba keeps is run as it is, so nobody else may write there.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        own = (Path(chosen) if chosen else Path.home() / ".cache") / "tunable-magmax"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError("others may read it or write to it: remove it, or run chmod 700")
        folder = own / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
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
def scan_keys(plane, free, won, first_word, tensors, lottery_state, window, found):
    """Draws a lottery number for each free candidate: below the window wins, inside it is kept for the threshold.

    The planes are slices of equal length that begin at a word of the whole; `tensors` are the first word and the first
    element index of each, in order. Returns (winners, undecided); undecided numbers and slots (bit positions in the
    slice) go to `found` as far as it has room: the caller makes more and calls again if `undecided` exceeds it.
    """
    starts, elements = tensors
    low, high = window
    keys, slots = found
    winners = 0
    undecided = 0
    tensor = 0
    for w in range(plane.shape[0]):
        while tensor + 1 < starts.shape[0] and starts[tensor + 1] <= first_word + w:
            tensor += 1
        first = elements[tensor] + np.uint64((first_word + w - starts[tensor]) * WORD)
        candidates = plane[w] & free[w]
        taken = np.uint64(0)
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


# -- values of base and tasks ------------------------------------------------------------------------------------------


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
                if rows[k] >= 0:
                    word = first_word + start // WORD
                    for w in range((size + WORD - 1) // WORD):
                        planes[rows[k], word + w] = packed(octets, w)
            else:
                for j in range(size):
                    peak = max(peak, pattern(abs(values[j] - origin[j])))
            changed[k] |= peak > 0
            suspect[k] |= peak > finite


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
def _drawn(element, attempt, most):
    """Whether an element is in a random sample, another one for every attempt, of the share (most + 1) / 2^32."""
    x = np.uint32((element + attempt) * np.uint32(0x9E3779B1))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x85EBCA6B))
    return x <= most


@compiled()
def _near(values, origin, limits, sample, first_element, near):
    """Marks elements of a block that a scan has to look at; returns how many are larger than all of these."""
    above, last = limits
    attempt, most = sample
    larger = 0
    for j in range(origin.shape[0]):
        magnitude = np.float64(abs(values[j] - origin[j]))
        drawn = _drawn(first_element + np.uint32(j), attempt, most)
        larger += magnitude > above
        near[j] = (magnitude <= above) & (magnitude >= last) & (magnitude > 0.0) & (drawn | (magnitude == above))
    return larger


@compiled()
def scan(base, values, above, last, sample, lottery, listed):
    """Returns how many elements a first cut (magnitude, key) keeps, and how many more of a sample a second one keeps.

    The latter go to `listed` [2, n] as far as it has room: the caller makes more and calls again.
    """
    lottery_state, first_element = lottery
    attempt, most = sample
    before = 0
    found = 0
    near = np.zeros(BLOCK, np.uint8)
    octets = near.view(np.uint64)
    for start in range(0, base.shape[0], BLOCK):
        origin = base[start : start + BLOCK]
        if origin.shape[0] < BLOCK:
            near[:] = 0
        block = values[start : start + BLOCK]
        first = np.uint32(first_element + np.uint64(start))
        before += _near(block, origin, (above[0], last[0]), sample, first, near)
        for w in range((origin.shape[0] + WORD - 1) // WORD):
            marked = packed(octets, w)
            while marked:
                j = np.int64(w * WORD) + np.int64(trailing_zeros(marked))
                marked &= marked - ONE
                magnitude = np.float64(abs(block[j] - origin[j]))
                number = ticket(lottery_state, first_element + np.uint64(start + j))
                drawn = _drawn(first + np.uint32(j), attempt, most)
                if magnitude == above[0] and number <= above[1]:
                    before += 1
                elif drawn and (magnitude > last[0] or number <= last[1]):
                    if found < listed.shape[1]:
                        listed[0, found] = np.uint64(pattern(magnitude))
                        listed[1, found] = number
                    found += 1
    return before, found


@compiled()
def _vote(values, origin, factor, least, ballots):
    equal = 0
    for j in range(origin.shape[0]):
        difference = np.float64(values[j] - origin[j])
        magnitude = abs(difference)
        ballot = factor * difference
        ballots[j] = ballot if magnitude >= least else 0.0
        equal += magnitude == least
    return equal


@compiled()
def _drop_by_key(values, origin, least, keys, first_element, ballots):
    """Takes back the votes of elements of the cut's magnitude with larger keys."""
    lottery_state, last = keys[0], keys[1]
    for j in range(origin.shape[0]):
        equal = np.float64(abs(values[j] - origin[j])) == least
        if equal and ticket(lottery_state, first_element + np.uint64(j)) > last:
            ballots[j] = 0.0


@compiled()
def _add(ballots, sums):
    for j in range(ballots.shape[0]):
        sums[j] += ballots[j]


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
def elect(base, addresses, weights, leasts, keys, first_element, out):
    """Writes the mean, by shares, of the kept values whose sign is that of their sum (TIES).

    A value is kept if its magnitude is above leasts[k], or equals it and its key is small enough; others count as 0.
    weights[k] are a factor and a share, keys[k] the state of the lottery and the largest key.
    A sum that begins at +0 is never -0, so adding one changes nothing. Those who agree are summed as if positive and
    the sign comes last: rounding is the same either side of 0. The small loops are functions of their own because LLVM
    makes vector code of them there, and not in one large function.
    """
    n = base.shape[0]
    tasks = addresses.shape[0]
    ballots = np.empty((tasks, BLOCK), np.float64)
    sums, signs = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    agreed, votes = np.empty(BLOCK, np.float64), np.empty(BLOCK, np.float64)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        origin = base[start : start + size]
        sums[:] = 0.0
        agreed[:] = 0.0
        votes[:] = 0.0
        for k in range(tasks):
            values = carray(pointer(addresses[k]), n, base.dtype)[start : start + size]
            if _vote(values, origin, weights[k, 0], leasts[k], ballots[k]) and keys[k, 1] < _ALL:
                _drop_by_key(values, origin, leasts[k], keys[k], first_element + np.uint64(start), ballots[k])
            _add(ballots[k, :size], sums)
        _signs(sums, signs)
        for k in range(tasks):
            _agree(ballots[k, :size], signs, weights[k, 1], agreed, votes)
        _mean(signs, agreed, votes, out[start : start + size])


@compiled()
def step(base, tau, scale, out):
    """Writes base + scale * tau, each operation rounded. Returns whether every result is finite."""
    limit = np.finfo(base.dtype).max
    nonfinite = np.uint8(0)
    for j in range(base.shape[0]):
        moved = scale * tau[j]
        value = base[j] + moved
        out[j] = value
        nonfinite |= np.uint8(not abs(value) <= limit)
    return nonfinite == 0


@compiled()
def add_product(left, right, scaling, out, start):
    """Adds scaling * (left @ right), flattened, to `out`, whose first element has the index `start` there.

    Each element is a sum of its own, over ranks in order: s = round(s + round(left[i, k] * right[k, j])) in float64,
    and out = round(out + round(scaling * s)), so that no cut into ranges shows.
    """
    rank, columns = right.shape
    sums = np.empty(columns, np.float64)
    done = 0
    while done < out.shape[0]:
        i = (start + done) // columns
        first = (start + done) - i * columns
        last = min(columns, first + out.shape[0] - done)
        sums[first:last] = 0.0
        k = 0
        while k + 4 <= rank:  # sums are loaded and stored less often
            f0, f1, f2, f3 = left[i, k], left[i, k + 1], left[i, k + 2], left[i, k + 3]
            r0, r1, r2, r3 = right[k], right[k + 1], right[k + 2], right[k + 3]
            for j in range(first, last):
                sums[j] = (((sums[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
            k += 4
        while k < rank:
            f0, r0 = left[i, k], right[k]
            for j in range(first, last):
                sums[j] += f0 * r0[j]
            k += 1
        for j in range(first, last):
            out[done + j - first] += out.dtype.type(scaling * sums[j])
        done += last - first
