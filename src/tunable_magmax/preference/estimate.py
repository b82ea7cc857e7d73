"""The rules that all weights over tasks follow, and the half-L1 distance between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.data.arrays import Floats

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Intervals: TypeAlias = tuple[tuple[float, float], ...]


def normalised(weights: Any) -> tuple[float, ...]:
    """Returns `weights` divided by their sum, each rounded once. Weights that sum to 1 already stay as they are."""
    numbers = checked_weights(weights)
    total = math.fsum(numbers) if max(numbers) < 1e300 else math.inf
    # Rounding each weight once moves their sum by 2 ulp at most; without this a file would change when read and saved.
    if abs(total - 1) <= 1e-15:
        return numbers
    # As in rule 3, a weight is the decimal number it prints as; rationals neither overflow nor underflow on the way.
    exact = [Fraction(repr(number)) for number in numbers]
    whole = sum(exact)
    return tuple(float(number / whole) for number in exact)


def checked_weights(weights: Any) -> tuple[float, ...]:
    """Returns `weights` as floats; refuses negative and infinite ones, and weights that are all 0."""
    if isinstance(weights, (str, bytes, Mapping)) or not hasattr(weights, "__iter__"):
        raise InputError(f"weights must be a list with one number per task, not {weights!r}")
    numbers = []
    for position, weight in enumerate(weights, start=1):
        number = as_number(weight)
        if not 0 <= number < math.inf:
            raise InputError(f"the weight of task {position} must be a finite number >= 0, not {weight!r}")
        numbers.append(abs(number))
    if not numbers:
        raise InputError("no weights: give one number per task")
    if not any(numbers):
        raise InputError("all weights are 0: give at least one task a positive weight, or ask for equal weights")
    return tuple(numbers)


def as_number(value: Any) -> float:
    """Returns a number as a float, and NaN, which lies in no range, for anything else.

    >>> as_number(2), as_number("2"), as_number(True)
    (2.0, nan, nan)
    """
    try:
        return float("" if isinstance(value, (str, bytes, bool)) else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def alpha_weights(alpha: float, tasks: int) -> tuple[float, ...]:
    """Returns the paper's schedule alpha^(T - t), t = 1..T, scaled so that the largest is 1: nothing overflows.

    alpha > 1 favours early tasks, alpha < 1 late ones, 0 gives everything to the last.

    >>> alpha_weights(0.5, 3)
    (0.25, 0.5, 1.0)
    >>> alpha_weights(2, 3)
    (1.0, 0.5, 0.25)
    >>> alpha_weights(0, 3)
    (0.0, 0.0, 1.0)
    """
    number = as_number(alpha)
    if not 0 <= number < math.inf:
        raise InputError(f"alpha must be a finite number >= 0, not {alpha!r}; 0 gives everything to the last task")
    tasks = task_count(tasks)
    if number <= 1:
        return tuple(number ** (tasks - t) for t in range(1, tasks + 1))
    return tuple(number ** (1 - t) for t in range(1, tasks + 1))


def task_count(tasks: int) -> int:
    """Returns `tasks` as a positive int, or refuses it."""
    if isinstance(tasks, bool) or not hasattr(tasks, "__index__") or tasks.__index__() < 1:
        raise InputError(f"the number of tasks must be a whole number >= 1, not {tasks!r}")
    return tasks.__index__()


def half_l1(first: Floats, second: Floats) -> Floats:
    """Returns half the L1 distance over the last axis: the share of weight that sits on the wrong task.

    >>> import numpy as np
    >>> float(half_l1(np.array([1.0, 0.0]), np.array([0.75, 0.25])))
    0.25
    """
    distance: Floats = abs(first - second).sum(axis=-1) / 2
    return distance
