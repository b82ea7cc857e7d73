"""Merges on an emulated device, compared with the CPU's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_cases import State, assert_same, given

import tunable_magmax as tmx
from emulated import EmulatedModule
from tunable_magmax.merging import state_dicts
from tunable_magmax.merging.device import DeviceMerge
from tunable_magmax.merging.kernels.cuda import CudaKernels
from tunable_magmax.merging.kernels.portable import PortableKernels
from tunable_magmax.merging.reading import Sources
from tunable_magmax.merging.resident import ResidentChunks, ResidentMerge

# Several tiles, a tile that ends inside a word, and tensors smaller than one.
SHAPES = {"a": (100, 201), "b": (65,), "c": (1,), "d": (93, 97), "e": (), "f": (128,), "z": (0, 4)}


@contextmanager
def on(
    module: EmulatedModule,
    chunks: type[ResidentChunks] = ResidentChunks,
    engine: type[DeviceMerge] = ResidentMerge,
    **options: Any,
) -> Iterator[None]:
    """Merges of tensors go to the emulated device, where memory that nobody has written holds NaN, or odd bits."""

    def merge(layout, base, tasks, read, labels, threads, method=None):
        sources = Sources(layout, chunks(layout, [base, *tasks], module.device), labels)
        return engine(sources, read, CudaKernels(module), method=method, **options)

    def poisoned(self, shape, dtype):
        return torch.empty(shape, dtype=dtype).fill_(torch.nan)

    made = CudaKernels.planes

    def noisy(self, rows, slots):
        return made(self, rows, slots).fill_(0x5AA5C33C)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dicts, "merge_in_memory", merge)
        patch.setattr(CudaKernels, "empty", poisoned)
        patch.setattr(PortableKernels, "empty", poisoned)
        patch.setattr(CudaKernels, "planes", noisy)
        yield


def check(states: list[State], module: EmulatedModule, choices: Sequence[dict[str, Any]], **where: Any) -> None:
    """Every choice of options gives the CPU's bits and report."""
    base, *tasks = states
    for options in choices:
        asked = given(options, len(tasks))
        with on(module, **where):
            ours = tmx.merge_state_dicts(base, tasks, **asked)
        assert_same(ours, tmx.merge_state_dicts(base, tasks, **asked), options)
