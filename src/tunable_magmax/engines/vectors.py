"""Values of opened checkpoints and adapters, for any range of a tensor: read when needed, or all read at once.

The product of an adapter's two factors is computed range by range and is never whole in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened
from tunable_magmax.checkpoints.lora.adapter import Adapter, LowRank
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.files import Progress
from tunable_magmax.merging.layout import Layout, Mergeable
from tunable_magmax.merging.reading import Vectors, widen
from tunable_magmax.merging.resources import loops_compile

Floats: TypeAlias = NDArray[np.float64]

TILE = 1 << 15
"""Elements of a factor that are in memory at once; as many as the rank if that is more."""
SUMS = 1 << 17
"""Elements of a product that are summed at once. The more, the less often a factor is read again."""


def working_bytes(adapter: Adapter) -> int:
    """Returns the memory of a thread that computes values: sums, and of each factor a tile as stored and in float64."""
    largest = max((product.rank for product in adapter.products), default=0)
    return 8 * (SUMS + 2 * 3 * max(TILE, largest)) if largest else 0


def factor_bytes(adapter: Adapter) -> int:
    """Returns the size of the largest right factor in float64, which is kept during a walk if there is room."""
    return max((8 * product.rank * product.columns for product in adapter.products), default=0)


class FileVectors:
    """`Vectors` over opened checkpoints: bytes go straight to the scratch, or through a raw buffer if types differ.

    An adapter's values are computed from the base's, which are mostly at hand: a chunk is read from the base first.
    `room` is how many bytes of factors may be kept for that.
    """

    borrows = True

    def __init__(self, checkpoints: Sequence[Opened], room: int = 0) -> None:
        self._checkpoints = checkpoints
        self._products = Products(room)
        self._local = threading.local()

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        opened = self._checkpoints[source]
        if isinstance(opened, Adapter):
            return self.adapted(source, tensor, start, stop, self._read_base(tensor, start, stop, scratch), scratch)
        assert isinstance(opened, Checkpoint)
        values = self._fill(opened, tensor.infos[source], start, stop, scratch)
        if source == 0:
            self._local.base = (tensor.name, start, stop), values
        return values

    def adapted(self, source: int, tensor: Mergeable, start: int, stop: int, base: Tensor, scratch: Tensor) -> Tensor:
        """Returns the adapted values start:stop, or the base's themselves if the adapter does not change the tensor."""
        adapter = self._checkpoints[source]
        assert isinstance(adapter, Adapter)
        part = adapter.parts.get(tensor.infos[source].name)
        if part is None:
            return base
        if part.whole is not None:
            self._fill(adapter.stored, part.whole, start, stop, scratch)
        else:
            scratch.copy_(base)
        if part.product is not None:
            self._products.add((source, tensor.name), adapter.stored, part.product, start, stop, scratch)
        return scratch

    def _read_base(self, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        """Returns the base's values: those that this thread has read last, or read to `scratch`."""
        place, values = getattr(self._local, "base", (None, scratch))
        if place == (tensor.name, start, stop):
            return values
        base = self._checkpoints[0]
        assert isinstance(base, Checkpoint)
        return self._fill(base, tensor.infos[0], start, stop, scratch)

    def _fill(self, checkpoint: Checkpoint, info: TensorInfo, start: int, stop: int, scratch: Tensor) -> Tensor:
        stored = torch_dtype(info.dtype)
        assert stored is not None
        if stored == scratch.dtype:
            checkpoint.read_into(info.name, start * stored.itemsize, scratch.numpy().data)
            return scratch
        raw = self._raw((stop - start) * stored.itemsize)
        checkpoint.read_into(info.name, start * stored.itemsize, raw.numpy().data)
        return widen(raw.view(stored), scratch)

    def _raw(self, size: int) -> Tensor:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < size:
            self._local.buffer = buffer = torch.empty(size, dtype=torch.uint8)
        assert isinstance(buffer, Tensor)
        return buffer[:size]


class DeviceVectors:
    """`Vectors` on a GPU: what other vectors read on the host, copied through page-locked memory."""

    borrows = True

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors
        self._local = threading.local()

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        host = self._host("task" if source else "base", scratch.nbytes).view(scratch.dtype)
        return scratch.copy_(self._vectors.read(source, tensor, start, stop, host))

    def _host(self, name: str, size: int) -> Tensor:
        """Returns this thread's buffer; that of the base is its own, from which values of adapters are made."""
        held = self._local.__dict__
        if name not in held or held[name].numel() < size:
            held[name] = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        buffer: Tensor = held[name]
        return buffer[:size]


class LoadedVectors:
    """`Vectors` over opened checkpoints, all read into memory at once, each tensor in the type that it is stored in.

    Adapters are not read: their values are computed from the base's when asked for.
    """

    borrows = False

    def __init__(
        self, checkpoints: Sequence[Opened], layout: Layout, threads: int, progress: Progress | None = None
    ) -> None:
        self._derived = layout.derived
        self._files = FileVectors(checkpoints, layout.factor_bytes)
        wanted = tensors_to_load(layout)
        total, done = sum(info.nbytes for info in wanted.values()), 0

        def load(place: tuple[int, str]) -> Tensor:
            info, checkpoint = wanted[place], checkpoints[place[0]]
            stored = torch_dtype(info.dtype)
            assert isinstance(checkpoint, Checkpoint)
            assert stored is not None
            raw = torch.empty(info.nbytes, dtype=torch.uint8)
            checkpoint.read_into(info.name, 0, raw.numpy().data)
            return raw.view(stored)

        self._flat: dict[tuple[int, str], Tensor] = {}
        with ThreadPoolExecutor(threads) as pool:
            for place, values in zip(wanted, pool.map(load, wanted), strict=True):
                self._flat[place] = values
                done += values.nbytes
                if progress is not None:
                    progress("survey", done, total)

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        if source in self._derived:
            base = self.read(0, tensor, start, stop, scratch)
            return self._files.adapted(source, tensor, start, stop, base, scratch)
        values = self._flat[source, tensor.infos[source].name][start:stop]
        return values if values.dtype == scratch.dtype else scratch.copy_(values)


def tensors_to_load(layout: Layout) -> dict[tuple[int, str], TensorInfo]:
    """Returns the tensors to read of each source, each once even if other sources hold it under two names."""
    return {
        (k, info.name): info
        for tensor in layout.mergeable
        for k, info in enumerate(tensor.infos)
        if k not in layout.derived
    }


class Products:
    """Products of stored factors, for any range of them. Threads share right factors, kept up to `room` bytes.

    A range has few rows but all columns, so each needs a little of the left factor and all of the right one.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: dict[tuple[int, str], Floats] = {}
        self._lock = threading.Lock()

    def add(
        self, key: tuple[int, str], stored: Checkpoint, product: LowRank, start: int, stop: int, out: Tensor
    ) -> None:
        """Adds elements start:stop of the flattened product to `out`.

        `key` is of this product alone: a source and a tensor's name. Each element is a sum of its own
        (`Loops`), so that neither the range, nor the tiles, nor what was kept show in it.
        """
        loops, values = fastest_loops(), out.numpy()
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
                        loops.accumulate(left[first - top : last - top], k, right, column, sums)
                    loops.add_scaled(sums, product.scaling, values, first * columns + at - start, columns)

    def _right(self, key: tuple[int, str], stored: Checkpoint, product: LowRank) -> Floats | None:
        """Returns the whole right factor, [r, m], or None if there is no room for it."""
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
    """Returns how many columns and ranks of the right factor to read at once.

    They should be contiguous: all columns of some ranks, or if the factor is transposed, all ranks of some columns.
    """
    width = max(1, min(product.columns, TILE // product.rank if turned else SUMS))
    return width, product.rank if turned else max(1, TILE // width)


def _whole(stored: Checkpoint, product: LowRank) -> Floats:
    """Reads the right factor, tile by tile."""
    right = np.empty((product.rank, product.columns))
    width, depth = _tile(product, turned=product.transposed)
    for k in range(0, product.rank, depth):
        for at in range(0, product.columns, width):
            last = min(product.columns, at + width)
            right[k : k + depth, at:last] = _right(stored, product, k, k + depth, at, last)
    return right


def rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Splits a range of a flattened matrix into at most three rectangles (rows first:last, columns first:last).

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


def _left(stored: Checkpoint, product: LowRank, first: int, last: int) -> Floats:
    """Reads rows first:last of the left factor, [n, r]: of B, or columns of A where the product is transposed."""
    if product.transposed:
        return np.ascontiguousarray(_block(stored, product.a, product.rank, 0, product.rank, first, last).T)
    return _block(stored, product.b, product.b.shape[0], first, last, 0, product.rank)


def _right(stored: Checkpoint, product: LowRank, low: int, high: int, first: int, last: int) -> Floats:
    """Reads ranks low:high, as far as they exist, and columns first:last of the right factor, [k, m]."""
    high = min(high, product.rank)
    if product.transposed:
        return np.ascontiguousarray(_block(stored, product.b, product.b.shape[0], first, last, low, high).T)
    return _block(stored, product.a, product.rank, low, high, first, last)


def _block(stored: Checkpoint, info: TensorInfo, rows: int, top: int, bottom: int, first: int, last: int) -> Floats:
    """Reads rows top:bottom and columns first:last of a stored matrix, at once where they are contiguous."""
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


# -- the arithmetic ---------------------------------------------------------------------------------------------------


class Loops(NamedTuple):
    """The two steps of out + scaling * (left @ right), with every rounding fixed, so that no cut into tiles shows.

    A matrix product of a library sums in an order that depends on the shapes. Here each element is a sum of its own:
    s = 0, then s = round(s + round(left[i, k] * right[k, j])) for k in order, all in float64; at the end
    out = round(out + delta), where delta is scaling * s rounded to float64 and then to the type of `out`.
    """

    accumulate: Callable[[Floats, int, Floats, int, Floats], None]
    """accumulate(left, rank, right, column, sums): add to `sums` [n, m] the ranks that `right` [k, ...] holds.

    Its first is the given one of left [n, r]. The sums are of its columns from the given one on. Arrays are contiguous.
    """
    add_scaled: Callable[[Floats, float, NDArray[Any], int, int], None]
    """add_scaled(sums, scaling, out, first, stride): add to the flat `out`: row i begins at first + i * stride."""


def _accumulate(left: Floats, rank: int, right: Floats, column: int, sums: Floats) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found and named by the survey
        for k, line in enumerate(right[:, column : column + sums.shape[1]], start=rank):
            sums += left[:, k : k + 1] * line


def _add_scaled(sums: Floats, scaling: float, out: NDArray[Any], first: int, stride: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        for i, delta in enumerate((scaling * sums).astype(out.dtype)):
            out[first + i * stride :][: delta.size] += delta


PORTABLE = Loops(_accumulate, _add_scaled)
"""On numpy, where numba may not compile."""


def _accumulate_by_four(left: Floats, rank: int, right: Floats, column: int, sums: Floats) -> None:
    """Adds four ranks in a go, so that sums are loaded and stored less often; for numba."""
    width = sums.shape[1]
    last = column + width
    ranks = right.shape[0]
    whole = ranks - ranks % 4
    for i in range(left.shape[0]):
        row = sums[i]
        factor = left[i, rank : rank + ranks]
        for k in range(0, whole, 4):
            f0, f1, f2, f3 = factor[k], factor[k + 1], factor[k + 2], factor[k + 3]
            r0, r1 = right[k, column:last], right[k + 1, column:last]
            r2, r3 = right[k + 2, column:last], right[k + 3, column:last]
            for j in range(width):
                row[j] = (((row[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
        for k in range(whole, ranks):
            f0, r0 = factor[k], right[k, column:last]
            for j in range(width):
                row[j] += f0 * r0[j]


def _add_scaled_one_by_one(sums: Floats, scaling: float, out: NDArray[Any], first: int, stride: int) -> None:
    """Adds without intermediate arrays; for numba."""
    for i in range(sums.shape[0]):
        row = out[first + i * stride : first + i * stride + sums.shape[1]]
        for j in range(sums.shape[1]):
            row[j] += out.dtype.type(scaling * sums[i, j])


@cache
def fastest_loops() -> Loops:
    """Returns loops compiled without fast-math or fused operations, or numpy's where numba may not compile."""
    if not loops_compile():
        return PORTABLE
    from tunable_magmax.merging.kernels.loops import compiled

    return Loops(compiled()(_accumulate_by_four), compiled()(_add_scaled_one_by_one))
