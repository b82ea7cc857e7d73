"""The Triton programs of a GPU: the operations that read all tasks at once, and the search over keys.

One launch reads base and tasks once. Programs are compiled without fused multiply-adds, so the bits are those of the
loops of the CPU.
"""

# Triton reads the annotations of its programs, so they can't be strings: no `from __future__ import annotations`.
import triton
import triton.language as tl

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B

BLOCK = 2048
"""Elements that one program works on."""
COMPILED = {"num_warps": 8, "enable_fp_fusion": False}
"""How programs are compiled."""


def signed(value: int) -> int:
    """Returns the signed integer with the 64-bit pattern of an unsigned one, as int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX_A, _MIX_B = (tl.constexpr(signed(number)) for number in (GOLDEN, MIX_A, MIX_B))


@triton.jit
def _locate(table, columns, tensors, BLOCK: tl.constexpr):
    """Returns which tensor of a `Table` this program works on, the rest of its row, the offsets there, and which it
    has."""
    block = tl.program_id(0)
    number = tl.load(table + tensors * columns + block)
    row = table + number * columns
    offsets = (block - tl.load(row + 1)) * BLOCK + tl.arange(0, BLOCK)
    return number, row + 2, offsets, offsets < tl.load(row)


@triton.jit
def _load(address, like, offsets, inside):
    """Loads values of the type that the pointer `like` has; `address` is where the number of their address is."""
    return tl.load(tl.load(address).to(like.dtype) + offsets, mask=inside, other=0.0)


@triton.jit
def _tickets(elements, lottery_state):
    """Lottery numbers (docs/method.md, section 4) as unsigned integers."""
    x = ((elements + 1) * _GOLDEN + lottery_state).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * tl.full((), _MIX_A, tl.int64).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_B, tl.int64).to(tl.uint64, bitcast=True)
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["columns", "tensors"])
def survey(table, columns, tensors, tasks, planes, row_slots, flags, squares, like, BLOCK: tl.constexpr):
    # A row: slot, base, then for each task its address, whether it is compared, and the row for its candidates.
    number, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    slots, marks = tl.load(row) + offsets, flags + 2 * tasks * number
    start = _load(row + 1, like, offsets, inside)
    largest, difference = tl.zeros_like(start), tl.zeros_like(start)
    for task in range(tasks):
        difference = _load(row + 2 + 3 * task, like, offsets, inside) - start
        magnitude = tl.abs(difference)
        # NaN, too, is not less than infinity.
        found = tl.max(tl.where(magnitude < float("inf"), (magnitude != 0.0).to(tl.int32), 2))
        if found > 0:
            tl.store(marks + 2 * task, 1)
        if found > 1:
            tl.store(marks + 2 * task + 1, 1)
        if tl.load(row + 3 + 3 * task) != 0:
            plane = tl.load(row + 4 + 3 * task)
            if plane >= 0:
                candidate = (magnitude >= largest).to(tl.int8)
                tl.store(planes + plane * row_slots + slots, candidate, mask=inside)
            largest = tl.maximum(largest, magnitude)
    wide = difference.to(tl.float64)
    tl.atomic_add(squares + number, tl.sum(wide * wide))


@triton.jit(do_not_specialize=["columns", "tensors"])
def count_common(table, columns, tensors, plane, other, counts, BLOCK: tl.constexpr):
    _, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    slots = tl.load(row) + offsets
    common = tl.load(plane + slots, mask=inside, other=0) & tl.load(other + slots, mask=inside, other=0)
    tl.atomic_add(counts + tl.load(row + 1), tl.sum(common.to(tl.int32)).to(tl.int64))


@triton.jit(do_not_specialize=["columns", "tensors", "room"])
def scan_keys(table, columns, tensors, plane, free, won, windows, counts, found, room, BLOCK: tl.constexpr):
    _, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    slots, group = tl.load(row) + offsets, tl.load(row + 1)
    candidate = (tl.load(plane + slots, mask=inside, other=0) & tl.load(free + slots, mask=inside, other=0)) != 0
    window = windows + 4 * group  # the lottery's state, lowest and highest key, whether all candidates win
    low = tl.load(window + 1).to(tl.uint64, bitcast=True)
    high = tl.load(window + 2).to(tl.uint64, bitcast=True)
    numbers = _tickets(tl.load(row + 2) + offsets, tl.load(window))
    below = candidate & ((numbers < low) | (tl.load(window + 3) != 0))
    tl.store(won + slots, below.to(tl.int8), mask=inside)
    tl.atomic_add(counts + 1 + 2 * group, tl.sum(below.to(tl.int32)).to(tl.int64))
    listed = (candidate & (~below) & (numbers <= high)).to(tl.int32)
    more = tl.sum(listed).to(tl.int64)
    if more > 0:
        tl.atomic_add(counts + 2 + 2 * group, more)
        place = tl.atomic_add(counts, more) + tl.cumsum(listed, 0) - 1
        fits = (listed != 0) & (place < room)
        tl.store(found + place, numbers.to(tl.int64, bitcast=True), mask=fits)
        tl.store(found + room + place, slots, mask=fits)
        tl.store(found + 2 * room + place, tl.zeros_like(slots) + group, mask=fits)


@triton.jit(do_not_specialize=["columns", "tensors"])
def gather(table, columns, tensors, tasks, planes, row_slots, counts, like, BLOCK: tl.constexpr):
    # A row: slot, base, where to write, then for each task its address and the row of what it owns.
    number, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    slots = tl.load(row) + offsets
    start = _load(row + 1, like, offsets, inside)
    merged = tl.zeros_like(start)
    for task in range(tasks):
        plane = tl.load(row + 4 + 2 * task)
        if plane >= 0:
            owned = tl.load(planes + plane * row_slots + slots, mask=inside, other=0) != 0
            merged = tl.where(owned, _load(row + 3 + 2 * task, like, offsets, owned) - start, merged)
            tl.atomic_add(counts + tasks * number + task, tl.sum(owned.to(tl.int32)).to(tl.int64))
    tl.store(tl.load(row + 2).to(like.dtype) + offsets, merged, mask=inside)


@triton.jit
def largest(base, addresses, tasks, size, out, counts, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    merged = tl.zeros_like(start)
    owner = tl.zeros_like(offsets)
    for task in range(tasks):
        difference = _load(addresses + task, base, offsets, inside) - start
        reached = tl.abs(difference) >= tl.abs(merged)
        merged = tl.where(reached, difference, merged)
        owner = tl.where(reached, task, owner)
    for task in range(tasks):
        tl.atomic_add(counts + task, tl.sum((inside & (owner == task)).to(tl.int64)))
    tl.store(out + offsets, merged, mask=inside)


@triton.jit
def weighted_sum(base, addresses, factors, tasks, size, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for task in range(tasks):
        difference = _load(addresses + task, base, offsets, inside) - start
        total += difference.to(tl.float64) * tl.load(factors + task)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["columns", "tensors"])
def squares(table, columns, tensors, sums, like, BLOCK: tl.constexpr):
    number, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    wide = _load(row, like, offsets, inside).to(tl.float64)
    tl.atomic_add(sums + number, tl.sum(wide * wide))


@triton.jit(do_not_specialize=["columns", "tensors"])
def step(table, columns, tensors, scale, flags, like, BLOCK: tl.constexpr):
    # A row: base, vector, where to write.
    number, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    moved = _load(row + 1, like, offsets, inside) * tl.load(scale)
    result = _load(row, like, offsets, inside) + moved
    tl.store(tl.load(row + 2).to(like.dtype) + offsets, result, mask=inside)
    if tl.min((tl.abs(result) < float("inf")).to(tl.int32)) == 0:
        tl.store(flags + number, 1)
