"""What the kernels read from the device's memory: tables of segments, where results go, and rows of numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE = 8192
ALIGNMENT = 128
"""Each tensor's slots begin at a multiple of this: four words, which a warp reads together."""
KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}

Address = int
"""Of a row of planes, or of a row in a table of numbers, on the device; 0 for none."""


def row_of(table: Tensor, row: int) -> Address:
    """Where a row of a two-dimensional table begins. Views cost more than the kernels that they are for."""
    return table.data_ptr() + row * table.stride(0) * table.element_size()


class _Table(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("address", "kind", "size", "slot", "element", "tensor", "group")),
        *((name, ctypes.c_void_p) for name in ("tile_segment", "tile_start")),
        *((name, ctypes.c_int64) for name in ("segments", "tasks", "tiles")),
    )


class _Target(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_void_p),
        ("kind", ctypes.c_void_p),
        ("final", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("square", ctypes.c_void_p),
        ("unfit", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a tensor: the base's and all tasks' values, as they are stored, and where it lies.

    `slot` is its place in the planes, `element` the index (rule 2) of its first value; `tensor` and `group` say where
    its results are added up. For work on planes alone, values may be left out.
    """

    values: Sequence[Tensor]
    size: int
    slot: int
    element: int
    tensor: int
    group: int = 0


class Table:
    """Segments of one working type, as the kernels read them."""

    def __init__(self, segments: Sequence[Segment], working: torch.dtype, device: torch.device) -> None:
        self.working, self.segments = working, segments
        sources = len(segments[0].values)
        sizes = np.array([segment.size for segment in segments], np.int64)
        assert not any(segment.slot % ALIGNMENT for segment in segments)
        tiles = -(-sizes // TILE)
        columns = {
            "address": np.array([[s.values[k].data_ptr() for s in segments] for k in range(sources)], np.int64),
            "size": sizes,
            "slot": np.array([segment.slot for segment in segments], np.int64),
            "element": np.array([segment.element for segment in segments], np.int64),
            "tensor": np.array([segment.tensor for segment in segments], np.int64),
            "group": np.array([segment.group for segment in segments], np.int64),
            "tile_segment": np.repeat(np.arange(len(segments), dtype=np.int64), tiles),
            "tile_start": np.concatenate([np.arange(n, dtype=np.int64) * TILE for n in tiles]),
        }
        kinds = np.array([[KINDS[s.values[k].dtype] for s in segments] for k in range(sources)], np.uint8)
        self.plain = bool((kinds == KINDS[working]).all())
        self.tiles = int(tiles.sum())
        # One transfer for all columns.
        joined = np.concatenate([column.reshape(-1) for column in columns.values()])
        self._columns = torch.from_numpy(joined).to(device, non_blocking=True)
        self._kinds = torch.from_numpy(kinds.reshape(-1)).to(device, non_blocking=True)
        places, at = {}, 0
        for name, column in columns.items():
            places[name] = self._columns.data_ptr() + 8 * at
            at += column.size
        self.structure = _Table(
            **places, kind=self._kinds.data_ptr(), segments=len(segments), tasks=sources - 1, tiles=self.tiles
        )

    def name(self, kernel: str, plain: bool = False) -> str:
        """The version of a kernel for this working type, and for values that are stored in it where there is one."""
        return f"{kernel}{'_plain' if plain and self.plain else ''}_{'f64' if self.working == torch.float64 else 'f32'}"


class Destination:
    """Where merged values go: a tensor for each segment of a table."""

    def __init__(self, outs: Sequence[Tensor], device: torch.device) -> None:
        self.outs = outs
        addresses = np.array([out.data_ptr() for out in outs], np.int64)
        kinds = np.array([KINDS[out.dtype] for out in outs], np.uint8)
        # One transfer for both.
        joined = np.concatenate([addresses.view(np.uint8), kinds])
        self._columns = torch.from_numpy(joined).to(device, non_blocking=True)
        self.addresses: Address = self._columns.data_ptr()
        self.kinds: Address = self.addresses + addresses.nbytes


class Target:
    """Where a kernel writes, and as what: the merged vector in the working type, or base + scale * vector, cast.

    `state` is that of the auction that decides what is written, if one does.
    """

    def __init__(
        self, into: Destination, square: Tensor, unfit: Tensor, scale: float | None, state: Address = 0
    ) -> None:
        self._kept = (into, square, unfit)
        self.structure = _Target(
            into.addresses,
            into.kinds,
            int(scale is not None),
            scale or 0.0,
            square.data_ptr(),
            unfit.data_ptr(),
            state,
        )
