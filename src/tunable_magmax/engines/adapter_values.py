"""Values of the model that an adapter makes of its base, for any range of a tensor: the product is never whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.lora.adapter import Adapter, LowRank
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.merging.kernels.low_rank import low_rank_kernels

TILE = 1 << 15
"""Elements of a factor that are in memory at once; as many as the rank if that is more."""
SUMS = 1 << 17
"""Elements of a product that are summed at once. The more, the less often a factor is read again."""


def working_bytes(adapter: Adapter) -> int:
    """What a thread needs to compute values: the sums, and of each factor a tile as stored, in float64, and turned."""
    largest = max((product.rank for product in adapter.products), default=0)
    return 8 * (SUMS + 2 * 3 * max(TILE, largest)) if largest else 0


def factor_bytes(adapter: Adapter) -> int:
    """The largest right factor in float64, as it is kept while a tensor is walked over if there is room."""
    return max((8 * product.rank * product.columns for product in adapter.products), default=0)


class Products:
    """Products of stored factors, for any range of them. Threads share right factors, kept up to `room` bytes.

    A range has few rows but all columns, so each needs a little of the left factor and all of the right one.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: dict[tuple[int, str], NDArray[np.float64]] = {}
        self._lock = threading.Lock()

    def add(
        self, key: tuple[int, str], stored: Checkpoint, product: LowRank, start: int, stop: int, out: Tensor
    ) -> None:
        """Add elements start:stop of the flattened product to `out`, which holds what they are added to.

        `key` is of this product alone: a source and a tensor's name. Each element is a sum of its own
        (`kernels.low_rank`), so that neither the range, nor the tiles, nor what was kept show in it.
        """
        kernels, values = low_rank_kernels(), out.numpy()
        kept = self._right(key, stored, product)
        columns, rank = product.columns, product.rank
        width, depth = _tile(product, turned=product.transposed and kept is None)
        height = max(1, min(SUMS // width, TILE // rank))
        for top in range(start // columns, -(-stop // columns), height):
            bottom = min(top + height, -(-stop // columns))
            left = _left(stored, product, top, bottom)
            part = max(start, top * columns), min(stop, bottom * columns)
            for first, last, begin, end in rectangles(*part, columns):
                for at in range(begin, end, width):
                    sums = np.zeros((last - first, min(width, end - at)))
                    for k in range(0, rank, depth):
                        if kept is not None:
                            right, column = kept[k : k + depth], at
                        else:
                            right, column = _right(stored, product, k, k + depth, at, at + sums.shape[1]), 0
                        kernels.accumulate(left[first - top : last - top], k, right, column, sums)
                    kernels.settle(sums, product.scaling, values, first * columns + at - start, columns)

    def _right(self, key: tuple[int, str], stored: Checkpoint, product: LowRank) -> NDArray[np.float64] | None:
        """The whole right factor, [r, m], or None if there is no room for it."""
        with self._lock:
            if key not in self._kept:
                need = 8 * product.rank * product.columns
                if need > self._free():
                    # The walk has passed other tensors. Those of this one stay: its tasks come round again and again.
                    self._kept = {other: right for other, right in self._kept.items() if other[1] == key[1]}
                if need > self._free():
                    return None
                self._kept[key] = _whole(stored, product)
            return self._kept[key]

    def _free(self) -> int:
        return self._room - sum(right.nbytes for right in self._kept.values())


def _tile(product: LowRank, turned: bool) -> tuple[int, int]:
    """Columns and ranks of the right factor to take at once.

    They should be one stretch: all columns of some ranks, or if the factor is read the other way round, all ranks of
    some columns.
    """
    width = max(1, min(product.columns, TILE // product.rank if turned else SUMS))
    return width, product.rank if turned else max(1, TILE // width)


def _whole(stored: Checkpoint, product: LowRank) -> NDArray[np.float64]:
    """The right factor, tile by tile."""
    right = np.empty((product.rank, product.columns))
    width, depth = _tile(product, turned=product.transposed)
    for k in range(0, product.rank, depth):
        for at in range(0, product.columns, width):
            last = min(product.columns, at + width)
            right[k : k + depth, at:last] = _right(stored, product, k, k + depth, at, last)
    return right


def rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """A range of a flattened matrix as at most three rectangles (first row, last row, first column, last column).

    >>> list(rectangles(3, 17, 5))
    [(0, 1, 3, 5), (1, 3, 0, 5), (3, 4, 0, 2)]
    """
    row, cut = divmod(start, columns)
    last, rest = divmod(stop, columns)
    if row == last:
        yield row, row + 1, cut, rest
        return
    if cut:
        yield row, row + 1, cut, columns
        row += 1
    if row < last:
        yield row, last, 0, columns
    if rest:
        yield last, last + 1, 0, rest


def _left(stored: Checkpoint, product: LowRank, first: int, last: int) -> NDArray[np.float64]:
    """Rows first:last of the left factor, [n, r]: of B, or columns of A where the product is transposed."""
    if product.transposed:
        return np.ascontiguousarray(_block(stored, product.a, product.rank, 0, product.rank, first, last).T)
    return _block(stored, product.b, product.b.shape[0], first, last, 0, product.rank)


def _right(stored: Checkpoint, product: LowRank, low: int, high: int, first: int, last: int) -> NDArray[np.float64]:
    """Ranks low:high, as far as there are so many, and columns first:last of the right factor, [k, m]."""
    high = min(high, product.rank)
    if product.transposed:
        return np.ascontiguousarray(_block(stored, product.b, product.b.shape[0], first, last, low, high).T)
    return _block(stored, product.a, product.rank, low, high, first, last)


def _block(
    stored: Checkpoint, info: TensorInfo, rows: int, top: int, bottom: int, first: int, last: int
) -> NDArray[np.float64]:
    """Rows top:bottom and columns first:last of a stored matrix, read at once where they are one stretch."""
    dtype = torch_dtype(info.dtype)
    assert dtype is not None
    columns = info.numel // rows
    raw = torch.empty((bottom - top, last - first), dtype=dtype)
    lines = raw.view(torch.uint8).numpy()
    if last - first == columns:
        stored.read_into(info.name, top * columns * dtype.itemsize, lines.data)
    else:
        for row, line in enumerate(lines, start=top):
            stored.read_into(info.name, (row * columns + first) * dtype.itemsize, line.data)
    return raw.double().numpy()
