"""Reads what users give, numpy or torch, as checked arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tunable_magmax.errors import InputError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Matrix: TypeAlias = NDArray[Any]


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
    if samples < 1 or (most is not None and most < 1):
        raise InputError(f"there are {samples} samples, of which {most} are to be used: both must be at least 1")
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
