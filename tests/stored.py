"""Reads tensors of checkpoints as bytes, to be compared with what torch has."""

from pathlib import Path

import torch
from sequences import data_of

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import BITS, torch_dtype


def read(checkpoint: Checkpoint, name: str) -> bytes:
    data = bytearray(checkpoint.tensors[name].nbytes)
    checkpoint.read_into(name, 0, memoryview(data))
    return bytes(data)


def holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            info = checkpoint.tensors[name]
            assert (info.name, info.shape, torch_dtype(info.dtype)) == (name, tuple(tensor.shape), tensor.dtype)
            assert read(checkpoint, name) == data_of(tensor)


def of_all_types() -> dict[str, torch.Tensor]:
    """One tensor per type, with bytes that are valid in all of them, and shapes that are easy to get wrong."""
    tensors = {}
    for code in BITS:
        dtype = torch_dtype(code)
        if dtype is not None:
            data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
            data = data % 2 if dtype == torch.bool else data
            tensors[f"layer.{code}"] = data.view(dtype).reshape(2, 3)
    return tensors | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "größe 😀": torch.ones(1, 1, 3)}
