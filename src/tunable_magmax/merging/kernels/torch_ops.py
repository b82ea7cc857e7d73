"""What a GPU does by operations of torch. Planes are boolean tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tunable_magmax.lottery import GOLDEN, MIX_A, MIX_B
from tunable_magmax.merging.cuts import Cut, Listed, Window
from tunable_magmax.merging.kernels import Chunk, Counts, Kernels, Planes, Vote

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


def _kept(magnitudes: Tensor, keys: Tensor, cut: Cut) -> Tensor:
    """Returns which elements a cut keeps; `keys` have the top bit flipped."""
    return (magnitudes > cut.magnitude) | ((magnitudes == cut.magnitude) & (keys <= _flipped(cut.key)))


class TensorPlanes(Planes):
    """Planes as booleans on the device."""

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.bits = torch.zeros((rows, slots), dtype=torch.bool, device=device)


class TorchKernels(Kernels):
    """Those operations of a GPU that need no program of their own."""

    chunk = 1 << 24  # a GPU waits for the host at each call, so it gets few, large ones
    threads = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def plane_bytes(self, slots: int) -> int:
        return 0  # a GPU keeps planes in its own memory, and never on disk

    def planes(self, rows: int, slots: int, spill: Path | None) -> Planes:
        return TensorPlanes(rows, slots, self.device)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self.device)

    def scan(self, chunk: Chunk, window: Window) -> tuple[int, Listed]:
        magnitudes = (chunk.tasks[window.task] - chunk.base).abs_().double()
        elements = torch.arange(magnitudes.numel(), device=self.device) + chunk.element
        keys = _tickets(window.lottery_state, elements)
        above, last = (_kept(magnitudes, keys, cut) for cut in (window.above, window.last))
        drawn = _tickets(window.attempt, elements) & 0xFFFFFFFF <= window.most
        listed = (last & ~above & drawn & (magnitudes > 0)).nonzero().squeeze(1)
        found = torch.stack([magnitudes[listed].view(torch.int64), keys[listed] ^ TOP_BIT])
        return int(above.sum()), found.cpu().numpy().view(np.uint64)

    def draw(self, chunk: Chunk, tasks: Sequence[int], tops: Sequence[int], lottery_state: int, out: Tensor) -> Counts:
        elements = torch.arange(chunk.base.numel(), device=self.device) + chunk.element
        limits = torch.tensor([_flipped(top) for top in tops], device=self.device)
        drawn = torch.bucketize(_tickets(lottery_state, elements), limits)
        owners = torch.tensor(tasks, device=self.device)[drawn]
        for t in tasks:
            torch.where(owners == t, chunk.tasks[t] - chunk.base, out, out=out)
        return torch.bincount(owners, minlength=len(chunk.tasks)).cpu().numpy()

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
