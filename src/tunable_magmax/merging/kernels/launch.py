"""CUDA sources compiled and launched at run time, by the libraries that torch brings along: no compiler is needed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunable_magmax.errors import InputError
from tunable_magmax.merging.kernels import TensorRange


class Module:
    """The kernels of one source, compiled for one device.

    `blocks` fill that several times: so many share all tiles where sums are kept.
    """

    def __init__(self, source: str, device: torch.device, options: Sequence[str] = ()) -> None:
        self.device = device
        self.blocks = 10 * torch.cuda.get_device_properties(device).multi_processor_count
        major, minor = torch.cuda.get_device_capability(device)
        image = _compiled(source, (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *options))
        self._driver = _driver()
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        torch.cuda.current_stream(device).synchronize()  # makes torch's context, in which the module is loaded
        with torch.cuda.device(device):
            torch.zeros(1, device=device)
            _checked(self._driver, self._driver.cuModuleLoadData(ctypes.byref(self._module), image))

    def stream(self) -> int:
        """Returns the stream on which torch works now."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, stream: int, *arguments: Any, shared: int = 0
    ) -> None:
        """Launches a kernel. Arguments are ints (also addresses), floats, tensors and ctypes structures."""
        if name not in self._functions:
            function = ctypes.c_void_p()
            _checked(
                self._driver, self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
            )
            self._functions[name] = function
        _values, addresses = packed(arguments)
        # A function runs in the context that it was loaded in, which is current only if its device is.
        elsewhere = torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if elsewhere else nullcontext():
            launched = self._driver.cuLaunchKernel(
                self._functions[name], *grid, 1, threads, 1, 1, shared, ctypes.c_void_p(stream), addresses, None
            )
        _checked(self._driver, launched)


def available() -> str | None:
    """Returns None if kernels can be compiled here, else what is missing."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _compiler()
        _driver()
    except OSError as error:
        return f"a CUDA library can't be loaded: {error}"
    return None


def packed(arguments: Sequence[Any]) -> tuple[list[Any], Any]:
    """Returns arguments as a kernel reads them, and the array of their addresses, valid as long as they are kept."""
    values = [_argument(argument) for argument in arguments]
    return values, (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


def _argument(value: Any) -> Any:
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, Tensor):
        return ctypes.c_int64(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else value


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def _compiler() -> Any:
    """Returns the run-time compiler that torch was built for: loaded already, on the library path, or in a package."""
    version = str(torch.version.cuda).partition(".")[0]
    name = f"libnvrtc.so.{version}"
    roots = [Path(torch.__file__).parent / "lib", *(Path(folder) / "nvidia" for folder in sys.path if folder)]
    found = [str(file) for root in roots if root.is_dir() for file in sorted(root.rglob(f"{name}*"))]
    for candidate in (name, *found):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} is not found")


@cache
def _compiled(source: str, options: tuple[str, ...]) -> bytes:
    compiler = _compiler()
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = compiler.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    try:
        if failed:
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise InputError(f"the CUDA kernels can't be compiled for this device:\n{log.value.decode()}")
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _checked(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({result})")


TILE = 8192
ALIGNMENT = 128
"""Each tensor's slots begin at a multiple of this: four words, which a warp reads together."""
KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}

Address = int
"""Of a row of planes, or of a row in a table of numbers, on the device; 0 for none."""


class Rows:
    """Gives the addresses of the rows of a two-dimensional table. Views would cost more than the kernels."""

    def __init__(self, table: Tensor) -> None:
        self._table = table  # keeps the memory
        self._start, self._step = table.data_ptr(), table.stride(0) * table.element_size()

    def __call__(self, row: int) -> Address:
        return self._start + row * self._step


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


class Table:
    """Ranges of tensors of one working type with their values, as the kernels read them.

    `values` holds the base's and all tasks' values of each range, as they are stored; nothing for work on planes
    alone. `groups` is the group of each range: results are added up by tensor, or by group.
    """

    def __init__(
        self,
        ranges: Sequence[TensorRange],
        values: Sequence[Sequence[Tensor]],
        groups: Sequence[int],
        working: torch.dtype,
        device: torch.device,
    ) -> None:
        self.ranges, self.values, self.working = ranges, values, working
        self.groups = {bounds.place.tensor: group for bounds, group in zip(ranges, groups, strict=True)}
        sources = len(values[0])
        sizes = np.array([bounds.stop - bounds.start for bounds in ranges], np.int64)
        slots = np.array([bounds.place.slot + bounds.start for bounds in ranges], np.int64)
        assert not (slots % ALIGNMENT).any()
        tiles = -(-sizes // TILE)
        columns = {
            "address": np.array([[own[k].data_ptr() for own in values] for k in range(sources)], np.int64),
            "size": sizes,
            "slot": slots,
            "element": np.array([bounds.place.element + bounds.start for bounds in ranges], np.int64),
            "tensor": np.array([bounds.place.tensor for bounds in ranges], np.int64),
            "group": np.array(groups, np.int64),
            "tile_segment": np.repeat(np.arange(len(ranges), dtype=np.int64), tiles),
            "tile_start": np.concatenate([np.arange(n, dtype=np.int64) * TILE for n in tiles]),
        }
        kinds = np.array([[KINDS[own[k].dtype] for own in values] for k in range(sources)], np.uint8)
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
            **places, kind=self._kinds.data_ptr(), segments=len(ranges), tasks=sources - 1, tiles=self.tiles
        )

    def name(self, kernel: str, plain: bool = False) -> str:
        """Returns the name of a kernel for this working type; with `plain`, for values that are stored in it."""
        return f"{kernel}{'_plain' if plain and self.plain else ''}_{'f64' if self.working == torch.float64 else 'f32'}"


class Destination:
    """Where merged values go: a tensor for each range of a table."""

    def __init__(self, outs: Sequence[Tensor], device: torch.device) -> None:
        self.outs = outs
        addresses = np.array([out.data_ptr() for out in outs], np.int64)
        kinds = np.array([KINDS[out.dtype] for out in outs], np.uint8)
        # One transfer for both.
        joined = np.concatenate([addresses.view(np.uint8), kinds])
        self._columns = torch.from_numpy(joined).to(device, non_blocking=True)
        self.addresses: Address = self._columns.data_ptr()
        self.kinds: Address = self.addresses + addresses.nbytes


@dataclass(frozen=True, slots=True)
class Sums:
    """What kernels add up, on the device: the square of the merged vector, where values did not fit [tensors], and
    elements that each task gave [tensors, tasks]."""

    square: Tensor
    unfit: Tensor
    given: Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """Where a kernel writes, and as what: the merged vector in the working type, or base + scale * vector, cast.

    `state` is that of the auction that decides what is written, if one does.
    """

    into: Destination
    sums: Sums
    scale: float | None
    state: Address = 0

    @property
    def structure(self) -> _Target:
        """The target as the kernels read it."""
        return _Target(
            self.into.addresses,
            self.into.kinds,
            int(self.scale is not None),
            self.scale or 0.0,
            self.sums.square.data_ptr(),
            self.sums.unfit.data_ptr(),
            self.state,
        )
