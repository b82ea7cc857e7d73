"""Chunks of base and tasks, read by the thread that works on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tunable_magmax.errors import InputError
from tunable_magmax.merging.kernels import Chunk, Kernels, TensorPlace, TensorRange
from tunable_magmax.merging.layout import Layout, Mergeable
from tunable_magmax.merging.resources import MemoryPlan


def cast_copied(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Copies the base's values in the output type; a finite value that does not fit is an `InputError`."""
    cast = before_cast(values, dtype).to(dtype, copy=True)
    if bool((values.isfinite() & ~cast.isfinite()).any()):
        raise does_not_fit(name, "copied", dtype)
    return cast


def before_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float64 to float32 if a 16-bit type comes next, as the specification says."""
    return values.float() if values.dtype == torch.float64 and dtype.itemsize == 2 else values


def does_not_fit(name: str, kind: str, dtype: torch.dtype) -> InputError:
    """Returns the error for a value that the output type cannot hold."""
    return InputError(
        f"{name!r}: a {kind} value does not fit in {str(dtype).removeprefix('torch.')}; choose a wider out_dtype"
    )


class Vectors(Protocol):
    """Where values come from. Source 0 is the base, t the t-th task."""

    borrows: bool
    """Whether reads need memory of their own (files) or are mostly views (tensors in memory)."""

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        """Returns values start:stop of the flattened tensor in the working type: a view, or written to `scratch`."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is merged: the tensors of base and tasks, where their values come from, and what messages call them."""

    layout: Layout
    vectors: Vectors
    labels: Sequence[str]
    """Of the base and of each task."""
    notes: tuple[str, ...] = ()
    """Warnings for the report."""


def working_dtype(tensor: Mergeable) -> torch.dtype:
    """Returns the type in which a tensor is merged: float64 if any source has it so, else float32."""
    return torch.float64 if tensor.working == "F64" else torch.float32


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


class Buffers:
    """Memory for chunks, by thread and name; each is made once, of the widest working type, and used over and over."""

    def __init__(self, layout: Layout, kernels: Kernels, chunk: int) -> None:
        wide = any(tensor.working == "F64" for tensor in layout.mergeable)
        self._kernels, self._chunk = kernels, chunk
        self._widest = torch.float64 if wide else torch.float32
        self._local = threading.local()

    def own(self, name: Any, size: int, dtype: torch.dtype) -> Tensor:
        """Returns the buffer of this name in this thread."""
        held = self._local.__dict__
        buffer = held.get(name)
        if buffer is None:
            buffer = held[name] = self._kernels.empty(self._chunk, self._widest)
        return buffer.view(dtype)[:size]


class ChunkReader:
    """Reads ranges as chunks, in memory of the thread that asks: a chunk holds until it asks for the next."""

    def __init__(self, layout: Layout, vectors: Vectors, tasks: int, buffers: Buffers) -> None:
        self._layout, self._vectors, self._tasks, self._buffers = layout, vectors, tasks, buffers

    def chunk(self, bounds: TensorRange, wanted: Collection[int]) -> Chunk:
        """Reads the base's and the `wanted` tasks' values (tasks from 0)."""
        base = self._read(0, bounds, 0)
        # A task that nobody looks at stands as the base itself: of no length, and free of charge.
        tasks = [self._read(t + 1, bounds, t + 1) if t in wanted else base for t in range(self._tasks)]
        return Chunk(base, tasks, bounds.slots[0], bounds.place.element + bounds.start)

    def pair(self, task: int, bounds: TensorRange) -> tuple[Tensor, Tensor]:
        """Reads the base's and one task's values (tasks from 0)."""
        return self._read(0, bounds, "base"), self._read(task + 1, bounds, "task")

    def whole(self, source: int, place: TensorPlace, scratch: Tensor) -> Tensor:
        """Reads all of a tensor, from the base (0) or a task: a view, or written to `scratch`."""
        return self._vectors.read(source, self._layout.mergeable[place.tensor], 0, place.size, scratch)

    def _read(self, source: int, bounds: TensorRange, name: Any) -> Tensor:
        tensor = self._layout.mergeable[bounds.place.tensor]
        scratch = self._buffers.own(name, bounds.stop - bounds.start, working_dtype(tensor))
        return self._vectors.read(source, tensor, bounds.start, bounds.stop, scratch)


Work = Callable[[TensorRange, Chunk], Any]
Wanted = Callable[[TensorRange], Collection[int]]
"""Which tasks' values (from 0) a range needs; the others are not read."""


class Walker:
    """Threads that read chunks, as many as the plan's pool has, of which its `threads` may work at a time."""

    def __init__(self, reader: ChunkReader, plan: MemoryPlan) -> None:
        self._reader, self._ahead = reader, plan.ahead
        self._pool = ThreadPoolExecutor(plan.pool) if plan.pool > 1 else None
        self._turn = threading.Semaphore(plan.threads)

    def close(self) -> None:
        """Stops the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Applies `work` to items, in the pool if there is one; returns the results in order."""
        if self._pool is None:
            return [work(item) for item in items]

        def in_turn(item: Any) -> Any:
            with self._turn:
                return work(item)

        return list(self._pool.map(in_turn, items))

    def walk(self, work: Work, todo: Sequence[TensorRange], wanted: Wanted) -> Iterator[tuple[TensorRange, Any]]:
        """Applies `work` to ranges; yields results in order, a bounded number of ranges ahead of the consumer."""
        ahead: deque[Callable[[], Any]] = deque()
        for k, bounds in enumerate(todo):
            while len(ahead) < self._ahead and k + len(ahead) < len(todo):
                begun = todo[k + len(ahead)]
                ahead.append(self.begin(work, begun, wanted(begun)))
            yield bounds, ahead.popleft()()

    def begin(self, work: Work, bounds: TensorRange, wanted: Collection[int]) -> Callable[[], Any]:
        """Starts to read a range and to work on it; returns a function that waits for the result."""

        def read_and_work() -> Any:
            chunk = self._reader.chunk(bounds, wanted)
            with self._turn:  # whoever waits here, or for a disk, has let another one work
                return work(bounds, chunk)

        return self._pool.submit(read_and_work).result if self._pool is not None else read_and_work
