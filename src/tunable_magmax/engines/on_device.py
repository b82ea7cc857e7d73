"""File-to-file merges on a GPU: everything is brought there once if it fits, else block by block for every walk.

Files are read into pinned memory by several threads while the device works on the block before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.lora.adapter import Adapter
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.outputs import Job, write_weights
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import show_size
from tunable_magmax.merging.device import DeviceChunk, DeviceMerge
from tunable_magmax.merging.device_auction import plane_rows
from tunable_magmax.merging.kernels import TensorPlace, TensorRange, split_ranges
from tunable_magmax.merging.kernels.cuda import kernels_on
from tunable_magmax.merging.kernels.launch import ALIGNMENT as PLANE_ALIGNMENT
from tunable_magmax.merging.kernels.launch import available
from tunable_magmax.merging.layout import Mergeable
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import Sources, working_dtype
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import Limits, factor_room, read_threads

ALIGNMENT = 64
"""Values in a buffer begin at a multiple of this, in bytes."""
BLOCK = 1 << 26
"""The most bytes of one source in a block."""
SMALLEST_BLOCK = 1 << 20
HISTOGRAMS = 4 << 19
"""Bytes of a group's histogram of magnitudes, with what is made of it on the way."""
UNIT = 8 * PLANE_ALIGNMENT
"""A block holds a multiple of so many bytes: ranges of the widest type then begin where the kernels can."""


def open_device(name: str) -> torch.device:
    """Returns the GPU of this name, such as "cuda" or "cuda:1"; an `InputError` if merges can't run there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:1'") from None
    if device.type != "cuda":
        raise InputError(f"device is {name!r}: merges run on 'cpu' and on NVIDIA GPUs ('cuda')")
    if lacking := available():
        raise InputError(f"device {name!r} can't be used: {lacking}; leave the device out to merge on the CPU")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise InputError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def free_memory(device: torch.device) -> int:
    """Returns the bytes of the device's memory that a merge may use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(0.9 * free)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A GPU of this machine, as a place where merges run."""

    device: torch.device
    threads: int | None

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        self._room(inputs, options, memory)
        kernels_on(self.device)  # compiles, if it can
        return 0

    def merge(self, job: Job) -> MergeReport:
        inputs, options, memory = job.inputs, job.options, job.memory
        try:
            block, resident, stash = self._room(inputs, options, memory)
        except InputError as error:  # others have taken the device's memory since the check
            raise StorageError(str(error)) from None
        uploader = Uploader(self.device)
        with FileChunks(inputs, uploader, block, resident, memory, read_threads(self.threads)) as chunks:
            sources = Sources(inputs.layout, chunks, inputs.labels, tuple(inputs.warnings()))
            limits = Limits(progress=job.progress)
            merge = DeviceMerge(sources, options, kernels_on(self.device), limits, stash=stash)
            with torch.no_grad(), merge:
                merge.survey()
                merge.decide()
                return write_weights(merge, job)

    def _room(self, inputs: Inputs, options: Options, memory: int) -> tuple[int, bool, bool]:
        """Returns bytes of one source in a block, whether all values fit on the device, and whether the vector does."""
        layout, sources = inputs.layout, len(inputs.checkpoints)
        # Two blocks are under way, an output waits for the writer, and another is on its way from the device.
        block = min(BLOCK, memory // (2 * sources + 4)) // UNIT * UNIT
        if block < SMALLEST_BLOCK:
            least = SMALLEST_BLOCK * (2 * sources + 4)
            raise InputError(
                f"memory of {show_size(memory)} is too little for {sources - 1} tasks on a GPU: give at least "
                f"{show_size(least)}"
            )
        free = free_memory(self.device)
        method = METHODS[options.method](options, sources - 1)
        words = sum(-(-tensor.size // PLANE_ALIGNMENT) for tensor in layout.mergeable) * PLANE_ALIGNMENT // 32
        planes = 4 * words * plane_rows(method)
        if method.cuts_by_magnitude:
            planes += HISTOGRAMS * (len(layout.mergeable) if options.scope == "tensor" else 1)
        flying = 4 * sources * block
        if planes + flying > free:
            raise InputError(
                f"the GPU has {show_size(free)} of memory to give, but marks of {layout.elements:,} elements and "
                f"{sources - 1} tasks take {show_size(planes + flying)}: merge on the CPU, whose marks may go to disk"
            )
        left = free - planes - flying
        stash = sum(tensor.size * (8 if tensor.working == "F64" else 4) for tensor in layout.mergeable)
        fits = options.scale is None and stash <= left
        widths = [max(dtype.itemsize for dtype in _types(inputs, tensor)) for tensor in layout.mergeable]
        values = sources * sum(width * tensor.size for width, tensor in zip(widths, layout.mergeable, strict=True))
        return block, values <= left - (stash if fits else 0), fits


class Uploader:
    """Copies from two buffers of the host to a device while the device works."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._worked: list[torch.cuda.Event | None] = [None, None]

    def buffer(self, size: int) -> Tensor:
        """Returns memory of the host that a device can copy by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, side: int, values: Tensor, near: Tensor | None) -> Tensor:
        """Begins to copy a buffer, to `near` when work on its old contents is done, or to memory of its own."""
        with torch.cuda.stream(self._stream):
            if near is None:
                near = torch.empty(values.numel(), dtype=torch.uint8, device=self.device)
            elif (worked := self._worked[side]) is not None:
                self._stream.wait_event(worked)
            near.copy_(values, non_blocking=True)
            self._sent[side] = self._stream.record_event()
        near.record_stream(torch.cuda.current_stream(self.device))
        return near

    def wait_until_sent(self, side: int) -> None:
        """Waits until a buffer may be filled again."""
        if (sent := self._sent[side]) is not None:
            sent.synchronize()

    def begin_work(self, side: int) -> None:
        """Makes the device's work from now on wait for the copy."""
        sent = self._sent[side]
        assert sent is not None
        torch.cuda.current_stream(self.device).wait_event(sent)

    def end_work(self, side: int) -> None:
        """Says that all work on what was copied has been ordered."""
        self._worked[side] = torch.cuda.current_stream(self.device).record_event()


@dataclass(frozen=True, slots=True)
class Block:
    """Ranges, with the place of each in a source's part of a buffer, alike for all sources; and the bytes of a part."""

    ranges: Sequence[tuple[TensorRange, int]]
    size: int


class FileChunks:
    """`DeviceVectors` over opened checkpoints. A context manager.

    Blocks of at most `block` bytes a source go through two buffers: one is filled from the files while the
    values of the other are on their way, or worked on. With `resident` they stay on the device.
    """

    def __init__(
        self, inputs: Inputs, uploader: Uploader, block: int, resident: bool, memory: int, threads: int
    ) -> None:
        assert block % UNIT == 0
        self.borrows = not resident
        self.chunk = block // 8
        self._inputs, self._uploader, self._block = inputs, uploader, block
        self._files = FileVectors(inputs.checkpoints, factor_room(inputs.layout, memory))
        self._pool = ThreadPoolExecutor(threads)
        self._sources = len(inputs.checkpoints)
        size = self._sources * block
        self._buffers = [uploader.buffer(size) for _ in range(2)]
        self._near = [torch.empty(0 if resident else size, dtype=torch.uint8, device=uploader.device) for _ in range(2)]
        self._kept: dict[TensorRange, list[Tensor]] = {}
        self._types = [_types(inputs, tensor) for tensor in inputs.layout.mergeable]
        self._widths = [max(dtype.itemsize for dtype in types) for types in self._types]

    def __enter__(self) -> FileChunks:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._kept.clear()

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        host = torch.empty(stop - start, dtype=scratch.dtype)
        return scratch.copy_(self._files.read(source, tensor, start, stop, host))

    def walk(self, places: Sequence[TensorPlace]) -> Iterator[DeviceChunk]:
        if self.borrows:
            yield from self._stream(places)
            return
        blocks = list(self._packed(places))
        missing = {bounds.place.tensor for block in blocks for bounds, _ in block.ranges if bounds not in self._kept}
        for fetched in self._stream([place for place in places if place.tensor in missing]):
            self._kept.update(fetched)
        for block in blocks:
            yield [(bounds, self._kept[bounds]) for bounds, _ in block.ranges]

    def _stream(self, places: Sequence[TensorPlace]) -> Iterator[list[tuple[TensorRange, list[Tensor]]]]:
        blocks = list(self._packed(places))
        reading = self._fill(blocks[0], 0) if blocks else []
        for k, block in enumerate(blocks):
            side = k % 2
            for job in reading:
                job.result()
            size = self._sources * block.size
            near = self._near[side][:size] if self.borrows else None
            near = self._uploader.send(side, self._buffers[side][:size], near)
            if k + 1 < len(blocks):
                reading = self._fill(blocks[k + 1], 1 - side)
            self._uploader.begin_work(side)
            try:
                yield self._shared_out(block, near)
            finally:  # also if nobody wants the rest
                self._uploader.end_work(side)

    def _packed(self, places: Sequence[TensorPlace]) -> Iterator[Block]:
        """Yields blocks of ranges, in order, as many in each as fit."""
        ranges: list[tuple[TensorRange, int]] = []
        used = 0
        for bounds in split_ranges(places, self.chunk):
            size = (bounds.stop - bounds.start) * self._widths[bounds.place.tensor]
            size = -(-size // ALIGNMENT) * ALIGNMENT
            if ranges and used + size > self._block:
                yield Block(ranges, used)
                ranges, used = [], 0
            ranges.append((bounds, used))
            used += size
        if ranges:
            yield Block(ranges, used)

    def _parts(self, block: Block, source: int, buffer: Tensor) -> Iterator[tuple[TensorRange, torch.dtype, Tensor]]:
        """Yields a source's values of each range as bytes of a buffer, with their type."""
        for bounds, place in block.ranges:
            dtype = self._types[bounds.place.tensor][source]
            start = source * block.size + place
            yield bounds, dtype, buffer[start : start + (bounds.stop - bounds.start) * dtype.itemsize]

    def _fill(self, block: Block, side: int) -> list[Future[None]]:
        """Begins to read a block's values into a buffer, one job for each source."""
        self._uploader.wait_until_sent(side)
        return [self._pool.submit(self._read_source, block, source, side) for source in range(self._sources)]

    def _read_source(self, block: Block, source: int, side: int) -> None:
        opened = self._inputs.checkpoints[source]
        for bounds, dtype, room in self._parts(block, source, self._buffers[side]):
            tensor = self._inputs.layout.mergeable[bounds.place.tensor]
            if isinstance(opened, Checkpoint):
                opened.read_into(tensor.infos[source].name, bounds.start * dtype.itemsize, room.numpy().data)
            else:
                values = room.view(dtype)
                found = self._files.read(source, tensor, bounds.start, bounds.stop, values)
                if found.data_ptr() != values.data_ptr():
                    values.copy_(found)

    def _shared_out(self, block: Block, near: Tensor) -> list[tuple[TensorRange, list[Tensor]]]:
        """Returns a block's values on the device, by range and source."""
        found: list[tuple[TensorRange, list[Tensor]]] = [(bounds, []) for bounds, _ in block.ranges]
        for source in range(self._sources):
            for (_, values), (_, dtype, room) in zip(found, self._parts(block, source, near), strict=True):
                values.append(room.view(dtype))
        return found


def _types(inputs: Inputs, tensor: Mergeable) -> list[torch.dtype]:
    """Returns the type of each source's values: as stored, or the working type where an adapter computes them."""
    types = []
    for opened, info in zip(inputs.checkpoints, tensor.infos, strict=True):
        stored = working_dtype(tensor) if isinstance(opened, Adapter) else torch_dtype(info.dtype)
        assert stored is not None
        types.append(stored)
    return types
