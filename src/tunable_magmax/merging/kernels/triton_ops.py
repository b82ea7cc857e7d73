"""The operations that read all tasks at once, and the search over keys, as Triton programs for a GPU.

One launch reads base and tasks once. What is left, such as the trimming of TIES, are the torch operations of
`TorchKernels`. Programs are compiled without fused multiply-adds, so the bits are those of the other backends.
"""

# Triton reads the annotations of its programs, so they can't be strings: no `from __future__ import annotations`.
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import sqrt
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B
from tunable_magmax.merging.kernels import Chunk, Counts, Each, Owners, PlaneRows, Planes, TensorPlace
from tunable_magmax.merging.kernels.torch_ops import TOP_BIT, TensorPlanes, TorchKernels, signed
from tunable_magmax.merging.owners import Ints, Step, ThreeRows, assign_owners, windows

BLOCK = 2048
"""Elements that one program works on."""
COMPILED = {"num_warps": 8, "enable_fp_fusion": False}
"""How programs are compiled."""

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
def _survey(table, columns, tensors, tasks, planes, row_slots, flags, squares, like, BLOCK: tl.constexpr):
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
def _count_common(table, columns, tensors, plane, other, counts, BLOCK: tl.constexpr):
    _, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    slots = tl.load(row) + offsets
    common = tl.load(plane + slots, mask=inside, other=0) & tl.load(other + slots, mask=inside, other=0)
    tl.atomic_add(counts + tl.load(row + 1), tl.sum(common.to(tl.int32)).to(tl.int64))


@triton.jit(do_not_specialize=["columns", "tensors", "room"])
def _scan_keys(table, columns, tensors, plane, free, won, windows, counts, found, room, BLOCK: tl.constexpr):
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
def _gather(table, columns, tensors, tasks, planes, row_slots, counts, like, BLOCK: tl.constexpr):
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
def _largest(base, addresses, tasks, size, out, counts, BLOCK: tl.constexpr):
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
def _weighted_sum(base, addresses, factors, tasks, size, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    start = tl.load(base + offsets, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for task in range(tasks):
        difference = _load(addresses + task, base, offsets, inside) - start
        total += difference.to(tl.float64) * tl.load(factors + task)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["columns", "tensors"])
def _squares(table, columns, tensors, sums, like, BLOCK: tl.constexpr):
    number, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    wide = _load(row, like, offsets, inside).to(tl.float64)
    tl.atomic_add(sums + number, tl.sum(wide * wide))


@triton.jit(do_not_specialize=["columns", "tensors"])
def _step(table, columns, tensors, scale, flags, like, BLOCK: tl.constexpr):
    # A row: base, vector, where to write.
    number, row, offsets, inside = _locate(table, columns, tensors, BLOCK)
    moved = _load(row + 1, like, offsets, inside) * tl.load(scale)
    result = _load(row, like, offsets, inside) + moved
    tl.store(tl.load(row + 2).to(like.dtype) + offsets, result, mask=inside)
    if tl.min((tl.abs(result) < float("inf")).to(tl.int32)) == 0:
        tl.store(flags + number, 1)


@dataclass(frozen=True)
class Table:
    """What programs look up of many tensors: rows of (size, first block, ...), then each block's row number."""

    numbers: Tensor
    columns: int
    tensors: int
    blocks: int

    @property
    def arguments(self) -> tuple[Tensor, int, int]:
        return self.numbers, self.columns, self.tensors


@dataclass(frozen=True)
class _Groups:
    """The search over keys, in many groups of tensors at once. Arrays have a number for each group."""

    kernels: "TritonKernels"
    bits: Tensor
    table: Table
    count: int

    def count_common(self, row: int, other: int) -> Ints:
        counts = self.kernels.zeros(self.count)
        planes = (self.bits[each].view(torch.int8) for each in (row, other))
        self.kernels.launch(_count_common, self.table.blocks, *self.table.arguments, *planes, counts)
        return counts.cpu().numpy()

    def fill(self, row: int) -> None:
        self.bits[row] = True

    def subtract(self, row: int, other: int) -> None:
        torch.gt(self.bits[row], self.bits[other], out=self.bits[row])

    def unite(self, row: int, other: int) -> None:
        self.bits[row] |= self.bits[other]

    def choose(self, step: Step, rows: ThreeRows, n: Ints, candidates: Ints, state: int) -> None:
        """Puts n of each group's elements that two rows share into a third: those with the smallest keys."""
        row, free, chosen = (self.bits[row] for row in rows)
        if (n >= candidates).all():
            torch.logical_and(row, free, out=chosen)
        else:
            wider = [iter(windows(*each)) for each in zip(n.tolist(), np.maximum(candidates, 1).tolist(), strict=True)]
            while not self._choose_inside((row, free, chosen), n, candidates, state, [next(each) for each in wider]):
                pass

    def _choose_inside(
        self, planes: Sequence[Tensor], n: Ints, candidates: Ints, state: int, inside: Sequence[tuple[int, int]]
    ) -> bool:
        """Chooses with windows of keys, whose keys are listed; returns whether all that are wanted were there."""
        expected = sum(c * (high - low) / 2**64 for c, (low, high) in zip(candidates.tolist(), inside, strict=True))
        room = int(expected + 8 * sqrt(expected)) + 64
        rows = [
            (signed(state), signed(low), signed(high), everything)
            for (low, high), everything in zip(inside, (n >= candidates).tolist(), strict=True)
        ]
        numbers = self.kernels.numbers(rows)
        while True:
            counts, listed = self.kernels.zeros(1 + 2 * self.count), self.kernels.empty(3 * room, torch.int64)
            found = (numbers, counts, listed, room)
            bits = (plane.view(torch.int8) for plane in planes)
            self.kernels.launch(_scan_keys, self.table.blocks, *self.table.arguments, *bits, *found)
            total, *pairs = counts.tolist()
            if total <= room:
                break
            room = total
        below, held = np.array(pairs, np.int64).reshape(-1, 2).T
        if ((n < below) | (n > below + held)).any():
            return False
        keys, slots, groups = listed.view(3, room)[:, :total]
        order = (keys ^ TOP_BIT).argsort()
        order = order[groups[order].argsort(stable=True)]
        # Ordered by group and key, those below each group's own place have won.
        last = self.kernels.numbers([held.cumsum() - held + n - below])[0]
        planes[2].scatter_(0, slots[order], torch.arange(total, device=self.bits.device) < last[groups[order]])
        return True


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
        self.launch(program, triton.cdiv(size, BLOCK), *arguments)

    def launch(self, program: Any, blocks: int, *arguments: Any) -> None:
        """Starts a program on so many blocks."""
        if blocks:
            with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
                program[(blocks,)](*arguments, BLOCK=BLOCK, **COMPILED)

    def numbers(self, rows: Any) -> Tensor:
        """Brings integers to the device."""
        return torch.from_numpy(np.array(rows, np.int64)).to(self.device)

    def zeros(self, count: int) -> Tensor:
        """Returns integers on the device."""
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def table(self, tensors: Sequence[tuple[int, ...]]) -> Table:
        """Returns a table of tensors, of which each row gives the size first."""
        rows = np.array(tensors, np.int64)
        blocks = -(-rows[:, 0] // BLOCK)
        rows = np.insert(rows, 1, blocks.cumsum() - blocks, axis=1)
        owners = np.repeat(np.arange(len(rows)), blocks)
        return Table(self.numbers(np.concatenate([rows.ravel(), owners])), rows.shape[1], len(rows), len(owners))

    def survey(
        self, chunks: Sequence[Chunk], compared: Sequence[Sequence[bool]], rows: Sequence[int], planes: Planes | None
    ) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_], float]]:
        tasks = len(chunks[0].tasks)
        table = self.table(
            [
                (chunk.base.numel(), chunk.slot, chunk.base.data_ptr(), *_addresses_and(chunk.tasks, own, rows))
                for chunk, own in zip(chunks, compared, strict=True)
            ]
        )
        flags = torch.zeros((len(chunks), tasks, 2), dtype=torch.int32, device=self.device)
        squares = torch.zeros(len(chunks), dtype=torch.float64, device=self.device)
        bits = _bits(planes) if planes is not None else flags  # never written: no row is named
        found = (tasks, bits, bits.stride(0), flags, squares, chunks[0].base)
        self.launch(_survey, table.blocks, *table.arguments, *found)
        changed, suspect = flags.bool().cpu().numpy().transpose(2, 0, 1)
        return list(zip(changed, suspect, squares.tolist(), strict=True))

    def assign(
        self,
        planes: Planes,
        groups: Sequence[Sequence[TensorPlace]],
        budgets: Sequence[Sequence[int]],
        rows: PlaneRows,
        seed: int,
        each: Each,
    ) -> list[Owners]:
        places = [(place, g) for g, group in enumerate(groups) for place in group]
        table = self.table([(place.size, place.slot, g, place.element) for place, g in places])
        scan = _Groups(self, _rows_of(planes), table, len(groups))
        return assign_owners(lambda name, *numbers: [getattr(scan, name)(*numbers)], rows, budgets, seed, scan.choose)

    def gather(
        self, chunks: Sequence[Chunk], rows: Sequence[Sequence[int]], planes: Planes, outs: Sequence[Tensor]
    ) -> list[Counts]:
        tasks, bits = len(chunks[0].tasks), _bits(planes)
        table = self.table(
            [
                (chunk.base.numel(), chunk.slot, *_addresses_and([chunk.base, out]), *_addresses_and(chunk.tasks, own))
                for chunk, own, out in zip(chunks, rows, outs, strict=True)
            ]
        )
        counts = self.zeros(len(chunks) * tasks)
        found = (tasks, bits, bits.stride(0), counts, chunks[0].base)
        self.launch(_gather, table.blocks, *table.arguments, *found)
        return list(counts.cpu().numpy().reshape(-1, tasks))

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        size, tasks, counts = chunk.base.numel(), len(chunk.tasks), self.zeros(len(chunk.tasks))
        self._launch(_largest, size, chunk.base, self._addresses(chunk.tasks), tasks, size, out, counts)
        return counts.cpu().numpy()

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        addresses = self._addresses([chunk.tasks[t] for t in tasks])
        table, size = self._table(tuple(factors), torch.float64), chunk.base.numel()
        self._launch(_weighted_sum, size, chunk.base, addresses, table, len(tasks), size, out)

    def squares(self, vectors: Sequence[Tensor]) -> list[float]:
        table = self.table([(vector.numel(), vector.data_ptr()) for vector in vectors])
        sums = torch.zeros(len(vectors), dtype=torch.float64, device=self.device)
        self.launch(_squares, table.blocks, *table.arguments, sums, vectors[0])
        return list(sums.tolist())

    def step(self, bases: Sequence[Tensor], taus: Sequence[Tensor], scale: float, outs: Sequence[Tensor]) -> list[bool]:
        table = self.table(
            [
                (base.numel(), *_addresses_and([base, tau, out]))
                for base, tau, out in zip(bases, taus, outs, strict=True)
            ]
        )
        flags, factor = self.zeros(len(bases)), self._table((scale,), bases[0].dtype)
        self.launch(_step, table.blocks, *table.arguments, factor, flags, bases[0])
        return [not flag for flag in flags.tolist()]


def _addresses_and(tensors: Sequence[Tensor], *marks: Sequence[int]) -> Iterable[int]:
    """Yields the address of each tensor, and what else there is of it."""
    return chain(*zip((tensor.data_ptr() for tensor in tensors), *marks, strict=True))


def _rows_of(planes: Planes) -> Tensor:
    assert isinstance(planes, TensorPlanes)
    return planes.bits


def _bits(planes: Planes) -> Tensor:
    return _rows_of(planes).view(torch.int8)
