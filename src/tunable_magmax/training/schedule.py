"""A task's steps: how many, and the learning rate of each: linear warm-up, then cosine to 0, or constant."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Shape: TypeAlias = Literal["cosine", "constant"]


def learning_rate(step: int, steps: int, peak: float, warmup: int, shape: Shape = "cosine") -> float:
    """The rate of step 0 .. steps - 1. A warm-up longer than training never reaches the peak, as in the paper.

    >>> [round(learning_rate(step, 6, 1.0, 2), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    >>> [learning_rate(step, 3, 1.0, 500) for step in range(3)]
    [0.002, 0.004, 0.006]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def warmup_steps(warmup: float, steps: int) -> int:
    """A warm-up in steps: given as such, or, below 1, as a share of the task's steps.

    >>> warmup_steps(500, 200), warmup_steps(0.1, 200)
    (500, 20)
    """
    return int(warmup) if warmup >= 1 else round(warmup * steps)


def task_steps(samples: int, epochs: int, batch: int) -> int:
    """How many steps a task takes: each epoch ends with a smaller batch where samples are left.

    >>> task_steps(10, 3, 4)
    9
    """
    return epochs * -(-samples // batch)
