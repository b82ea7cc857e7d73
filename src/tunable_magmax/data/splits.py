"""Seeded draws of samples: which are for testing, and which stay when there is a limit. The lottery decides."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tunable_magmax.lottery import MASK, drum, ticket

# Streams of the lottery; merges use 0 to 3.
SPLIT = 16
LIMIT = 17
ORDER = 18
HELD = 19


def shuffled(count: int, seed: int, stream: int = ORDER) -> list[int]:
    """0 .. count - 1 in an order that only the seed decides, whatever the versions of Python and numpy.

    >>> shuffled(5, seed=3) == shuffled(5, seed=3), sorted(shuffled(5, seed=3))
    (True, [0, 1, 2, 3, 4])
    """
    start = drum(seed & MASK, stream, 0)
    return sorted(range(count), key=lambda p: (ticket(start, p), p))


def split_all(size: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Positions for training and for testing, ascending: `share` of all samples, drawn without regard to classes.

    >>> [len(part) for part in split_all(30, 0.2, seed=0)]
    [24, 6]
    """
    drawn = shuffled(size, seed, SPLIT)
    cut = min(max(1, round(size * share)), size - 1) if size > 1 else 0
    return sorted(drawn[cut:]), sorted(drawn[:cut])


def split_each(groups: Sequence[Hashable], share: float, seed: int) -> tuple[list[int], list[int]]:
    """The same inside each group, such as a class: a group of two or more has samples on both sides.

    >>> split_each(["a", "a", "b", "b", "b"], 0.2, seed=0)[1]
    [0, 4]
    """
    chosen: set[int] = set()
    for members in _members(shuffled(len(groups), seed, SPLIT), groups).values():
        count = min(max(1, round(len(members) * share)), len(members) - 1)
        chosen.update(members[:count])
    return [p for p in range(len(groups)) if p not in chosen], sorted(chosen)


def held_out(
    positions: Sequence[int], groups: Sequence[Hashable], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Positions that stay and those held out, ascending: `share` of each group, which keeps at least one.

    >>> held_out([0, 1, 2, 4], ["a", "a", "a", "a", "b"], 0.3, seed=0)
    ([0, 1, 4], [2])
    """
    start = drum(seed & MASK, HELD, 0)
    drawn = sorted(positions, key=lambda p: (ticket(start, p), p))
    held = {
        p
        for members in _members(drawn, groups).values()
        for p in members[: min(round(len(members) * share), len(members) - 1)]
    }
    return [p for p in positions if p not in held], sorted(held)


def limited(positions: Sequence[int], groups: Sequence[Hashable], most: int, seed: int) -> list[int]:
    """At most so many positions of each group, drawn by the seed, ascending. `groups` counts by position."""
    start = drum(seed & MASK, LIMIT, 0)
    drawn = sorted(positions, key=lambda p: (ticket(start, p), p))
    return sorted(p for members in _members(drawn, groups).values() for p in members[:most])


def _members(order: Sequence[int], groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for position in order:
        found.setdefault(groups[position], []).append(position)
    return found
