"""Chunks of base and tasks, read by the thread that works on them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.merging.kernels import Chunk, Kernels
from tunable_magmax.merging.ownership import Piece


class Vectors(Protocol):
    """Where values come from. Source 0 is the base, t the t-th task."""

    borrows: bool
    """Whether reads need memory of their own (files) or are mostly views (tensors in memory)."""

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        """Values start:stop of the flattened tensor in the working type: a view of its own, or written to `scratch`."""


def working_dtype(tensor: Mergeable) -> torch.dtype:
    return torch.float64 if tensor.working == "F64" else torch.float32


def widen(stored: Tensor, out: Tensor) -> Tensor:
    """Write values to a wider type, on this thread alone: torch would share each copy among threads of its own.

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
        """The buffer of this name in this thread."""
        held = self._local.__dict__
        buffer = held.get(name)
        if buffer is None:
            buffer = held[name] = self._kernels.empty(self._chunk, self._widest)
        return buffer.view(dtype)[:size]


class ChunkReader:
    """Reads pieces as chunks, in memory of the thread that asks: a chunk holds until it asks for the next."""

    def __init__(self, layout: Layout, vectors: Vectors, tasks: int, buffers: Buffers) -> None:
        self._layout, self._vectors, self._tasks, self._buffers = layout, vectors, tasks, buffers

    def chunk(self, piece: Piece, wanted: Collection[int]) -> Chunk:
        """The base's and the `wanted` tasks' values (from 0)."""
        base = self._read(0, piece, 0)
        # A task that nobody looks at stands as the base itself: of no length, and free of charge.
        tasks = [self._read(t + 1, piece, t + 1) if t in wanted else base for t in range(self._tasks)]
        return Chunk(base, tasks, piece.slots[0], piece.stretch.element + piece.start)

    def pair(self, task: int, piece: Piece) -> tuple[Tensor, Tensor]:
        """The base's and a task's values (from 0)."""
        return self._read(0, piece, "base"), self._read(task + 1, piece, "task")

    def _read(self, source: int, piece: Piece, name: Any) -> Tensor:
        tensor = self._layout.mergeable[piece.stretch.tensor]
        scratch = self._buffers.own(name, piece.stop - piece.start, working_dtype(tensor))
        return self._vectors.read(source, tensor, piece.start, piece.stop, scratch)
