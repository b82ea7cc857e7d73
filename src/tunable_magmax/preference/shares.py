"""Shares: the rules that all weights over tasks follow, and `SitePrior`, how often each class occurs at a site.

As a bias a head adds the prior's logarithm to its logits: logit_c += log((1 - eps) pi_c + eps / C), where C is the
number of the head's classes: eps keeps every class possible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunable_magmax.errors import InputError, some_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Intervals: TypeAlias = tuple[tuple[float, float], ...]
PriorSource: TypeAlias = Literal["tasks", "labels"]
HAND_EPS = 0.02
"""The part that is spread evenly where weights say nothing of classes."""
LEAST_EPS = 0.002
"""The part where the posterior's class shares are smooth themselves: for classes of a head that no task has."""


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


# -- classes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SitePrior:
    """How often each class occurs at a site. `shares`: by class name, normalised on entry.

    `eps`: the part that is spread evenly over all classes of a head. `source`: "labels" if labels of the site are
    behind the shares, else "tasks".

    >>> SitePrior({"cat": 3, "dog": 1}, eps=0.1).shares["cat"]
    0.75
    """

    shares: Mapping[str, float]
    eps: float = HAND_EPS
    source: PriorSource = "tasks"

    def __post_init__(self) -> None:
        if not isinstance(self.shares, Mapping) or not self.shares or not all(isinstance(c, str) for c in self.shares):
            raise InputError(f"a prior's shares must map class names to numbers, not {self.shares!r}")
        if self.source not in ("tasks", "labels"):
            raise InputError(f"a prior's source must be 'tasks' or 'labels', not {self.source!r}")
        try:
            values = normalised(list(self.shares.values()))
        except InputError as error:
            raise InputError(f"a prior's shares must be numbers >= 0, not all 0: {error}") from None
        object.__setattr__(self, "shares", dict(zip(self.shares, values, strict=True)))
        eps = as_number(self.eps)
        if not 0 < eps <= 1:  # at 0 a class could become impossible
            raise InputError(f"eps of a prior must be a number above 0 and at most 1, not {self.eps!r}")
        object.__setattr__(self, "eps", eps)

    @classmethod
    def of_tasks(cls, weights: Sequence[float], task_label_counts: Sequence[Any], eps: float = HAND_EPS) -> SitePrior:
        """Returns the prior that weights over tasks mean, given each task's class-to-count mapping.

        >>> SitePrior.of_tasks([1, 1], [{"cat": 8}, {"car": 6, "bus": 2}]).shares
        {'cat': 0.5, 'car': 0.375, 'bus': 0.125}
        """
        import numpy as np

        from tunable_magmax.preference.labels import count_classes

        counts = count_classes(task_label_counts)
        if len(counts.tasks) != len(weights):
            raise InputError(f"{len(weights)} weights for the classes of {len(counts.tasks)} tasks: give one for each")
        shares = np.array(normalised(weights)) @ counts.shares
        if not shares.any():
            raise InputError(
                "all weight is on tasks without a sample, so their classes are not known: profile these tasks with "
                "samples (`tmx init RUN_DIR --data NAME=DATA`), give weight to other tasks, or leave the prior out "
                "(--prior none)"
            )
        return cls(dict(zip(map(str, counts.classes), shares.tolist(), strict=True)), eps)

    def bias(self, classes: Sequence[str]) -> NDArray[np.float32]:
        """Returns what a head of these classes adds to its logits.

        >>> SitePrior({"cat": 1.0}, eps=0.5).bias(["cat", "dog"]).astype(float).round(3).tolist()
        [-0.288, -1.386]
        """
        import numpy as np

        shares = np.array([self.shares.get(name, 0.0) for name in classes])
        if not shares.any():
            raise InputError(
                f"no class of the prior ({some_of(self.shares, show=repr)}) is a class of the head "
                f"({some_of(classes, show=repr)}): make the profiles again from data whose labels are the head's, give "
                "the head of these tasks, or leave the prior out (--prior none)"
            )
        logs: NDArray[np.float32] = np.log((1 - self.eps) * shares / shares.sum() + self.eps / len(classes))
        return logs.astype(np.float32)
