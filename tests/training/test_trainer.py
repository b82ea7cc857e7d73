"""The parts of the loop: random numbers, learning rate and augmentation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.lottery import derived_seed
from tunable_magmax.training.config import warmup_steps
from tunable_magmax.training.trainer import augment, draw_epoch, learning_rate

# -- random numbers: they come from seed, task and epoch, and from nothing else ----------------------------------------

CPU = torch.device("cpu")


def test_every_sample_comes_once_in_an_epoch():
    epoch = draw_epoch(50, CPU, seed=3, task=1, epoch=2)
    assert sorted(epoch.order.tolist()) == list(range(50))
    assert epoch.order.tolist() != list(range(50))
    assert epoch.numbers.shape == (50, 4)
    assert 0 <= float(epoch.numbers.min()) < float(epoch.numbers.max()) < 1


def test_drawn_again_they_are_the_same_whatever_happened_before():
    one = draw_epoch(20, CPU, 3, 1, 2)
    before = torch.random.get_rng_state()
    torch.rand(5)
    other = draw_epoch(20, CPU, 3, 1, 2)
    assert torch.equal(one.order, other.order)
    assert torch.equal(one.numbers, other.numbers)
    torch.random.set_rng_state(before)
    draw_epoch(20, CPU, 3, 1, 2)
    assert torch.equal(torch.random.get_rng_state(), before)  # and they touch nobody else's


def test_seed_task_and_epoch_each_change_them():
    places = [(3, 1, 2), (4, 1, 2), (3, 2, 2), (3, 1, 3), (3, 2, 1), (1, 3, 2)]
    orders = {tuple(draw_epoch(20, CPU, *place).order.tolist()) for place in places}
    assert len(orders) == len(places)


def test_seeds_for_different_purposes_differ_and_fit_torch():
    seeds = {derived_seed(0, *parts) for parts in [(), ("task", 1, 2), ("step", 1, 2), ("task", 12), ("task", 1, "2")]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- the learning rate rises, then falls as half a cosine --------------------------------------------------------------


@given(st.integers(1, 400), st.integers(0, 500), st.sampled_from(["cosine", "constant"]))
def test_rises_to_the_peak_and_never_rises_again(steps, warmup, shape):
    rates = [learning_rate(step, steps, 0.3, warmup, shape) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(rate == pytest.approx(0.3 * (k + 1) / warmup) for k, rate in enumerate(rising))
    if falling:
        assert falling[0] == 0.3
    if shape == "constant":
        assert set(falling) <= {0.3}


@given(st.integers(2, 400))
def test_the_cosine_would_reach_zero_one_step_after_the_last(steps):
    assert learning_rate(steps, steps, 1.0, 0) == pytest.approx(0, abs=1e-12)
    middle = learning_rate(steps // 2, steps, 1.0, 0)
    assert middle == pytest.approx(0.5 * (1 + math.cos(math.pi * (steps // 2) / steps)))


def test_a_warm_up_longer_than_training_never_reaches_the_peak():
    assert learning_rate(99, 100, 1.0, 500) == pytest.approx(0.2)


@pytest.mark.parametrize(("given", "steps"), [(0, 0), (500, 500), (1, 1), (0.25, 50), (0.001, 0)])
def test_below_one_a_warm_up_is_a_share(given, steps):
    assert warmup_steps(given, 200) == steps


# -- augmented images are what a plain loop over images and pixels gives -----------------------------------------------

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
        # The narrowest window: 90% of the area, as tall as the image.
        assert float(found.max() - found.min()) > 255 * (0.9 * 3 / 4) ** 0.5 - 8


def test_none_changes_nothing():
    assert augment(IMAGES, NUMBERS, "none", 2) is IMAGES
