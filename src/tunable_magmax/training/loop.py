"""Trains a model on one task: a plain loop of PyTorch. Knows no files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunable_magmax.errors import InputError, TmxError
from tunable_magmax.lottery import derived_seed
from tunable_magmax.training.config import Augmentation, Optimisation

if TYPE_CHECKING:
    from tunable_magmax.models.prepared import Batch, Prepared

STEPS_PER_REPORT = 25
AREA = (0.9, 1.0)
"""Shares of the area that a resized crop may keep."""
RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class TaskResult:
    """What training a task took. `loss`: of its last steps."""

    steps: int
    samples: int
    loss: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Learner:
    """What learns a task, all of `module` that requires gradients.

    `embed` may run in bfloat16, `score` makes logits of the task's classes of what it gives.
    """

    module: nn.Module
    embed: Callable[[Batch], Tensor]
    score: Callable[[Tensor], Tensor]


def train_task(
    learner: Learner,
    inputs: Prepared,
    targets: Tensor,
    options: Optimisation,
    *,
    seed: int,
    task: int = 0,
    report: Callable[[int], None] | None = None,
) -> TaskResult:
    """Trains in place; `targets` [n] are indices among the task's classes, `task` its number from 0.

    `report` is called now and then with the number of steps that are done.

    On the CPU the result depends on the weights before, the inputs, the options, the seed and the task's number alone.
    """
    began = time.perf_counter()
    gpu = inputs.device.type == "cuda"
    reduced = options.precision == "auto" and gpu
    steps, per_epoch = options.task_steps(len(inputs)), -(-len(inputs) // options.batch)
    parameters = [parameter for parameter in learner.module.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=options.lr, weight_decay=options.weight_decay, fused=True if gpu else None
    )
    total, counted, loss = torch.zeros((), device=inputs.device), 0, 0.0
    with _training(learner.module, options.batch), torch.random.fork_rng():
        torch.manual_seed(derived_seed(seed, "task", task, 0))
        for step in range(steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0:
                order, numbers = draw_epoch(len(inputs), inputs.device, seed, task, epoch)
            chosen = slice(place * options.batch, (place + 1) * options.batch)
            if not gpu:
                torch.manual_seed(derived_seed(seed, "step", task, step))
            optimiser.param_groups[0]["lr"] = learning_rate(step, steps, options.lr, options.warmup_steps(steps))
            rows = order[chosen]
            if "pixels" not in inputs.inputs or options.augment == "none":
                batch = inputs.batch(rows)
            else:
                pixels = augment(inputs.pixels(rows), numbers[chosen], options.augment, options.pad)
                batch = inputs.normalise(pixels)
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=reduced):
                embedded = learner.embed(batch)
            error = functional.cross_entropy(learner.score(embedded.float()), targets[rows])
            optimiser.zero_grad()
            error.backward()  # type: ignore[no-untyped-call]
            if options.clip is not None:
                nn.utils.clip_grad_norm_(parameters, options.clip)
            optimiser.step()
            total, counted, done = total + error.detach(), counted + 1, step + 1
            if done % STEPS_PER_REPORT == 0 or done == steps:
                loss, total, counted = float(total) / counted, torch.zeros_like(total), 0
                if not math.isfinite(loss):
                    raise TmxError(
                        f"training diverged: the loss of task {task + 1} is {loss} at step {done} of {steps}; try a "
                        f"smaller train.lr than {options.lr:g}, or a train.clip"
                    )
                if report is not None:
                    report(done)
    return TaskResult(steps, len(inputs), loss, round(time.perf_counter() - began, 3))


@contextmanager
def _training(module: nn.Module, batch: int) -> Iterator[None]:
    """Puts a module into training mode, and says what to do where memory runs out."""
    module.train()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"out of memory with train.batch {batch}: set it lower, such as --set train.batch={max(1, batch // 2)}, "
            "and choose another directory with -o, since a run has one configuration"
        ) from error
    finally:
        module.eval()


def draw_epoch(samples: int, device: torch.device, seed: int, task: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Draws an order of the samples [n], and four numbers in [0, 1) for the augmentation of each [n, 4].

    On the CPU, so that they do not depend on the device; by seed, task and epoch alone.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", task, epoch))
    order = torch.randperm(samples, generator=generator)
    return order.to(device), torch.rand(samples, 4, generator=generator).to(device)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Returns the rate of step 0 .. steps - 1. A warm-up longer than training never reaches the peak, as in the paper.

    >>> [round(learning_rate(step, 6, 1.0, 2), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    >>> [learning_rate(step, 3, 1.0, 500) for step in range(3)]
    [0.002, 0.004, 0.006]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


# -- augmentation -----------------------------------------------------------------------------------------------------


def augment(pixels: Tensor, numbers: Tensor, kind: Augmentation, pad: int) -> Tensor:
    """Changes images `pixels` [b, 3, h, w] (uint8) at random, by one row of `numbers` [b, 4] in [0, 1) for each.

    `crop`: a window of the image padded with `pad` black pixels on each side; `flip`: left to right, half of the time;
    `resized-crop`: a window of 90 to 100% of the area, of varying shape, resized to the whole.
    """
    if kind == "resized-crop":
        return _resized_crop(pixels, numbers)
    b, _, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device).expand(b, -1)
    columns = torch.arange(width, device=pixels.device).expand(b, -1)
    if "flip" in kind:
        columns = torch.where(numbers[:, 2:3] < 0.5, columns, width - 1 - columns)
    if "crop" in kind:
        pixels = functional.pad(pixels, (pad, pad, pad, pad))
        # Rounded down before they are added: the largest number below 1 would round up to a place outside.
        moves = ((2 * pad + 1) * numbers[:, :2]).long().clamp(max=2 * pad)
        rows, columns = rows + moves[:, 0:1], columns + moves[:, 1:2]
    images = torch.arange(b, device=pixels.device)[:, None, None]
    # Indices around a slice put the sliced dimension last.
    return pixels[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _resized_crop(pixels: Tensor, numbers: Tensor) -> Tensor:
    area = AREA[0] + (AREA[1] - AREA[0]) * numbers[:, 0]
    low, high = map(math.log, RATIO)
    shape = torch.exp(low + (high - low) * numbers[:, 1])
    # A side longer than the image is cut to it, so the window always lies inside.
    wide, tall = ((area * factor).sqrt().clamp(max=1) for factor in (shape, 1 / shape))
    across, down = (1 - wide) * (2 * numbers[:, 2] - 1), (1 - tall) * (2 * numbers[:, 3] - 1)
    zero = torch.zeros_like(area)
    moves = torch.stack([torch.stack([wide, zero, across], 1), torch.stack([zero, tall, down], 1)], 1)
    images = pixels.float()
    grid = functional.affine_grid(moves, list(images.shape), align_corners=False)
    changed = functional.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return changed.clamp(0, 255)
