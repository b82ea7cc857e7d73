"""Trains one encoder on task after task, each from where the one before ended. Knows no files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tunable_magmax.data.benchmark import Benchmark, Task
from tunable_magmax.errors import InputError, TmxError
from tunable_magmax.lottery import derived_seed
from tunable_magmax.models.tower import trainable
from tunable_magmax.training.config import Augmentation, Schedule, TrainConfig, task_steps, warmup_steps
from tunable_magmax.training.step import Parameters, Step, make_regulariser

if TYPE_CHECKING:
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head
    from tunable_magmax.models.prepared import Batch, Prepared

AREA = (0.9, 1.0)
"""Shares of the area that a resized crop may keep."""
RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Tick:
    """The progress of training: after `step` of a task's `steps`, counted from 1; `loss`: mean since the last tick."""

    task: int
    tasks: int
    name: str
    step: int
    steps: int
    epoch: int
    loss: float
    rate: float
    samples_per_second: float


@dataclass(frozen=True)
class TaskResult:
    """What training a task took, since it was started or resumed. `loss`: of its last steps."""

    steps: int
    samples: int
    loss: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a task after `step` of its steps: the parameters and their moments."""

    step: int
    state: Mapping[str, Tensor]


Watch = Callable[[Tick], None]
# Called after each tick with the step and a function that gives the state, which is costly to hold on to.
Keep = Callable[[int, Callable[[], Mapping[str, Tensor]]], None]


class Trainer:
    """Trains an encoder in place through the tasks of a benchmark, against a frozen head over all its classes."""

    def __init__(self, encoder: Encoder, head: Head, benchmark: Benchmark, config: TrainConfig) -> None:
        self._encoder, self._benchmark, self._config = encoder, benchmark, config
        device = encoder.device
        self._weight = head.logit_scale * torch.from_numpy(head.weight).to(device)
        self.parameters: Parameters = trainable(encoder, config.train.freeze)
        self.regulariser = make_regulariser(config.regularise)
        self._step = Step(encoder, self.parameters, config.train, self.regulariser)

    def train(
        self,
        t: int,
        inputs: Prepared,
        *,
        start: Snapshot | None = None,
        watch: Watch | None = None,
        keep: Keep | None = None,
    ) -> TaskResult:
        """Trains task t (from 0) on its inputs, from a snapshot if there is one; `keep` may save each tick's state."""
        task = self._benchmark.tasks[t]
        stream = torch.cuda.Stream() if inputs.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        try:
            # A stream of its own, because the default one cannot be recorded.
            with torch.random.fork_rng(), torch.cuda.stream(stream):
                if stream is not None:
                    stream.wait_stream(torch.cuda.default_stream())
                return self._train(t, task, inputs, start, watch, keep)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) and "out of memory" not in str(error):
                raise
            batch, smaller = self._config.train.batch, max(1, self._config.train.batch // 2)
            raise InputError(
                f"out of memory with train.batch {batch}: set it lower, such as --set train.batch={smaller}, and "
                "choose another directory with -o, since a run has one configuration"
            ) from error
        finally:
            self._encoder.module.eval()
            if stream is not None:
                torch.cuda.default_stream().wait_stream(stream)

    def _train(
        self, t: int, task: Task, inputs: Prepared, start: Snapshot | None, watch: Watch | None, keep: Keep | None
    ) -> TaskResult:
        options, seed = self._config.train, self._config.seed
        targets, weight = self.targets(task, inputs), self._rows(task.classes)
        steps = task_steps(len(inputs), options)
        per_epoch = -(-len(inputs) // options.batch)
        warmup = warmup_steps(options.warmup, steps)
        self._begin(t)
        self._step.reset()
        first = 0
        if start is not None:
            first = start.step
            self._step.restore(start.state, first)
        self._encoder.module.train()
        torch.manual_seed(derived_seed(seed, "task", t, first))
        meter = _Meter(inputs.device)
        began = time.perf_counter()
        epoch, draws, loss = -1, None, 0.0
        for step in range(first, steps):
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                draws = draw_epoch(len(inputs), inputs.device, seed, t, epoch)
            assert draws is not None
            place = slice(step % per_epoch * options.batch, (step % per_epoch + 1) * options.batch)
            rows = draws.order[place]
            if inputs.device.type == "cpu":
                # So that dropout goes on after a kill as if there had been none.
                torch.manual_seed(derived_seed(seed, "step", t, step))
            rate = learning_rate(step, steps, options.lr, warmup, options.schedule)
            batch = self._batch(inputs, rows, draws.numbers[place])
            meter.add(self._step(batch, targets[rows], weight, rate), len(rows))
            done = step + 1
            if done % options.log_every == 0 or done == steps:
                loss, speed = meter.read()
                if not loss < float("inf"):
                    raise TmxError(
                        f"training diverged: the loss of task {task.name!r} is {loss} at step {done} of {steps}; try a "
                        f"smaller train.lr than {options.lr:g}, or a train.clip"
                    )
                if watch is not None:
                    watch(Tick(t, len(self._benchmark.tasks), task.name, done, steps, epoch + 1, loss, rate, speed))
                if keep is not None and done < steps:
                    keep(done, self._step.state)
        if self.regulariser is not None:
            self.regulariser.finish(self._encoder, inputs, targets, weight, self.parameters)
        if inputs.device.type == "cuda":
            torch.cuda.synchronize()
        return TaskResult(steps, len(inputs), loss, time.perf_counter() - began)

    def targets(self, task: Task, inputs: Prepared) -> Tensor:
        """Returns each input's index among the task's classes [n]."""
        assert inputs.labels is not None
        places = torch.full((len(self._benchmark.classes),), -1, dtype=torch.int64, device=inputs.labels.device)
        places[list(task.classes)] = torch.arange(len(task.classes), device=places.device)
        targets = places[inputs.labels]
        if bool((targets < 0).any()):
            outside = self._benchmark.classes[int(inputs.labels[targets < 0][0])]
            raise InputError(f"task {task.name!r} has a sample of class {outside!r}, which is not one of its classes")
        return targets

    def _batch(self, inputs: Prepared, rows: Tensor, numbers: Tensor) -> Batch:
        kind = self._config.train.augment
        if inputs.kind == "text" or kind == "none":
            return inputs.batch(rows)
        return inputs.normalise(augment(inputs.pixels(rows), numbers, kind, self._config.train.pad))

    def _begin(self, t: int) -> None:
        if self.regulariser is not None:
            earlier = sorted({c for task in self._benchmark.tasks[:t] for c in task.classes})
            self.regulariser.begin(self._encoder, self._rows(earlier) if earlier else None)

    def _rows(self, classes: Sequence[int]) -> Tensor:
        return self._weight[torch.tensor(classes, device=self._weight.device)]


class _Meter:
    """Measures the mean loss and samples a second since the last reading, without waiting for the device in between."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)
        self._steps = self._samples = 0
        self._since = time.perf_counter()

    def add(self, loss: Tensor, samples: int) -> None:
        self._sum += loss
        self._steps += 1
        self._samples += samples

    def read(self) -> tuple[float, float]:
        loss = float(self._sum) / self._steps
        now = time.perf_counter()
        speed = self._samples / max(now - self._since, 1e-9)
        self._sum.zero_()
        self._steps, self._samples, self._since = 0, 0, now
        return loss, speed


# -- random numbers: they depend on seed, task and epoch alone, so that a killed run draws the same ones again ---------


@dataclass(frozen=True, eq=False)
class Epoch:
    """An order of the samples [n], and four numbers in [0, 1) for the augmentation of each [n, 4]."""

    order: Tensor
    numbers: Tensor


def draw_epoch(samples: int, device: torch.device, seed: int, task: int, epoch: int) -> Epoch:
    """Draws the order and the numbers of an epoch, on the CPU, so that they do not depend on the device."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", task, epoch))
    order = torch.randperm(samples, generator=generator)
    numbers = torch.rand(samples, 4, generator=generator)
    return Epoch(order.to(device), numbers.to(device))


# -- learning rate ----------------------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, peak: float, warmup: int, schedule: Schedule = "cosine") -> float:
    """Returns the rate of step 0 .. steps - 1. A warm-up longer than training never reaches the peak, as in the paper.

    >>> [round(learning_rate(step, 6, 1.0, 2), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    >>> [learning_rate(step, 3, 1.0, 500) for step in range(3)]
    [0.002, 0.004, 0.006]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


# -- augmentation -----------------------------------------------------------------------------------------------------


def augment(pixels: Tensor, numbers: Tensor, kind: Augmentation, pad: int) -> Tensor:
    """Changes images `pixels` [b, 3, h, w] (uint8) at random, by one row of `numbers` [b, 4] in [0, 1) for each.

    `crop`: a window of the image padded with `pad` black pixels on each side; `flip`: left to right, half of the time;
    `resized-crop`: a window of 90 to 100% of the area, of varying shape, resized to the whole.
    """
    if kind == "none":
        return pixels
    if kind == "resized-crop":
        return _resized_crop(pixels, numbers)
    return _window(pixels, numbers, pad if "crop" in kind else 0, flip="flip" in kind)


def _window(pixels: Tensor, numbers: Tensor, pad: int, flip: bool) -> Tensor:
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
