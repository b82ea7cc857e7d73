"""CUDA kernels without a GPU: the same source, compiled by g++ for the emulator in gpu.hpp, on tensors of the CPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

import torch

from tunable_magmax.merging.kernels.launch import packed

HERE = Path(__file__).parent
# Rounded as written, as on the GPU; addresses are read as what the kernels say they are; stacks may be jumped between.
FLAGS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
LIBRARY = ("-shared", "-fPIC", "-fno-extern-tls-init", "-Wl,-Bsymbolic")


def missing() -> str | None:
    """What the emulator lacks on this machine, or None."""
    if sys.platform != "linux":
        return "the CUDA emulator runs on Linux only"
    return None if which("g++") else "the CUDA emulator needs g++"


@dataclass(frozen=True)
class Library:
    """Compiled kernels, each behind a function launch_NAME."""

    path: Path
    kernels: frozenset[str]


def compiled(source: str, folder: Path) -> Library:
    """All kernels of a source, for the emulator."""
    written, library = folder / "kernels.cpp", folder / "kernels.so"
    written.write_text(source, encoding="utf-8")
    names = re.findall(r"__global__ void (?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", _run("g++", *FLAGS, "-E", written))
    entries = "\n".join(f"KERNEL({name})" for name in names)
    written.write_text(f'#include "gpu.hpp"\n{source}\n{entries}\n', encoding="utf-8")
    _run("g++", *FLAGS, *LIBRARY, "-I", HERE, written, "-o", library)
    return Library(library, frozenset(names))


def _run(*command: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "threads")),
        *((name, ctypes.c_size_t) for name in ("shared", "backwards", "count")),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
    )


class EmulatedModule:
    """Stands in for `launch.Module`. `backwards` runs the threads of a block from the last to the first."""

    device = torch.device("cpu")

    def __init__(self, library: Library, *, blocks: int = 2, backwards: bool = False) -> None:
        self.blocks, self.backwards = blocks, backwards
        self.launched: set[str] = set()
        self._library = ctypes.CDLL(str(library.path))

    def stream(self) -> int:
        return 0

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, stream: int, *arguments: Any, shared: int = 0
    ) -> None:
        self.launched.add(name)
        values, addresses = packed(arguments)
        sizes = (ctypes.c_size_t * len(values))(*(ctypes.sizeof(value) for value in values))
        function = getattr(self._library, f"launch_{name}")
        function.restype = ctypes.c_char_p
        launch = _Launch(*grid, threads, shared, self.backwards, len(values), addresses, sizes)
        if error := function(ctypes.byref(launch)):
            raise RuntimeError(f"{name}: {error.decode()}")
