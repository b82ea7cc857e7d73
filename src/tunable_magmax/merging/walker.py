"""Walks over base and tasks: where values come from, threads that read chunks and work on them, and their memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tunable_magmax.errors import InputError, plural
from tunable_magmax.files import Progress
from tunable_magmax.merging.kernels import Chunk, Kernels, TensorPlace, TensorRange, padded, split_ranges
from tunable_magmax.merging.layout import Layout
from tunable_magmax.merging.methods import method_class
from tunable_magmax.merging.options import Options


class Source(Protocol):
    """The values of a checkpoint: in memory, in files, on another machine, or computed from another source's."""

    def read(self, name: str, start: int, stop: int, scratch: Tensor) -> Tensor:
        """Returns values start:stop of a flattened tensor in the type of `scratch`: a view, or written to `scratch`.

        What is in memory may be asked for with a `scratch` of no length: it is a view, or new.
        """


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
    reads: bool
    """Whether values have to be read; else they are in memory already."""

    @property
    def ahead(self) -> int:
        """Ranges that are begun and not yet taken: meanwhile the next is read."""
        return AHEAD * self.threads

    @property
    def pool(self) -> int:
        """Threads, each with a range of its own: more than may work at a time where values have to be read."""
        return self.ahead if self.reads else self.threads

    @property
    def spill(self) -> bool:
        """Whether the planes are on disk."""
        return self.mapped > 0

    @property
    def peak(self) -> int:
        return self.workspace + (self.mapped or self.planes) + self.cached_delta


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


Work = Callable[[Sequence[TensorRange], Sequence[Chunk]], Sequence[Any]]
"""Works on a batch: returns a result for each range. A CPU's batch is one range."""
TasksRead = Callable[[TensorPlace], Collection[int]]
"""Which tasks' values (from 0) are needed of a tensor; the others are not read."""


class Walker:
    """Threads that read chunks, as many as the plan's pool has, of which its `threads` may work at a time.

    A batch of chunks is in memory of the thread that has read it, until it reads the next.
    """

    def __init__(self, sources: Sources, plan: MemoryPlan, kernels: Kernels, wide: bool) -> None:
        self._mergeable, self._sources = sources.layout.mergeable, sources.sources
        self._plan, self._kernels, self._together = plan, kernels, not kernels.threads
        kinds = (torch.float32, torch.float64) if self._together and sources.in_memory else ()
        self._like = {kind: kernels.empty(0, kind) for kind in kinds}
        self._widest = torch.float64 if wide else torch.float32
        self._buffers = threading.local()
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

    def buffer(self, name: Any, size: int, dtype: torch.dtype, first: int = 0) -> Tensor:
        """Returns elements of this thread's memory of this name, which is made once and used over and over."""
        held = self._buffers.__dict__
        if name not in held:
            held[name] = self._kernels.empty(self._plan.chunk, self._widest)
        return held[name].view(dtype)[first : first + size]  # type: ignore[no-any-return]

    def walk(
        self, work: Work, places: Iterable[TensorPlace], tasks: TasksRead | None = None
    ) -> Iterator[tuple[TensorRange, Any]]:
        """Applies `work` to tensors, range by range; yields results in order, working a bounded number ahead.

        Without `tasks`, the values of all are read.
        """
        todo = self._batches(split_ranges(places, self._plan.chunk))
        ahead: deque[Callable[[], Sequence[Any]]] = deque()
        for k, batch in enumerate(todo):
            while len(ahead) < self._plan.ahead and k + len(ahead) < len(todo):
                ahead.append(self._begin(work, todo[k + len(ahead)], tasks))
            yield from zip(batch, ahead.popleft()(), strict=True)

    def walk_chunks(
        self, work: Callable[[TensorRange, Chunk], Any], places: Iterable[TensorPlace], tasks: TasksRead | None = None
    ) -> Iterator[tuple[TensorRange, Any]]:
        """Walks with work that takes the chunks of a batch one after the other."""
        return self.walk(lambda ranges, chunks: list(map(work, ranges, chunks)), places, tasks)

    def _batches(self, ranges: Sequence[TensorRange]) -> list[list[TensorRange]]:
        """Divides ranges into batches of one type, each of a chunk's elements at most."""
        batches: list[list[TensorRange]] = []
        room, kind = 0, None
        for bounds in ranges:
            size, working = bounds.stop - bounds.start, self._mergeable[bounds.place.tensor].working
            if not self._together or size > room or working != kind:
                batches.append([])
                room, kind = self._plan.chunk, working
            batches[-1].append(bounds)
            room -= size
        return batches

    def _begin(self, work: Work, batch: Sequence[TensorRange], tasks: TasksRead | None) -> Callable[[], Sequence[Any]]:
        """Starts to read a batch and to work on it; returns a function that waits for the results."""

        def read_and_work() -> Sequence[Any]:
            with torch.no_grad():  # which holds for a thread
                ends = accumulate(bounds.stop - bounds.start for bounds in batch)
                chunks = [self._chunk(each, tasks, end) for each, end in zip(batch, ends, strict=True)]
                with self._turn:  # whoever waits here, or for a disk, has let another one work
                    return work(batch, chunks)

        return self._pool.submit(read_and_work).result if self._pool is not None else read_and_work

    def whole(self, source: int, place: TensorPlace, scratch: Tensor) -> Tensor:
        """Reads all of a tensor, from the base (0) or a task: a view, or written to `scratch`."""
        name = self._mergeable[place.tensor].infos[source].name
        return self._sources[source].read(name, 0, place.size, scratch)

    def _chunk(self, bounds: TensorRange, wanted: TasksRead | None, end: int) -> Chunk:
        """Reads a range to its place in the buffers, which ends at `end`."""
        base, everyone = self._read(0, bounds, end), range(len(self._sources) - 1)
        read = everyone if wanted is None else wanted(bounds.place)
        # A task that nobody looks at stands as the base itself: of no length, and free of charge.
        tasks = [self._read(t + 1, bounds, end) if t in read else base for t in everyone]
        return Chunk(base, tasks, bounds.place.slot + bounds.start, bounds.place.element + bounds.start)

    def _read(self, source: int, bounds: TensorRange, end: int) -> Tensor:
        tensor, size = self._mergeable[bounds.place.tensor], bounds.stop - bounds.start
        scratch = self._like[tensor.working] if self._like else self.buffer(source, size, tensor.working, end - size)
        return self._sources[source].read(tensor.infos[source].name, bounds.start, bounds.stop, scratch)


# -- what a merge runs on ----------------------------------------------------------------------------------------------

SMALLEST_CHUNK = 1 << 12
GOOD_CHUNK = 1 << 17
"""Below this, what each chunk costs beside its work is felt: at a quarter of it, merges took over twice as long."""
CHUNK_A_THREAD = 1 << 15
"""Elements of a chunk for each thread, at least: threads take turns between their loops, and with less to do in each
they wait for each other. On 16 cores, 51 checkpoints took 25 s with 16 threads (chunks of 2^16), 7 s with 4."""
AHEAD = 2
"""Ranges begun and not yet taken, for each that may be worked on at a time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a merge may use: threads (None: one for each core), bytes of memory (None: any), a file for its planes.

    `tensors` are the mergeable tensors that are merged here, by number; None: all.
    """

    threads: int | None = None
    memory: int | None = None
    spill: Path | None = None
    """Where the bit planes go if they do not fit into the memory."""
    progress: Progress | None = None
    tensors: Sequence[int] | None = None


def open_device(name: str | None) -> torch.device:
    """Returns the device of this name, such as "cuda" or "cuda:1"; None is the CPU.

    >>> open_device("tpu")
    Traceback (most recent call last):
    tunable_magmax.errors.InputError: device is 'tpu', expected 'cpu', 'cuda' or 'cuda:1'
    """
    try:
        device = torch.device(name or "cpu")
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:1'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device is {name!r}, but torch finds {plural(torch.cuda.device_count(), 'GPU')} here")
    return device


def kernels_for(device: torch.device) -> Kernels:
    """Returns the kernels for tensors on a device."""
    if device.type == "cpu" and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0"):
        from tunable_magmax.merging.kernels.numba_ops import NumbaKernels  # slow to import

        return NumbaKernels()
    if device.type == "cuda" and find_spec("triton"):  # comes with torch for GPUs on Linux
        from tunable_magmax.merging.kernels.triton_ops import TritonKernels

        return TritonKernels(device)
    needed = "NUMBA_DISABLE_JIT unset" if device.type == "cpu" else "a GPU with Triton, or tensors on the CPU"
    raise InputError(f"nothing can be merged on {device.type}: this needs {needed}")


def plan_memory(
    layout: Layout, options: Options, kernels: Kernels, threads: int | None, memory: int | None, reads: bool = True
) -> MemoryPlan:
    """Chooses threads and chunk, and what is kept in memory: the planes first, then the merged vector.

    `reads`: values have to be read; else they are in memory already.
    """
    threads = read_threads(threads) if kernels.threads else 1
    tasks = len(layout.mergeable[0].infos) - 1 if layout.mergeable else 1
    width = 8 if layout.wide else 4
    method = method_class(options.method)(options, tasks)
    slots = sum(padded(tensor.size) for tensor in layout.mergeable)
    planes = 0 if method.rows is None else method.rows.count * kernels.plane_bytes(slots)
    delta = layout.elements * width if options.matched else 0
    if memory is None:
        # A GPU waits for the host after each batch; batches of what is in its memory already can be larger.
        chunk = kernels.chunk if reads or kernels.threads else 2 * kernels.chunk
        return MemoryPlan(threads, chunk, 0, planes, 0, delta, reads)

    matrix_bytes = 0
    if method.merges_matrices:
        from tunable_magmax.merging.singular import working_bytes

        matrices = [tensor for tensor in layout.mergeable if len(tensor.shape) == 2]
        matrix_bytes = max((working_bytes(m.shape, m.working.itemsize) for m in matrices), default=0)
    beside = layout.factor_bytes + matrix_bytes
    if method.counts_magnitudes:
        from tunable_magmax.merging.cuts import LISTED_BYTES

        beside += LISTED_BYTES
    while True:
        # Each thread's chunk, its raw read, its merged vector and the result before a cast; then results to be written.
        vectors, ahead = (tasks + 1 if reads else 1) + 2, AHEAD * threads
        per_element = (ahead if reads else threads) * (vectors * width + width // 2) + (ahead + 1) * 8
        # Spilled planes are mapped a span at a time.
        span = threads * 4 * (1 << 19)
        rooms = {kept: min(memory // 2, memory - max(kept, span) - beside) for kept in (planes + delta, planes, 0)}
        chunks = {kept: _largest_chunk(kernels.chunk, room // per_element) for kept, room in rooms.items()}
        # Keeping planes and the merged vector in memory spares the most, but not if only tiny chunks fit beside them.
        large_enough = min(GOOD_CHUNK, chunks[0])
        chunk = next(c for kept, c in chunks.items() if c >= large_enough and kept <= memory - memory // 16)
        workspace = chunk * per_element + beside
        least = workspace + span
        if threads == 1 or (least <= memory and chunk >= min(kernels.chunk, threads * CHUNK_A_THREAD)):
            break
        threads //= 2
    if least > memory:
        matrix = f"; {-(-matrix_bytes // 2**20)} of them are for the largest matrix" if matrix_bytes else ""
        needed = f"give at least {-(-least // 2**20)} MiB{matrix}"
        raise InputError(f"memory of {memory / 2**20:.0f} MiB is too little for {tasks} tasks: {needed}")
    left = memory - workspace
    mapped = span if planes > left else 0
    left -= mapped or planes
    return MemoryPlan(threads, chunk, workspace, planes, mapped, delta if delta <= left else 0, reads)


def _largest_chunk(most: int, elements: int) -> int:
    """Halves a chunk until it has so many elements, or is as small as is worth while."""
    while most > max(elements, SMALLEST_CHUNK):
        most //= 2
    return most


def read_threads(threads: int | None) -> int:
    """Returns the number of threads, by default one for each core; less than one is an `InputError`."""
    if threads is not None and threads < 1:
        raise InputError(f"threads is {threads}, expected at least 1")
    return default_threads() if threads is None else threads


def default_threads() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Returns the bytes that this process may still use, if the system says."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # a container's own limit, whose page cache can be dropped
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = sum(int(line.split()[1]) for line in stat if line.startswith(("inactive_file ", "active_file ")))
        found.append(limit - used + cached)
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)
