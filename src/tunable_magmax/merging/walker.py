"""Chunks of base and tasks, read by the threads that work on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tunable_magmax.errors import InputError
from tunable_magmax.merging.kernels import Chunk, Kernels, TensorPlace, TensorRange
from tunable_magmax.merging.layout import Layout, Mergeable


class Source(Protocol):
    """The values of a checkpoint: in memory, in files, on another machine, or computed from another source's."""

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        """Returns values start:stop of a flattened tensor in the type of `scratch`: a view, or written to `scratch`."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is merged: the tensors of base and tasks, where their values come from, and what messages call them."""

    layout: Layout
    sources: Sequence[Source]
    """The base's values and each task's."""
    labels: Sequence[str]
    """Of the base and of each task."""
    notes: tuple[str, ...] = ()
    """Warnings for the report."""
    in_memory: bool = False
    """Whether reads are mostly views of memory that is there already."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a merge divides the memory it may use, in bytes."""

    threads: int
    """That work at a time: fewer than asked for where memory would leave them only small chunks."""
    chunk: int
    workspace: int
    planes: int
    mapped: int
    """What is in memory of planes on disk; 0 if they are in memory."""
    cached_delta: int
    """What is kept of the merged vector between the walk that measures it and the one that writes; 0 if nothing is."""
    ahead: int
    """Ranges that are begun and not yet taken."""
    pool: int
    """Threads, each with a range of its own: more than may work at a time where values have to be read."""

    @property
    def spill(self) -> bool:
        """Whether the planes are on disk."""
        return self.mapped > 0

    @property
    def peak(self) -> int:
        return self.workspace + (self.mapped or self.planes) + self.cached_delta


def working_dtype(tensor: Mergeable) -> torch.dtype:
    """Returns the type in which a tensor is merged: float64 if any source has it so, else float32."""
    return torch.float64 if tensor.working == "F64" else torch.float32


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


Work = Callable[[TensorRange, Chunk], Any]
TasksRead = Callable[[TensorRange], Collection[int]]
"""Which tasks' values (from 0) a range needs; the others are not read."""


class Walker:
    """Threads that read chunks, as many as the plan's pool has, of which its `threads` may work at a time.

    A chunk is in memory of the thread that has read it, until it reads the next.
    """

    def __init__(self, sources: Sources, buffers: Buffers, plan: MemoryPlan) -> None:
        self._mergeable, self._sources, self._buffers = sources.layout.mergeable, sources.sources, buffers
        self._ahead = plan.ahead
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

    def walk(self, work: Work, todo: Sequence[TensorRange], tasks: TasksRead) -> Iterator[tuple[TensorRange, Any]]:
        """Applies `work` to ranges; yields results in order, a bounded number of ranges ahead of the consumer."""
        ahead: deque[Callable[[], Any]] = deque()
        for k, bounds in enumerate(todo):
            while len(ahead) < self._ahead and k + len(ahead) < len(todo):
                begun = todo[k + len(ahead)]
                ahead.append(self.begin(work, begun, tasks(begun)))
            yield bounds, ahead.popleft()()

    def begin(self, work: Work, bounds: TensorRange, tasks: Collection[int]) -> Callable[[], Any]:
        """Starts to read a range and to work on it; returns a function that waits for the result."""

        def read_and_work() -> Any:
            with torch.no_grad():  # which holds for a thread
                chunk = self._chunk(bounds, tasks)
                with self._turn:  # whoever waits here, or for a disk, has let another one work
                    return work(bounds, chunk)

        return self._pool.submit(read_and_work).result if self._pool is not None else read_and_work

    def whole(self, source: int, place: TensorPlace, scratch: Tensor) -> Tensor:
        """Reads all of a tensor, from the base (0) or a task: a view, or written to `scratch`."""
        name = self._mergeable[place.tensor].infos[source].name
        return self._sources[source].read(name, 0, place.size, scratch)

    def _chunk(self, bounds: TensorRange, wanted: Collection[int]) -> Chunk:
        base = self._read(0, bounds)
        # A task that nobody looks at stands as the base itself: of no length, and free of charge.
        tasks = [self._read(t, bounds) if t - 1 in wanted else base for t in range(1, len(self._sources))]
        return Chunk(base, tasks, bounds.slots[0], bounds.place.element + bounds.start)

    def _read(self, source: int, bounds: TensorRange) -> Tensor:
        tensor = self._mergeable[bounds.place.tensor]
        scratch = self._buffers.own(source, bounds.stop - bounds.start, working_dtype(tensor))
        return self._sources[source].read(tensor.infos[source].name, bounds.start, bounds.stop, scratch)
