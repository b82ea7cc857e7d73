"""Points of a sweep: named weights along a line, on a grid of three tasks, or a list. All arithmetic is exact."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.merging.budget import read_weights

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Point:
    """One preference of a sweep: weights for the tasks in training order, and the name that its output gets."""

    name: str
    weights: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"{self.name!r} can't name a point of a sweep: use letters, digits, '-' and '_'")


def line(start: Sequence[Any], stop: Sequence[Any], steps: int, normalise: bool = True) -> tuple[Point, ...]:
    """Returns `steps` evenly spaced points from one preference to another, both included: step-00, step-01 and so on.

    With `normalise` the ends are shares, divided by their sum before anything else, so that shares change evenly.

    >>> [(point.name, [str(weight) for weight in point.weights]) for point in line([3, 1], [0, 1], 3)]
    [('step-00', ['3/4', '1/4']), ('step-01', ['3/8', '5/8']), ('step-02', ['0', '1'])]
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise InputError(f"steps is {steps!r}, expected a whole number, 2 or more: both ends are steps")
    if len(start) != len(stop):
        raise InputError(
            f"the line goes from {len(start)} weights to {len(stop)}: give one for each task at both of its ends"
        )
    one = _exact(start, "the first point of the line", normalise)
    other = _exact(stop, "the last point of the line", normalise)
    if one == other:
        raise InputError("both ends of the line are the same preference, so there is nothing between them")
    width = max(2, len(str(steps - 1)))
    points = []
    for k in range(steps):
        weights = (a + (b - a) * Fraction(k, steps - 1) for a, b in zip(one, other, strict=True))
        points.append(Point(f"step-{k:0{width}d}", tuple(weights)))
    return tuple(points)


def grid(parts: int, tasks: int = 3) -> tuple[Point, ...]:
    """Returns all preferences over three tasks in whole parts: (i, j, k) / parts, each named i-j-k, sorted by name.

    >>> [point.name for point in grid(2)]
    ['0-0-2', '0-1-1', '0-2-0', '1-0-1', '1-1-0', '2-0-0']
    >>> [str(weight) for weight in grid(2)[1].weights]
    ['0', '1/2', '1/2']
    """
    if tasks != 3:
        raise InputError(f"a grid is for three tasks, and there are {tasks}: sweep along a line instead")
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise InputError(f"the grid has {parts!r} parts, expected a whole number, 1 or more")
    width = len(str(parts))
    places = [(i, j, parts - i - j) for i in range(parts + 1) for j in range(parts + 1 - i)]
    return tuple(
        Point("-".join(f"{n:0{width}d}" for n in place), tuple(Fraction(n, parts) for n in place)) for place in places
    )


def listed(weights_by_name: Mapping[str, Sequence[Any]] | Sequence[tuple[str, Sequence[Any]]]) -> tuple[Point, ...]:
    """Returns points for weights by name, numbered so that names sort in the same order: 00-NAME, 01-NAME.

    >>> [point.name for point in listed({"site a": [3, 1], "home": [0, 1]})]
    ['00-site-a', '01-home']
    """
    pairs = list(weights_by_name.items() if isinstance(weights_by_name, Mapping) else weights_by_name)
    width = max(2, len(str(len(pairs) - 1)))
    points = []
    for k, (name, weights) in enumerate(pairs):
        with_name = f"{k:0{width}d}-{re.sub(r'[^A-Za-z0-9_]+', '-', name)}".rstrip("-")
        points.append(Point(with_name, _exact(weights, name, normalise=False)))
    return tuple(points)


def _exact(weights: Sequence[Any], what: str, normalise: bool) -> tuple[Fraction, ...]:
    try:
        read = read_weights(weights, len(weights))
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    assert read is not None
    total = sum(read) if normalise else 1
    return tuple(weight / total for weight in read)
