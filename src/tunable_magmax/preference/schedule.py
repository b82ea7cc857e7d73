"""The paper's alpha schedule: w_t proportional to alpha^(T - t)."""

from __future__ import annotations

import math

from tunable_magmax.errors import InputError


def alpha_weights(alpha: float, tasks: int) -> tuple[float, ...]:
    """Unnormalised weights alpha^(T - t), t = 1..T, scaled so that the largest is 1: nothing overflows.

    alpha > 1 favours early tasks, alpha < 1 late ones, 0 gives everything to the last.

    >>> alpha_weights(0.5, 3)
    (0.25, 0.5, 1.0)
    >>> alpha_weights(2, 3)
    (1.0, 0.5, 0.25)
    >>> alpha_weights(0, 3)
    (0.0, 0.0, 1.0)
    """
    try:
        number = float(alpha)
    except (TypeError, ValueError):
        raise InputError(f"alpha must be a number >= 0, not {alpha!r}") from None
    if not math.isfinite(number) or number < 0:
        raise InputError(f"alpha must be a finite number >= 0, not {alpha}; 0 gives everything to the last task")
    tasks = task_count(tasks)
    if number <= 1:
        return tuple(number ** (tasks - t) for t in range(1, tasks + 1))
    return tuple(number ** (1 - t) for t in range(1, tasks + 1))


def task_count(tasks: int) -> int:
    """`tasks` as a positive int, or an error."""
    if isinstance(tasks, bool) or not hasattr(tasks, "__index__") or tasks.__index__() < 1:
        raise InputError(f"the number of tasks must be a whole number >= 1, not {tasks!r}")
    return tasks.__index__()
