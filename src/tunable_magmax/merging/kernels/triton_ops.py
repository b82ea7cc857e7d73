"""The operations of an NVIDIA GPU, and the planes there: Triton programs, and operations of torch for what needs none.

Planes are boolean tensors. All tensors of a batch go to a program in one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B
from tunable_magmax.merging.cuts import Cut, Listed, Window
from tunable_magmax.merging.kernels import Chunk, Counts, Each, Kernels, Planes, TensorPlace, Vote, programs
from tunable_magmax.merging.kernels.programs import BLOCK, COMPILED, signed
from tunable_magmax.merging.owners import Ints, Step, ThreeRows, windows

TOP_BIT = -(1 << 63)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # torch shifts arithmetically; the lottery wants zeros on the left


def _tickets(lottery_state: int, elements: Tensor) -> Tensor:
    """Lottery numbers, with the top bit flipped so that signed comparison orders them as unsigned numbers."""
    x = (elements + 1) * signed(GOLDEN) + signed(lottery_state)
    x = (x ^ _shifted(x, 30)) * signed(MIX_A)
    x = (x ^ _shifted(x, 27)) * signed(MIX_B)
    return (x ^ _shifted(x, 31)) ^ TOP_BIT


def _flipped(value: int) -> int:
    return signed(value) ^ TOP_BIT


def _kept(magnitudes: Tensor, keys: Tensor, cut: Cut) -> Tensor:
    """Returns which elements a cut keeps; `keys` have the top bit flipped."""
    return (magnitudes > cut.magnitude) | ((magnitudes == cut.magnitude) & (keys <= _flipped(cut.key)))


class TensorPlanes(Planes):
    """Planes as booleans on the device."""

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.bits = torch.zeros((rows, slots), dtype=torch.bool, device=device)


def _bits(planes: Planes) -> Tensor:
    assert isinstance(planes, TensorPlanes)
    return planes.bits


@dataclass(frozen=True)
class Table:
    """What programs look up of many tensors: rows of (size, first block, ...), then each block's row number."""

    numbers: Tensor
    columns: int
    tensors: int
    blocks: int


@dataclass(frozen=True)
class PlaneGroups:
    """The planes of many groups of tensors, worked on at once. Arrays have a number for each group."""

    kernels: TritonKernels
    bits: Tensor
    table: Table
    count: int

    def count_common(self, row: int, other: int) -> Ints:
        counts = self.kernels.zeros(self.count)
        planes = (self.bits[each].view(torch.int8) for each in (row, other))
        self.kernels.launch(programs.count_common, self.table, *planes, counts)
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
            bits = (plane.view(torch.int8) for plane in planes)
            self.kernels.launch(programs.scan_keys, self.table, *bits, numbers, counts, listed, room)
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


class TritonKernels(Kernels):
    """`Kernels` for an NVIDIA GPU."""

    chunk = 1 << 24  # a GPU waits for the host at each call, so it gets few, large ones
    threads = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def launch(self, program: Any, over: Table | int, *arguments: Any) -> None:
        """Starts a program over a table of tensors, or over so many elements of one."""
        if isinstance(over, Table):
            blocks, arguments = over.blocks, (over.numbers, over.columns, over.tensors, *arguments)
        else:
            blocks = triton.cdiv(over, BLOCK)
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

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self.device)

    def plane_bytes(self, slots: int) -> int:
        return 0  # a GPU keeps planes in its own memory, and never on disk

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        return TensorPlanes(rows, slots, self.device)

    def plane_groups(self, planes: Planes, groups: Sequence[Sequence[TensorPlace]], each: Each) -> PlaneGroups:
        places = [(place, g) for g, group in enumerate(groups) for place in group]
        table = self.table([(place.size, place.slot, g, place.element) for place, g in places])
        return PlaneGroups(self, _bits(planes), table, len(groups))

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
        bits = _bits(planes).view(torch.int8) if planes is not None else flags  # never written: no row is named
        self.launch(programs.survey, table, tasks, bits, bits.stride(0), flags, squares, chunks[0].base)
        changed, suspect = flags.bool().cpu().numpy().transpose(2, 0, 1)
        return list(zip(changed, suspect, squares.tolist(), strict=True))

    def scan(self, chunk: Chunk, window: Window) -> tuple[int, Listed]:
        magnitudes = (chunk.tasks[window.task] - chunk.base).abs_().double()
        elements = torch.arange(magnitudes.numel(), device=self.device) + chunk.element
        keys = _tickets(window.lottery_state, elements)
        above, last = (_kept(magnitudes, keys, cut) for cut in (window.above, window.last))
        drawn = _tickets(window.attempt, elements) & 0xFFFFFFFF <= window.most
        listed = (last & ~above & drawn & (magnitudes > 0)).nonzero().squeeze(1)
        found = torch.stack([magnitudes[listed].view(torch.int64), keys[listed] ^ TOP_BIT])
        return int(above.sum()), found.cpu().numpy().view(np.uint64)

    def gather(
        self, chunks: Sequence[Chunk], rows: Sequence[Sequence[int]], planes: Planes, outs: Sequence[Tensor]
    ) -> list[Counts]:
        tasks, bits = len(chunks[0].tasks), _bits(planes).view(torch.int8)
        table = self.table(
            [
                (chunk.base.numel(), chunk.slot, *_addresses_and([chunk.base, out]), *_addresses_and(chunk.tasks, own))
                for chunk, own, out in zip(chunks, rows, outs, strict=True)
            ]
        )
        counts = self.zeros(len(chunks) * tasks)
        self.launch(programs.gather, table, tasks, bits, bits.stride(0), counts, chunks[0].base)
        return list(counts.cpu().numpy().reshape(-1, tasks))

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        size, tasks = chunk.base.numel(), len(chunk.tasks)
        addresses, counts = self.numbers(list(_addresses_and(chunk.tasks))), self.zeros(tasks)
        self.launch(programs.largest, size, chunk.base, addresses, tasks, size, out, counts)
        return counts.cpu().numpy()

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        elements = torch.arange(chunk.base.numel(), device=self.device) + chunk.element
        limits = torch.tensor([_flipped(top) for top in tops], device=self.device)
        drawn = torch.bucketize(_tickets(lottery_state, elements), limits)
        owners = torch.tensor(tasks, device=self.device)[drawn]
        for t in tasks:
            torch.where(owners == t, chunk.tasks[t] - chunk.base, out, out=out)
        return torch.bincount(owners, minlength=len(chunk.tasks)).cpu().numpy()

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        size, addresses = chunk.base.numel(), self.numbers(list(_addresses_and([chunk.tasks[t] for t in tasks])))
        products = torch.tensor(factors, dtype=torch.float64, device=self.device)
        self.launch(programs.weighted_sum, size, chunk.base, addresses, products, len(tasks), size, out)

    def elect(self, chunk: Chunk, votes: Sequence[Vote], out: Tensor) -> None:
        total, agreed, shares = (torch.zeros_like(out, dtype=torch.float64) for _ in range(3))
        elements = torch.arange(out.numel(), device=self.device) + chunk.element
        ballots = []
        for vote in votes:
            difference = (chunk.tasks[vote.task] - chunk.base).double()
            kept = _kept(difference.abs(), _tickets(vote.lottery_state, elements), vote.cut)
            ballots.append(torch.where(kept, difference * vote.factor, 0.0))
        for ballot in ballots:
            total += ballot
        for ballot, vote in zip(ballots, votes, strict=True):
            sides = ballot * total.sign() > 0
            agreed += torch.where(sides, ballot, 0.0)
            shares += sides.double() * vote.share
        out.copy_(agreed / shares.masked_fill(shares == 0, 1.0))

    def squares(self, vectors: Sequence[Tensor]) -> list[float]:
        table = self.table([(vector.numel(), vector.data_ptr()) for vector in vectors])
        sums = torch.zeros(len(vectors), dtype=torch.float64, device=self.device)
        self.launch(programs.squares, table, sums, vectors[0])
        return list(sums.tolist())

    def step(self, bases: Sequence[Tensor], taus: Sequence[Tensor], scale: float, outs: Sequence[Tensor]) -> list[bool]:
        tensors = list(zip(bases, taus, outs, strict=True))
        table = self.table([(base.numel(), *_addresses_and([base, tau, out])) for base, tau, out in tensors])
        flags, factor = self.zeros(len(bases)), torch.tensor([scale], dtype=bases[0].dtype, device=self.device)
        self.launch(programs.step, table, factor, flags, bases[0])
        return [not flag for flag in flags.tolist()]


def _addresses_and(tensors: Iterable[Tensor], *marks: Sequence[int]) -> Iterable[int]:
    """Yields the address of each tensor, and what else there is of it."""
    return chain(*zip((tensor.data_ptr() for tensor in tensors), *marks, strict=True))
