"""Reads what users give, numpy or torch, as checked arrays; and seeded draws of samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.lottery import MASK, lottery_state, ticket

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Matrix: TypeAlias = NDArray[Any]
MUCH_WORK = 1e9
"""Multiplications. A fit of the studio, far below it, took 0.30 s with two threads and 0.19 with one."""


def as_numpy(value: Any, name: str) -> NDArray[Any]:
    """Returns `value` (list, numpy or torch, on any device) as a numpy array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InputError(f"{name}: expected numbers, found {array.dtype}")
    return array


def feature_matrix(value: Any, name: str) -> Matrix:
    """Returns `value` as a finite matrix of its own type [samples, width] with at least one row."""
    array = as_numpy(value, name)
    if array.ndim != 2:
        raise InputError(f"{name}: expected a matrix [samples, width], found shape {list(array.shape)}")
    if not array.size:
        raise InputError(f"{name}: no samples, or features of width 0: found shape {list(array.shape)}")
    bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if bad.size:
        shown = f"first in row {int(bad[0])} (counting from 0)"
        raise InputError(f"{name}: {bad.size} of {len(array)} rows hold NaN or infinity, {shown}; leave them out")
    return array


def choose_rows(samples: int, most: int | None, seed: int = 0) -> list[int]:
    """Returns which of many samples are used: a seeded draw of `most` in ascending order, or all.

    >>> choose_rows(3, 500), len(choose_rows(10_000, 500))
    ([0, 1, 2], 500)
    """
    if most is None or samples <= most:
        return list(range(samples))
    drawn: list[int] = np.sort(np.random.default_rng(seed).permutation(samples)[:most]).tolist()
    return drawn


def unit_rows(matrix: Matrix) -> Floats:
    """Returns rows of length 1, in float64; rows of zeros stay.

    >>> unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    rows = matrix.astype(np.float64)
    # The largest entry first: squares of huge or tiny numbers leave float64.
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows /= np.where(largest > 0, largest, 1.0)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(lengths > 0, lengths, 1.0)
    return rows


@contextmanager
def one_thread(work: float = 0.0) -> Iterator[None]:
    """Lets torch use one thread, unless there is much `work`, in multiplications: threads of little work mostly wait.

    Sums then do not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    if work < MUCH_WORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def product(one: Matrix, other: Matrix) -> Floats:
    """Returns a product of matrices in float64, by torch, whose number of threads can be set.

    >>> product(np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]]))
    array([[11.]])
    """
    with one_thread(one.size * other.shape[1]):
        found: Floats = (torch.from_numpy(one.astype(np.float64)) @ torch.from_numpy(other.astype(np.float64))).numpy()
    return found


# -- draws by the lottery ---------------------------------------------------------------------------------------------

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


def held_out(
    positions: Sequence[int],
    groups: Sequence[Hashable],
    share: float,
    seed: int,
    stream: int = HELD_STREAM,
    least: int = 0,
) -> tuple[list[int], list[int]]:
    """Returns positions that stay and those held out, ascending: `share` of each group (at least `least`), such as a
    class, which keeps at least one; `groups` holds the group of each position.

    >>> held_out([0, 1, 2, 4], ["a", "a", "a", "a", "b"], 0.3, seed=0)
    ([0, 1, 4], [2])
    """
    taken: set[int] = set()
    for members in _members(drawn(positions, seed, stream), groups):
        taken.update(members[: min(max(least, round(len(members) * share)), len(members) - 1)])
    return sorted(set(positions) - taken), sorted(taken)


def limited(positions: Sequence[int], groups: Sequence[Hashable], most: int, seed: int) -> list[int]:
    """Draws at most `most` positions of each group; `groups` holds the group of each position. Ascending."""
    order = drawn(positions, seed, LIMIT_STREAM)
    return sorted(p for members in _members(order, groups) for p in members[:most])


def _members(order: Sequence[int], groups: Sequence[Hashable]) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for position in order:
        members.setdefault(groups[position], []).append(position)
    return list(members.values())
