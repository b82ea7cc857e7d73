"""The loop: tasks are what a plain loop of PyTorch gives; its random numbers, learning rate and augmentation."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import tiny
from torch.nn.functional import normalize

from tunable_magmax.data.samples import Samples, text_samples
from tunable_magmax.errors import InputError
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.encoder import load_encoder, trainable
from tunable_magmax.models.prepared import prepare
from tunable_magmax.training.config import Optimisation
from tunable_magmax.training.loop import Learner, augment, draw_epoch, learning_rate, train_task

CPU = torch.device("cpu")

LABELS = torch.arange(10) % 2
OPTIONS = Optimisation(epochs=3, batch=4, lr=1e-3, warmup=2)


def load(kind, folder):
    if not (folder / kind).exists():
        tiny.save(tiny.build(kind), folder / kind)
    return load_encoder(folder / kind, "cpu")


def inputs_of(encoder):
    """Ten inputs of two classes."""
    labels = LABELS.tolist()
    if encoder.image_processor is None:
        words = [f"{'my good'[: k + 2]} {('pay', 'bill', 'card')[k % 3]}" for k in range(10)]
        return prepare(encoder, text_samples("ten", words, list(map(str, labels))))
    pictures = [tiny.picture((20 * k, 90, 200 - 10 * k), k) for k in range(10)]
    load_pictures = partial(map, pictures.__getitem__)
    return prepare(encoder, Samples("ten", "image", 10, load_pictures, ("0", "1"), tuple(labels)))


def rows_of(encoder):
    return 10 * normalize(torch.randn(2, encoder.dim, generator=torch.Generator().manual_seed(3)), dim=1)


def learner(encoder, options):
    rows, _ = rows_of(encoder), trainable(encoder, options.freeze)
    return Learner(encoder.module, encoder.pool, lambda pooled: normalize(pooled, dim=1) @ rows.T)


def plainly(encoder, inputs, options, seed, task):
    """AdamW over all parameters of the module; what gets no gradient is left alone by it."""
    rows, losses = rows_of(encoder), []
    optimiser = torch.optim.AdamW(encoder.module.parameters(), weight_decay=options.weight_decay)
    encoder.module.train()
    for epoch in range(options.epochs):
        order, numbers = draw_epoch(10, CPU, seed, task, epoch)
        for start in range(0, 10, options.batch):
            step, chosen = len(losses), order[start : start + options.batch]
            torch.manual_seed(derived_seed(seed, "step", task, step))
            if options.augment == "none":
                batch = inputs.batch(chosen)
            else:
                changed = augment(inputs.pixels(chosen), numbers[start : start + options.batch], "crop+flip", 2)
                batch = (changed.float() * (1 / 255) - 0.5) / 0.25
            optimiser.param_groups[0]["lr"] = learning_rate(step, 9, options.lr, 2)
            optimiser.zero_grad()
            features = normalize(encoder.pool(batch), dim=1)
            loss = torch.nn.functional.cross_entropy(features @ rows.T, LABELS[chosen])
            loss.backward()
            if options.clip is not None:
                torch.nn.utils.clip_grad_norm_(encoder.module.parameters(), options.clip)
            optimiser.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["clip", "vit", "bert"])
@pytest.mark.parametrize("change", [{}, {"clip": 0.05, "weight_decay": 0.5, "augment": "crop+flip"}, {"clip": None}])
def test_a_task_is_what_a_plain_loop_gives(tmp_path, kind, change):
    """With dropout, which BERT has."""
    options = Optimisation(**{**vars(OPTIONS), **change, **({"augment": "none"} if kind == "bert" else {})})
    encoder, expected, base = (load(kind, tmp_path) for _ in range(3))
    inputs, reports = inputs_of(encoder), []
    losses = plainly(expected, inputs, options, 7, 1)
    before = torch.random.get_rng_state()
    result = train_task(learner(encoder, options), inputs, LABELS, options, seed=7, task=1, report=reports.append)
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's random numbers are touched
    assert (result.steps, result.samples) == (9, 10)
    assert result.loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert reports == [9]
    assert not encoder.module.training
    state, start = expected.module.state_dict(), base.module.state_dict()
    for name, value in encoder.module.state_dict().items():
        torch.testing.assert_close(value, state[name], atol=2e-6, rtol=1e-5)
        assert torch.equal(value, start[name]) == torch.equal(state[name], start[name]), name


def test_out_of_memory_names_the_batch_size(tmp_path):
    encoder = load("vit", tmp_path)
    inputs = inputs_of(encoder)

    def fails(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    broken = Learner(encoder.module, fails, torch.Tensor.float)
    with pytest.raises(InputError, match=r"train\.batch 4.*--set train\.batch=2"):
        train_task(broken, inputs, LABELS, OPTIONS, seed=0)
    assert not encoder.module.training


@given(st.integers(1, 400), st.integers(0, 500))
def test_rises_to_the_peak_and_never_rises_again(steps, warmup):
    rates = [learning_rate(step, steps, 0.3, warmup) for step in range(steps)]
    assert all(0 < rate <= 0.3 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(rate == pytest.approx(0.3 * (k + 1) / warmup) for k, rate in enumerate(rising))
    if falling:
        assert falling[0] == 0.3


IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 5, 7), dtype=np.uint8))
NUMBERS = torch.from_numpy(np.random.default_rng(1).random((6, 4), dtype=np.float32))


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


def test_a_resized_crop_keeps_nine_tenths_and_the_range():
    ramp = torch.linspace(0, 255, 64).repeat(1, 3, 64, 1).round().to(torch.uint8)
    for seed in range(20):
        numbers = torch.rand(1, 4, generator=torch.Generator().manual_seed(seed))
        found = augment(ramp, numbers, "resized-crop", 2)
        assert 0 <= float(found.min()) <= float(found.max()) <= 255
        # The narrowest window: 90% of the area, as tall as the image.
        assert float(found.max() - found.min()) > 255 * (0.9 * 3 / 4) ** 0.5 - 8
