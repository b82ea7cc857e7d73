"""The operations on torch, for tensors on any device. Planes are boolean tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.lottery import GOLDEN, MASK, MIX_A, MIX_B
from tunable_magmax.merging.kernels import Chunk, Counts, Cut, Formula, Kernels, Keys, MappedRows, Planes, Runs

TOP_BIT = -(1 << 63)


def signed(value: int) -> int:
    """Returns the signed integer with the 64-bit pattern of an unsigned one, as torch's int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


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


def _keys(flipped: Tensor) -> Keys:
    return (flipped ^ TOP_BIT).cpu().numpy().view(np.uint64)


class TensorPlanes(Planes):
    """Planes as booleans on the device."""

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.bits = torch.zeros((rows, slots), dtype=torch.bool, device=device)

    def part(self, row: int, start: int, stop: int) -> Tensor:
        return self.bits[row, start:stop]


class MappedTensorPlanes(TensorPlanes):
    """Planes as booleans in a file."""

    def __init__(self, rows: int, slots: int, path: Path) -> None:
        self._file = MappedRows(rows, slots, path)
        self.bits = torch.from_numpy(self._file.rows(np.uint8)).view(torch.bool)

    def release(self, slots: tuple[int, int], *rows: int) -> None:
        self._file.release(*slots, *rows)

    def close(self) -> None:
        self.bits = torch.zeros((0, 0), dtype=torch.bool)
        self._file.close()


class TorchKernels(Kernels):
    """`Kernels` for the device where the tensors are."""

    threads = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A GPU waits for the host at each call, so it gets fewer, larger ones.
        self.chunk, self.span = (1 << 18, 1 << 22) if device.type == "cpu" else (1 << 24, 1 << 30)

    def plane_bytes(self, slots: int) -> int:
        return slots if self.device.type == "cpu" else 0  # a GPU keeps planes in its own memory, and never on disk

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        if spill is None:
            return TensorPlanes(rows, slots, self.device)
        return MappedTensorPlanes(rows, slots, spill)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self.device)

    def survey(
        self, chunk: Chunk, compared: Sequence[bool], rows: Sequence[int], planes: Planes | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        largest = torch.zeros_like(chunk.base)
        flags = []
        for values, takes_part, row in zip(chunk.tasks, compared, rows, strict=True):
            magnitude = (values - chunk.base).abs_()
            flags.append(torch.stack(((magnitude != 0).any(), ~magnitude.isfinite().all())))
            if takes_part:
                if row >= 0:
                    assert planes is not None
                    torch.ge(magnitude, largest, out=planes.part(row, *chunk.slots))
                largest = torch.maximum(largest, magnitude)
        changed, suspect = torch.stack(flags).cpu().numpy().T
        return changed, suspect

    def square(self, vector: Tensor) -> float:
        return float(vector.double().square().sum())

    def squared_distance(self, values: Tensor, base: Tensor) -> float:
        return self.square(values - base)

    def fill(self, plane: Tensor, elements: int) -> None:
        plane[:elements] = True

    def count_common(self, plane: Tensor, other: Tensor) -> int:
        return int((plane & other).sum())

    def intersect(self, plane: Tensor, other: Tensor, out: Tensor) -> None:
        torch.logical_and(plane, other, out=out)

    def subtract(self, plane: Tensor, other: Tensor) -> None:
        plane.logical_and_(~other)

    def unite(self, plane: Tensor, other: Tensor) -> None:
        plane.logical_or_(other)

    def scan_keys(
        self, plane: Tensor, free: Tensor, won: Tensor, runs: Runs, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys, NDArray[np.uint64]]:
        slots = (plane & free).nonzero().squeeze(1)
        starts = torch.from_numpy(runs.starts).to(self.device)
        offsets = torch.from_numpy(runs.elements.astype(np.int64) - runs.starts).to(self.device)
        run = torch.bucketize(slots, starts, right=True) - 1
        numbers = _tickets(lottery_state, slots + offsets[run])
        below = numbers < _flipped(low)
        won.zero_()
        won[slots[below]] = True
        undecided = ~below & (numbers <= _flipped(high))
        return int(below.sum()), _keys(numbers[undecided]), slots[undecided].cpu().numpy().view(np.uint64)

    def set_slots(self, plane: Tensor, slots: NDArray[np.uint64]) -> None:
        plane[torch.from_numpy(slots.astype(np.int64)).to(self.device)] = True

    def count_magnitudes(
        self, chunk: Chunk, tasks: Sequence[int], prefixes: Sequence[int], digit: tuple[int, int], wide: bool
    ) -> NDArray[np.int64]:
        shift, bits = digit
        bins = 1 << bits
        counts = []
        for t, prefix in zip(tasks, prefixes, strict=True):
            magnitude = (chunk.tasks[t] - chunk.base).abs_()
            codes = magnitude.double().view(torch.int64) if wide else magnitude.view(torch.int32).long()
            digits = (codes >> shift) - (prefix << bits)
            digits[(digits < 0) | (digits >= bins)] = bins
            counts.append(torch.bincount(digits, minlength=bins + 1)[:-1])
        return torch.stack(counts).cpu().numpy()

    def scan_equal(
        self, chunk: Chunk, task: int, magnitude: float, lottery_state: int, low: int, high: int
    ) -> tuple[int, Keys]:
        equal = (chunk.tasks[task] - chunk.base).abs_().double() == magnitude
        numbers = _tickets(lottery_state, equal.nonzero().squeeze(1) + chunk.element)
        below = numbers < _flipped(low)
        return int(below.sum()), _keys(numbers[~below & (numbers <= _flipped(high))])

    def apply(self, chunk: Chunk, formula: Formula, out: Tensor) -> Counts:
        out.copy_(formula([values - chunk.base for values in chunk.tasks]))
        return None

    def gather(self, chunk: Chunk, rows: Sequence[int], planes: Planes, out: Tensor) -> Counts:
        counts = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        for t, (values, row) in enumerate(zip(chunk.tasks, rows, strict=True)):
            if row >= 0:
                owned = planes.part(row, *chunk.slots)
                torch.where(owned, values - chunk.base, out, out=out)
                counts[t] = owned.sum()
        planes.release(chunk.slots, *rows)
        return counts.cpu().numpy()

    def single(self, chunk: Chunk, task: int, out: Tensor) -> Counts:
        torch.sub(chunk.tasks[task], chunk.base, out=out)
        counts = np.zeros(len(chunk.tasks), np.int64)
        counts[task] = out.numel()
        return counts

    def largest(self, chunk: Chunk, out: Tensor) -> Counts:
        out.zero_()
        owners = torch.zeros(out.shape, dtype=torch.int64, device=self.device)
        for k, values in enumerate(chunk.tasks):
            difference = values - chunk.base
            reached = difference.abs() >= out.abs()
            torch.where(reached, difference, out, out=out)
            owners[reached] = k
        return torch.bincount(owners, minlength=len(chunk.tasks)).cpu().numpy()

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        elements = torch.arange(chunk.base.numel(), device=self.device) + chunk.element
        limits = torch.tensor([_flipped(top) for top in tops], device=self.device)
        drawn = torch.bucketize(_tickets(lottery_state, elements), limits)
        owners = torch.tensor(tasks, device=self.device)[drawn]
        for t in tasks:
            torch.where(owners == t, chunk.tasks[t] - chunk.base, out, out=out)
        return torch.bincount(owners, minlength=len(chunk.tasks)).cpu().numpy()

    def weighted_sum(self, chunk: Chunk, tasks: Sequence[int], factors: Sequence[float], out: Tensor) -> None:
        total = torch.zeros_like(out, dtype=torch.float64)
        for t, factor in zip(tasks, factors, strict=True):
            total += (chunk.tasks[t] - chunk.base).double() * factor
        out.copy_(total)

    def elect(
        self,
        chunk: Chunk,
        tasks: Sequence[int],
        factors: Sequence[float],
        shares: Sequence[float],
        cuts: Sequence[Cut],
        lottery_states: Sequence[int],
        out: Tensor,
    ) -> None:
        total, agreed, votes = (torch.zeros_like(out, dtype=torch.float64) for _ in range(3))
        elements = torch.arange(out.numel(), device=self.device) + chunk.element
        ballots = []
        for t, factor, cut, state in zip(tasks, factors, cuts, lottery_states, strict=True):
            difference = (chunk.tasks[t] - chunk.base).double()
            magnitude = difference.abs()
            kept = magnitude >= cut.magnitude
            if cut.key < MASK:
                kept &= (magnitude > cut.magnitude) | (_tickets(state, elements) <= _flipped(cut.key))
            ballots.append(torch.where(kept, difference * factor, 0.0))
        for ballot in ballots:
            total += ballot
        for ballot, share in zip(ballots, shares, strict=True):
            sides = ballot * total.sign() > 0
            agreed += torch.where(sides, ballot, 0.0)
            votes += sides.double() * share
        out.copy_(agreed / votes.masked_fill(votes == 0, 1.0))

    def step(self, base: Tensor, tau: Tensor, scale: float, out: Tensor) -> bool:
        factor = torch.tensor(scale, dtype=base.dtype, device=self.device)
        torch.add(base, tau * factor, out=out)
        return bool(out.isfinite().all())
