"""Random changes of training images, on their device, from given random numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tunable_magmax.training.config import Augmentation

if TYPE_CHECKING:
    from torch import Tensor

AREA = (0.9, 1.0)
"""Shares of the area that a resized crop may keep."""
RATIO = (3 / 4, 4 / 3)


def augment(pixels: Tensor, numbers: Tensor, kind: Augmentation, pad: int) -> Tensor:
    """Changed images [b, 3, h, w] of `pixels` (uint8), one row of `numbers` [b, 4] in [0, 1) for each.

    `crop`: a window of the image padded with `pad` black pixels on each side; `flip`: left to right, half of the time;
    `resized-crop`: a window of 90 to 100 % of the area, of varying shape, resized to the whole.
    """
    if kind == "none":
        return pixels
    if kind == "resized-crop":
        return _resized_crop(pixels, numbers)
    return _window(pixels, numbers, pad if "crop" in kind else 0, flip="flip" in kind)


def _window(pixels: Tensor, numbers: Tensor, pad: int, flip: bool) -> Tensor:
    import torch

    b, _, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device).expand(b, -1)
    columns = torch.arange(width, device=pixels.device).expand(b, -1)
    if flip:
        columns = torch.where(numbers[:, 2:3] < 0.5, columns, width - 1 - columns)
    if pad:
        pixels = torch.nn.functional.pad(pixels, (pad, pad, pad, pad))
        # Rounded down before they are added: the largest number below 1 would round up to a place outside.
        moves = ((2 * pad + 1) * numbers[:, :2]).long().clamp(max=2 * pad)
        rows, columns = rows + moves[:, 0:1], columns + moves[:, 1:2]
    images = torch.arange(b, device=pixels.device)[:, None, None]
    # Indices around a slice put the sliced dimension last.
    return pixels[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _resized_crop(pixels: Tensor, numbers: Tensor) -> Tensor:
    import torch

    area = AREA[0] + (AREA[1] - AREA[0]) * numbers[:, 0]
    low, high = map(math.log, RATIO)
    shape = torch.exp(low + (high - low) * numbers[:, 1])
    # A side longer than the image is cut to it, so the window always lies inside.
    wide, tall = ((area * factor).sqrt().clamp(max=1) for factor in (shape, 1 / shape))
    across, down = (1 - wide) * (2 * numbers[:, 2] - 1), (1 - tall) * (2 * numbers[:, 3] - 1)
    zero = torch.zeros_like(area)
    moves = torch.stack([torch.stack([wide, zero, across], 1), torch.stack([zero, tall, down], 1)], 1)
    images = pixels.float()
    grid = torch.nn.functional.affine_grid(moves, list(images.shape), align_corners=False)
    changed = torch.nn.functional.grid_sample(
        images, grid, mode="bicubic", padding_mode="reflection", align_corners=False
    )
    return changed.clamp(0, 255)
