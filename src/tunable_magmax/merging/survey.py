"""What the first walk over the checkpoints finds, by tensor. The findings about parts of a tensor add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import InputError


@dataclass(frozen=True, slots=True)
class Survey:
    """Which tensors each task changed [tensors, T], what is wrong with them, and how far the last task moved them.

    >>> found = Survey.nothing(tensors=1, tasks=2)
    >>> found.odd[0, 1] += 3
    >>> found.changed[0] = True
    >>> found.refuse(["w"], ["base", "task 1", "task 2"])
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: values that can't be merged:
      - task 1: 'w' has 3 values that are NaN or infinite
    Mend these checkpoints, or leave the tensors out with exclude patterns.
    """

    changed: NDArray[np.bool_]
    odd: NDArray[np.int64]
    """Values that are NaN or infinite in base and tasks [tensors, T + 1]; 0 where all differences are finite."""
    overflow: NDArray[np.bool_]
    """Whether a difference of finite values is infinite [tensors, T]."""
    squares: NDArray[np.float64]
    """The squared length of the last task vector [tensors]."""

    @classmethod
    def nothing(cls, tensors: int, tasks: int) -> Survey:
        """Nothing changed, nothing odd."""
        shape = (tensors, tasks)
        odd = np.zeros((tensors, tasks + 1), np.int64)
        return cls(np.zeros(shape, np.bool_), odd, np.zeros(shape, np.bool_), np.zeros(tensors))

    def add(self, part: Survey, tensors: Sequence[int]) -> None:
        """Add what was found in parts of the given tensors, each of which is there once."""
        places = list(tensors)
        self.changed[places] |= part.changed
        self.odd[places] += part.odd
        self.overflow[places] |= part.overflow
        self.squares[places] += part.squares

    def refuse(self, names: Sequence[str], labels: Sequence[str]) -> None:
        """Raise an `InputError` that lists every merged tensor with values that can't be merged."""
        if not (self.odd.any() or self.overflow.any()):
            return
        problems: list[str] = []
        for k, name in enumerate(names):
            if not self.changed[k].any():
                continue
            for label, count in zip(labels, self.odd[k], strict=True):
                if count:
                    problems.append(f"{label}: {name!r} has {count:,} values that are NaN or infinite")
            for label, too_far in zip(labels[1:], self.overflow[k], strict=True):
                if too_far:
                    problems.append(f"{label}: {name!r} is so far from the base that the difference overflows")
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise InputError(
                f"values that can't be merged:\n{lines}\n"
                "Mend these checkpoints, or leave the tensors out with exclude patterns."
            )
