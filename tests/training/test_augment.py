"""Augmented images are what a plain loop over images and pixels gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tunable_magmax.training.trainer import augment

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 5, 7), dtype=np.uint8))
NUMBERS = torch.from_numpy(np.random.default_rng(1).random((6, 4), dtype=np.float32))
LARGEST = float(np.nextafter(np.float32(1), np.float32(0)))


def plain(images, numbers, pad, crop, flip):
    """One image, one pixel at a time."""
    found = torch.zeros_like(images)
    _, channels, height, width = images.shape
    for k, image in enumerate(images):
        down, right = (min(int(float(n) * (2 * pad + 1)), 2 * pad) - pad if crop else 0 for n in numbers[k, :2])
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    column = width - 1 - x if flip and numbers[k, 2] >= 0.5 else x
                    from_y, from_x = y + down, column + right
                    if 0 <= from_y < height and 0 <= from_x < width:
                        found[k, c, y, x] = image[c, from_y, from_x]
    return found


@pytest.mark.parametrize("kind", ["crop", "flip", "crop+flip"])
@pytest.mark.parametrize("pad", [1, 3])
def test_windows_and_flips(kind, pad):
    found = augment(IMAGES, NUMBERS, kind, pad)
    assert found.dtype == torch.uint8
    assert torch.equal(found, plain(IMAGES, NUMBERS, pad, "crop" in kind, "flip" in kind))


def test_flips_come_half_of_the_time():
    assert {bool(n >= 0.5) for n in NUMBERS[:, 2]} == {True, False}
    found = augment(IMAGES, NUMBERS, "flip", 2)
    for before, after, numbers in zip(IMAGES, found, NUMBERS, strict=True):
        assert torch.equal(after, before.flip(2) if numbers[2] >= 0.5 else before)


@pytest.mark.parametrize("kind", ["crop", "crop+flip", "resized-crop"])
@pytest.mark.parametrize("number", [0.0, LARGEST])
def test_the_outermost_random_numbers_stay_inside_the_padded_image(kind, number):
    numbers = torch.full((6, 4), number)
    found = augment(IMAGES, numbers, kind, 2)
    assert found.shape == IMAGES.shape
    if kind != "resized-crop":
        assert torch.equal(found, plain(IMAGES, numbers, 2, True, "flip" in kind))


def test_a_resized_crop_of_one_colour_is_that_colour():
    images = torch.tensor([[10, 200, 255], [0, 1, 77]], dtype=torch.uint8)[:, :, None, None].expand(2, 3, 8, 8)
    for numbers in (NUMBERS[:2], torch.zeros(2, 4), torch.full((2, 4), LARGEST)):
        found = augment(images, numbers, "resized-crop", 2)
        torch.testing.assert_close(found, images.float(), atol=1e-3, rtol=0)


def test_a_resized_crop_keeps_nine_tenths_and_the_range():
    ramp = torch.linspace(0, 255, 64).repeat(1, 3, 64, 1).round().to(torch.uint8)
    for seed in range(20):
        numbers = torch.rand(1, 4, generator=torch.Generator().manual_seed(seed))
        found = augment(ramp, numbers, "resized-crop", 2)
        assert 0 <= float(found.min()) <= float(found.max()) <= 255
        # The narrowest window: 90 % of the area, as tall as the image.
        assert float(found.max() - found.min()) > 255 * (0.9 * 3 / 4) ** 0.5 - 8


def test_none_changes_nothing():
    assert augment(IMAGES, NUMBERS, "none", 2) is IMAGES
