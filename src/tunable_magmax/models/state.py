"""Reads the tensors of a checkpoint, and computes the digest that identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.checkpoints.source import Checkpoint, open_checkpoint
from tunable_magmax.checkpoints.tensors import dtype_code, torch_dtype
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_CHUNK = 1 << 24


def checkpoint_digest(path: str | Path) -> str:
    """Returns the SHA-256 of the stored tensors in sorted order of names: the same however files are sharded.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": torch.tensor([1.0, 2.0])}, f"{folder}/model.safetensors")
    ...     checkpoint_digest(folder)[:15]
    'sha256:9ed77913'
    """
    digest = hashlib.sha256()
    with open_checkpoint(path) as checkpoint:
        for name in sorted(checkpoint.tensors):
            digest.update(_heading_of(checkpoint, name))
            for part in _chunks(checkpoint, name):
                digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the digest that a checkpoint with exactly these tensors would have.

    >>> import torch
    >>> tensors_digest({"w": torch.tensor([1.0, 2.0])})[:15]
    'sha256:9ed77913'
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(_heading(name, str(dtype_code(tensor.dtype)), tuple(tensor.shape)))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def read_state(path: str | Path) -> tuple[dict[str, Tensor], str]:
    """Reads all tensors of a checkpoint, tied names included, and its digest."""
    digest = hashlib.sha256()
    return _tensors(path, digest.update), f"sha256:{digest.hexdigest()}"


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Reads all tensors of a checkpoint, tied names included."""
    return _tensors(path, lambda data: None)


def _tensors(path: str | Path, seen: Callable[[bytes | bytearray], None]) -> dict[str, Tensor]:
    import torch

    state: dict[str, Tensor] = {}
    with open_checkpoint(path) as checkpoint:
        for name in sorted(checkpoint.tensors):
            info = checkpoint.tensors[name]
            dtype = torch_dtype(info.dtype)
            if dtype is None:
                raise InputError(f"{path}: {name!r} has type {info.dtype}, which torch cannot compute in; convert it")
            data = bytearray(info.nbytes)
            checkpoint.read_into(name, 0, memoryview(data))
            seen(_heading_of(checkpoint, name))
            seen(data)
            tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            state[name] = tensor.reshape(info.shape)
        state |= {alias: state[kept] for alias, kept in checkpoint.aliases.items()}
    return state


def _heading_of(checkpoint: Checkpoint, name: str) -> bytes:
    info = checkpoint.tensors[name]
    return _heading(name, info.dtype, info.shape)


def _heading(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return f"{name}\n{dtype}\n{','.join(map(str, shape))}\n".encode()


def _chunks(checkpoint: Checkpoint, name: str) -> Iterator[memoryview]:
    size = checkpoint.tensors[name].nbytes
    buffer = memoryview(bytearray(min(size, DIGEST_CHUNK)))
    for start in range(0, size, DIGEST_CHUNK):
        part = buffer[: min(DIGEST_CHUNK, size - start)]
        checkpoint.read_into(name, start, part)
        yield part
