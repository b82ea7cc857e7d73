"""Seeded draws of samples: orders, a share of each class, and at most so many of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tunable_magmax.lottery import MASK, lottery_state, ticket

# Streams of the lottery; merges use 0 to 3.
SPLIT_STREAM = 16
LIMIT_STREAM = 17
ORDER_STREAM = 18
HELD_STREAM = 19
KEPT_STREAM = 20
FOLD_STREAM = 24
CHOICE_STREAM = 26


def drawn(positions: Sequence[int], seed: int, stream: int) -> list[int]:
    """Returns positions in the order of their lottery numbers, one of the streams above."""
    start = lottery_state(seed & MASK, stream, 0)
    return sorted(positions, key=lambda p: (ticket(start, p), p))


def shuffled(count: int, seed: int) -> list[int]:
    """Returns 0 .. count - 1 in an order that only the seed decides, whatever the versions of Python and NumPy.

    >>> shuffled(5, seed=3) == shuffled(5, seed=3), sorted(shuffled(5, seed=3))
    (True, [0, 1, 2, 3, 4])
    """
    return drawn(range(count), seed, ORDER_STREAM)


def split_groups(groups: Sequence[Hashable], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Returns positions for training and for testing, ascending: `share` of each group, such as a class.

    A group of two or more has samples on both sides.

    >>> split_groups(["a", "a", "b", "b", "b"], 0.2, seed=0)[1]
    [0, 4]
    """
    return _divided(drawn(range(len(groups)), seed, SPLIT_STREAM), groups, share, least=1)


def held_out(
    positions: Sequence[int], groups: Sequence[Hashable], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Returns positions that stay and those held out, ascending: `share` of each group, which keeps at least one.

    >>> held_out([0, 1, 2, 4], ["a", "a", "a", "a", "b"], 0.3, seed=0)
    ([0, 1, 4], [2])
    """
    return _divided(drawn(positions, seed, HELD_STREAM), groups, share, least=0)


def limited(positions: Sequence[int], groups: Sequence[Hashable], most: int, seed: int) -> list[int]:
    """Draws at most `most` positions of each group; `groups` holds the group of each position. Ascending."""
    order = drawn(positions, seed, LIMIT_STREAM)
    return sorted(p for members in _members(order, groups) for p in members[:most])


def _divided(order: Sequence[int], groups: Sequence[Hashable], share: float, least: int) -> tuple[list[int], list[int]]:
    """Returns the positions that stay, and the first `share` of each group (at least `least`), which do not."""
    taken: set[int] = set()
    for members in _members(order, groups):
        taken.update(members[: min(max(least, round(len(members) * share)), len(members) - 1)])
    return sorted(set(order) - taken), sorted(taken)


def _members(order: Sequence[int], groups: Sequence[Hashable]) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for position in order:
        members.setdefault(groups[position], []).append(position)
    return list(members.values())
