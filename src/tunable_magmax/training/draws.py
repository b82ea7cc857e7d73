"""The random numbers of training: each epoch's come from the seed, the task and the epoch alone.

So a run that was killed draws the same ones again, and nothing but a step's number must be remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunable_magmax.lottery import derived_seed

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Epoch:
    """An order of the samples [n], and four numbers in [0, 1) for each place in it [n, 4]: for augmentation."""

    order: Tensor
    numbers: Tensor


def draw_epoch(samples: int, device: torch.device, seed: int, task: int, epoch: int) -> Epoch:
    """The draws of an epoch; drawn on the CPU, so that they do not depend on the device."""
    import torch

    generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", task, epoch))
    order = torch.randperm(samples, generator=generator)
    numbers = torch.rand(samples, 4, generator=generator)
    return Epoch(order.to(device), numbers.to(device))
