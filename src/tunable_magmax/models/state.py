"""Reads the tensors of a checkpoint, or of a LoRA adapter on its base, and computes the digest that identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.checkpoints.checkpoint import Checkpoint, read_tensor
from tunable_magmax.checkpoints.source import as_checkpoint, holds_adapter, open_checkpoint
from tunable_magmax.checkpoints.tensors import Signature, dtype_code, torch_dtype
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.checkpoints.adapter import Adapter


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of tensors in sorted order of names: the same however a checkpoint of them is sharded.

    >>> import torch
    >>> tensors_digest({"w": torch.tensor([1.0, 2.0])})[:15]
    'sha256:9ed77913'
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name}\n{dtype_code(tensor.dtype)}\n{','.join(map(str, tensor.shape))}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def read_state(path: str | Path, base: str | Path | None = None) -> tuple[dict[str, Tensor], str]:
    """Reads all tensors of a checkpoint, or of an adapter on `base`, tied names included; and their digest."""
    state, aliases = _read(Path(path), base)
    return state, tensors_digest({name: tensor for name, tensor in state.items() if name not in aliases})


def read_tensors(path: str | Path, base: str | Path | None = None) -> dict[str, Tensor]:
    """Reads all tensors of a checkpoint, or of an adapter on `base`, tied names included."""
    return _read(Path(path), base)[0]


def _read(path: Path, base: str | Path | None) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Returns the tensors, and the names that are tied to one of these."""
    adapted = holds_adapter(path)
    if adapted and base is None:
        raise InputError(f"{path} is a LoRA adapter, which has no values without its base: {as_checkpoint(path)}")
    with open_checkpoint(path if base is None or not adapted else base) as opened:
        odd = next((info for info in opened.tensors.values() if torch_dtype(info.dtype) is None), None)
        if odd is not None:
            raise InputError(
                f"{opened.path}: {odd.name!r} has type {odd.dtype}, which torch cannot compute in; convert it"
            )
        state = tensors_of(opened)
        if adapted:
            from tunable_magmax.checkpoints.adapter import Adapter

            with Adapter(path, Signature(opened.tensors, opened.aliases)) as adapter:
                state = tensors_of(adapter, state)
        return state, opened.aliases


def tensors_of(
    opened: Checkpoint | Adapter, base: Mapping[str, Tensor] = {}, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Returns the tensors of an open checkpoint, or of an adapter on those of its base; tied names included."""
    if isinstance(opened, Checkpoint):
        state = {name: read_tensor(opened, name) for name in opened.tensors if name not in without}
    else:
        state = {**base, **_adapted(opened, base)}
    return state | {alias: state[kept] for alias, kept in opened.aliases.items() if kept in state}


def _adapted(adapter: Adapter, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that an adapter changes: base + scaling * B @ A, or what it holds in the base's place."""
    found = {}
    for name, part in adapter.parts.items():
        whole = base[name] if part.whole is None else read_tensor(adapter.stored, part.whole.name)
        if part.product is not None:
            a, b = (read_tensor(adapter.stored, info.name).double() for info in (part.product.a, part.product.b))
            step = part.product.scaling * (b @ a)
            whole = (whole.double() + (step.T if part.product.transposed else step)).to(
                torch_dtype(adapter.tensors[name].dtype)
            )
        found[name] = whole
    return found
