"""The values of opened checkpoints and adapters, for any range of a tensor."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunable_magmax.checkpoints.adapter import Adapter, LowRank
from tunable_magmax.checkpoints.checkpoint import Checkpoint, Opened
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.merging.resources import loops_compile
from tunable_magmax.merging.walker import Source


def file_sources(checkpoints: Sequence[Opened], device: torch.device | None = None) -> list[Source]:
    """Returns the values of the base (first) and of tasks, read from their files when they are asked for."""
    base = checkpoints[0]
    assert isinstance(base, Checkpoint)
    first = LastRead(FileSource(base))
    sources: list[Source] = [first]
    for task in checkpoints[1:]:
        if isinstance(task, Adapter):
            sources.append(AdapterSource(task, first))
        else:
            assert isinstance(task, Checkpoint)
            sources.append(FileSource(task))
    return sources if device is None or device.type == "cpu" else [DeviceSource(source) for source in sources]


class FileSource:
    """A checkpoint's files: bytes go straight to the scratch, or through a raw buffer if types differ."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._local = threading.local()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        stored = _stored_dtype(self._checkpoint.tensors[name])
        if stored == scratch.dtype:
            self._checkpoint.read_into(name, start * stored.itemsize, scratch.view(torch.uint8).numpy().data)
            return scratch
        raw = _buffer(self._local, (stop - start) * stored.itemsize)
        self._checkpoint.read_into(name, start * stored.itemsize, raw.numpy().data)
        return widen(raw.view(stored), scratch)


class LastRead:
    """Another source, of which each thread remembers the values that it has read last.

    They are asked for again by adapters, whose values are computed from them; nobody changes them until then.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._local = threading.local()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        asked, (last, values) = (name, start, stop), getattr(self._local, "last", (None, scratch))
        if asked != last or values.dtype != scratch.dtype:
            values = self._source.read(name, start, stop, scratch)
            self._local.last = asked, values
        return values

    def forget(self) -> None:
        """Forgets what this thread has read last."""
        self._local.last = None, torch.empty(0)


class DeviceSource:
    """Another source on a GPU: what it reads on the host, copied through page-locked memory."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._local = threading.local()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        host = _buffer(self._local, scratch.nbytes, pin_memory=torch.cuda.is_available()).view(scratch.dtype)
        return scratch.copy_(self._source.read(name, start, stop, host))


class AdapterSource:
    """A LoRA adapter on a base: the base's values plus a product of two factors, which are read whole, into float64."""

    def __init__(self, adapter: Adapter, base: LastRead) -> None:
        self._adapter, self._base = adapter, base
        self._stored = FileSource(adapter.stored)
        self._factors: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._room = factor_bytes(adapter)
        self._lock = threading.Lock()

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        part = self._adapter.parts.get(name)
        if part is None:
            return self._base.read(name, start, stop, scratch)
        if part.whole is not None:
            self._stored.read(part.whole.name, start, stop, scratch)
        else:
            values = self._base.read(name, start, stop, scratch)
            if values.data_ptr() != scratch.data_ptr():
                scratch.copy_(values)
            else:  # they are about to change
                self._base.forget()
        if part.product is not None:
            left, right = self._whole(name, part.product)
            add_product(left, right, part.product.scaling, scratch, start)
        return scratch

    def _whole(self, name: str, product: LowRank) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the factors [n, r] and [r, m] of a tensor's product; those used last are kept."""
        with self._lock:
            pair = self._factors.pop(name, None)
            if pair is None:
                a = self._matrix(product.a, product.rank)
                b = self._matrix(product.b, product.b.shape[0])
                left, right = (a.T, b.T) if product.transposed else (b, a)
                pair = np.ascontiguousarray(left), np.ascontiguousarray(right)
            self._factors[name] = pair
            while sum(a.nbytes + b.nbytes for a, b in self._factors.values()) > self._room:
                del self._factors[next(iter(self._factors))]
            return pair

    def _matrix(self, info: TensorInfo, rows: int) -> NDArray[np.float64]:
        stored = torch.empty(info.numel, dtype=_stored_dtype(info))
        return self._stored.read(info.name, 0, info.numel, stored).view(rows, -1).double().numpy()


def factor_bytes(adapter: Adapter) -> int:
    """Returns the memory that an adapter's factors take: threads work on two tensors at a time, most often."""
    sizes = [8 * product.rank * (product.shape[0] + product.columns) for product in adapter.products]
    return 2 * max(sizes, default=0)


def add_product(left: NDArray[np.float64], right: NDArray[np.float64], scaling: float, out: Tensor, start: int) -> None:
    """Adds elements of scaling * (left @ right), flattened, to `out`, from the element `start` on.

    A matrix product of a library sums in an order that depends on the shapes. Here each element is a sum of its own:
    s = 0, then s = round(s + round(left[i, k] * right[k, j])) for k in order, all in float64; at the end
    out = round(out + delta), where delta is scaling * s rounded to float64 and then to the type of `out`.

    >>> out = torch.ones(3)
    >>> add_product(np.array([[1.0], [2.0]]), np.array([[1.0, 3.0]]), 0.5, out, 1)
    >>> out
    tensor([2.5000, 2.0000, 4.0000])
    """
    if loops_compile():
        from tunable_magmax.merging.kernels import value_loops

        value_loops.add_product(left, right, scaling, out.numpy(), start)
        return
    values, columns = out.numpy(), right.shape[1]
    first = start // columns
    sums = np.zeros((-(-(start + len(values)) // columns) - first, columns))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found and named by the survey
        for k, line in enumerate(right):
            sums += left[first : first + len(sums), k : k + 1] * line
        delta = (scaling * sums).astype(values.dtype).reshape(-1)
        values += delta[start - first * columns :][: len(values)]


def widen(stored: Tensor, out: Tensor) -> Tensor:
    """Writes values in a wider type, on this thread alone: torch would share each copy among threads of its own.

    >>> widen(torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.empty(2))
    tensor([ 1.5000, -2.0000])
    """
    if stored.dtype == torch.bfloat16 and out.dtype == torch.float32:
        bits = stored.view(torch.uint8).numpy().view(np.uint16)
        np.left_shift(bits, 16, out=out.numpy().view(np.uint32), dtype=np.uint32)
        return out
    return out.copy_(stored)


def _stored_dtype(info: TensorInfo) -> torch.dtype:
    dtype = torch_dtype(info.dtype)
    assert dtype is not None
    return dtype


def _buffer(held: threading.local, size: int, pin_memory: bool = False) -> Tensor:
    """Returns a thread's buffer of so many bytes."""
    buffer = getattr(held, "buffer", None)
    if buffer is None or buffer.numel() < size:
        held.buffer = buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    assert isinstance(buffer, Tensor)
    return buffer[:size]
