"""The operations that read all tasks at once, and the search over keys, as Triton programs for a GPU.

One launch reads base and tasks once. What is left, such as the trimming of TIES, are the torch operations of
`TorchKernels`. Programs are compiled without fused multiply-adds, so the bits are those of the other backends.
"""

# Triton reads the annotations of its programs, so they can't be strings: no `from __future__ import annotations`.
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B
from tunable_magmax.merging.kernels import SLOTS, Chunk, Counts, Keys, Planes, Runs
from tunable_magmax.merging.kernels.torch_ops import TensorPlanes, TorchKernels, signed

BLOCK = 2048
"""Elements that one program works on; a multiple of `SLOTS`."""
ROOM = 1 << 18
"""Keys that one scan can list; a scan that finds more is made again with enough room."""
COMPILED = {"num_warps": 8, "enable_fp_fusion": False}
"""How programs are compiled."""

_GOLDEN, _MIX_A, _MIX_B = (tl.constexpr(signed(number)) for number in (GOLDEN, MIX_A, MIX_B))
_SLOTS = tl.constexpr(SLOTS)


@triton.jit
def _values(addresses, task, like, offsets, inside):
    """Loads a task's values; `addresses` holds where each task begins, `like` is a pointer of the values' type."""
    start = tl.load(addresses + task).to(like.dtype)
    return tl.load(start + offsets, mask=inside, other=0.0)


@triton.jit
def _tickets(elements, lottery_state):
    """Lottery numbers (docs/method.md, section 4) as unsigned integers."""
    x = ((elements + 1) * _GOLDEN + lottery_state).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * tl.full((), _MIX_A, tl.int64).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_B, tl.int64).to(tl.uint64, bitcast=True)
    return x ^ (x >> 31)


@triton.jit
def _survey(base, addresses, compared, rows, tasks, planes, row_slots, slot, size, flags, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    largest = tl.zeros_like(start)
    for task in range(tasks):
        magnitude = tl.abs(_values(addresses, task, base, offsets, inside) - start)
        if tl.max((magnitude != 0.0).to(tl.int32)) > 0:
            tl.store(flags + 2 * task, 1)
        if tl.min((magnitude < float("inf")).to(tl.int32)) == 0:  # NaN, too, is not less
            tl.store(flags + 2 * task + 1, 1)
        if tl.load(compared + task) != 0:
            row = tl.load(rows + task)
            if row >= 0:
                candidate = (magnitude >= largest).to(tl.int8)
                tl.store(planes + row * row_slots + slot + offsets, candidate, mask=inside)
            largest = tl.maximum(largest, magnitude)


@triton.jit(do_not_specialize=["lottery_state", "low", "high"])
def _scan_keys(plane, free, won, steps, lottery_state, low, high, size, counts, keys, slots, room, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    candidate = (tl.load(plane + offsets, mask=inside, other=0) & tl.load(free + offsets, mask=inside, other=0)) != 0
    step = tl.load(steps + offsets // _SLOTS, mask=inside, other=0)
    numbers = _tickets(offsets + step, lottery_state.to(tl.int64))
    below = candidate & (numbers < low.to(tl.int64).to(tl.uint64, bitcast=True))
    tl.store(won + offsets, below.to(tl.int8), mask=inside)
    tl.atomic_add(counts, tl.sum(below.to(tl.int64)))
    listed = candidate & (~below) & (numbers <= high.to(tl.int64).to(tl.uint64, bitcast=True))
    more = tl.sum(listed.to(tl.int64))
    if more > 0:
        place = tl.atomic_add(counts + 1, more) + tl.cumsum(listed.to(tl.int64), 0) - 1
        fits = listed & (place < room)
        tl.store(keys + place, numbers.to(tl.int64, bitcast=True), mask=fits)
        tl.store(slots + place, offsets, mask=fits)


@triton.jit
def _count_common(plane, other, size, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    common = tl.load(plane + offsets, mask=inside, other=0) & tl.load(other + offsets, mask=inside, other=0)
    tl.atomic_add(count, tl.sum(common.to(tl.int64)))


@triton.jit
def _gather(base, addresses, rows, tasks, planes, row_slots, slot, size, out, counts, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    merged = tl.zeros_like(start)
    for task in range(tasks):
        row = tl.load(rows + task)
        if row >= 0:
            owned = tl.load(planes + row * row_slots + slot + offsets, mask=inside, other=0) != 0
            merged = tl.where(owned, _values(addresses, task, base, offsets, owned) - start, merged)
            tl.atomic_add(counts + task, tl.sum(owned.to(tl.int64)))
    tl.store(out + offsets, merged, mask=inside)


@triton.jit
def _largest(base, addresses, tasks, size, out, counts, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    merged = tl.zeros_like(start)
    owner = tl.zeros_like(offsets)
    for task in range(tasks):
        difference = _values(addresses, task, base, offsets, inside) - start
        reached = tl.abs(difference) >= tl.abs(merged)
        merged = tl.where(reached, difference, merged)
        owner = tl.where(reached, task, owner)
    for task in range(tasks):
        tl.atomic_add(counts + task, tl.sum((inside & (owner == task)).to(tl.int64)))
    tl.store(out + offsets, merged, mask=inside)


@triton.jit
def _weighted_sum(base, addresses, factors, tasks, size, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for task in range(tasks):
        difference = _values(addresses, task, base, offsets, inside) - start
        total += difference.to(tl.float64) * tl.load(factors + task)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _squares(values, base, size, sums, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    difference = tl.load(values + offsets, mask=inside, other=0.0)
    if base is not None:
        difference -= tl.load(base + offsets, mask=inside, other=0.0)
    wide = difference.to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide))


@triton.jit
def _step(base, tau, scale, size, out, flag, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    moved = tl.load(tau + offsets, mask=inside, other=0.0) * tl.load(scale)
    result = tl.load(base + offsets, mask=inside, other=0.0) + moved
    tl.store(out + offsets, result, mask=inside)
    if tl.min((tl.abs(result) < float("inf")).to(tl.int32)) == 0:
        tl.store(flag, 1)


class TritonKernels(TorchKernels):
    """`Kernels` for an NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._table = lru_cache(maxsize=1 << 12)(self._make_table)

    def _make_table(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def _addresses(self, tasks: Sequence[Tensor]) -> Tensor:
        return self._integers([values.data_ptr() for values in tasks])

    def _integers(self, numbers: Sequence[int]) -> Tensor:
        return self._table(tuple(numbers), torch.int64)

    def _launch(self, program: Any, size: int, *arguments: Any) -> None:
        """Starts a program on so many elements."""
        if size:
            with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
                program[(triton.cdiv(size, BLOCK),)](*arguments, BLOCK=BLOCK, **COMPILED)

    def _counts(self, tasks: int) -> Tensor:
        return torch.zeros(tasks, dtype=torch.int64, device=self.device)

    def survey(
        self, chunk: Chunk, compared: Sequence[bool], rows: Sequence[int], planes: Planes | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        size, tasks = chunk.base.numel(), len(chunk.tasks)
        flags = torch.zeros((tasks, 2), dtype=torch.int32, device=self.device)
        bits = _bits(planes) if planes is not None else flags  # never written: no row is named
        marks = self._integers([int(each) for each in compared]), self._integers(rows), tasks
        self._launch(
            *(_survey, size, chunk.base, self._addresses(chunk.tasks), *marks),
            *(bits, bits.stride(0), chunk.slot, size, flags),
        )
        changed, suspect = flags.bool().cpu().numpy().T
        return changed, suspect

    def count_common(self, plane: Tensor, other: Tensor) -> int:
        count = self._counts(1)
        self._launch(_count_common, plane.numel(), plane.view(torch.int8), other.view(torch.int8), plane.numel(), count)
        return int(count)

    def scan_keys(
        self, plane: Tensor, free: Tensor, won: Tensor, runs: Runs, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys, NDArray[np.uint64]]:
        # What to add to a slot to have its element index: one number for each group of `SLOTS`, as no run shares one.
        shift = torch.from_numpy(runs.elements.astype(np.int64) - runs.starts).to(self.device)
        groups = torch.from_numpy((runs.stops - runs.starts) // SLOTS).to(self.device)
        steps = torch.repeat_interleave(shift, groups)
        numbers, room, size = [signed(number) for number in (lottery_state, low, high)], ROOM, plane.numel()
        while True:
            counts = self._counts(2)
            keys, slots = (torch.empty(room, dtype=torch.int64, device=self.device) for _ in range(2))
            planes = [each.view(torch.int8) for each in (plane, free, won)]
            self._launch(_scan_keys, size, *planes, steps, *numbers, size, counts, keys, slots, room)
            below, listed = counts.tolist()
            if listed <= room:
                return below, *(each[:listed].cpu().numpy().view(np.uint64) for each in (keys, slots))
            room = listed

    def gather(self, chunk: Chunk, rows: Sequence[int], planes: Planes, out: Tensor) -> Counts:
        size, counts, bits = chunk.base.numel(), self._counts(len(rows)), _bits(planes)
        self._launch(
            *(_gather, size, chunk.base, self._addresses(chunk.tasks), self._integers(rows), len(rows)),
            *(bits, bits.stride(0), chunk.slot, size, out, counts),
        )
        return counts.cpu().numpy()

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        size, tasks, counts = chunk.base.numel(), len(chunk.tasks), self._counts(len(chunk.tasks))
        self._launch(_largest, size, chunk.base, self._addresses(chunk.tasks), tasks, size, out, counts)
        return counts.cpu().numpy()

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        addresses = self._addresses([chunk.tasks[t] for t in tasks])
        table, size = self._table(tuple(factors), torch.float64), chunk.base.numel()
        self._launch(_weighted_sum, size, chunk.base, addresses, table, len(tasks), size, out)

    def square(self, vector: Tensor) -> float:
        return self._sum_squares(vector, None)

    def squared_distance(self, values: Tensor, base: Tensor) -> float:
        return self._sum_squares(values, base)

    def _sum_squares(self, values: Tensor, base: Tensor | None) -> float:
        sums = torch.zeros(triton.cdiv(values.numel(), BLOCK), dtype=torch.float64, device=self.device)
        self._launch(_squares, values.numel(), values, base, values.numel(), sums)
        return float(sums.sum())

    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool:
        flag, factor = self._counts(1), self._table((scale,), base.dtype)
        self._launch(_step, base.numel(), base, tau, factor, base.numel(), out, flag)
        return not bool(flag)


def _bits(planes: Planes) -> Tensor:
    assert isinstance(planes, TensorPlanes)
    return planes.bits.view(torch.int8)
