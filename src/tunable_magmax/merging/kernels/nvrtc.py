"""CUDA sources compiled and launched at run time, by the libraries that torch brings along: no compiler is needed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunable_magmax.errors import InputError


class Module:
    """The kernels of one source, compiled for one device. `blocks` fill that several times."""

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
        """The stream on which torch works now."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, stream: int, *arguments: Any, shared: int = 0
    ) -> None:
        """Arguments are ints (addresses, too), floats, tensors (their addresses) and ctypes structures."""
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
    """None if kernels can be compiled here, else what is missing."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _compiler()
        _driver()
    except OSError as error:
        return f"a CUDA library can't be loaded: {error}"
    return None


def packed(arguments: Sequence[Any]) -> tuple[list[Any], Any]:
    """Arguments as a kernel reads them, and the array of their addresses, which holds as long as they are kept."""
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
    """The run-time compiler that this torch was built for: loaded already, on the library path, or in a package."""
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
