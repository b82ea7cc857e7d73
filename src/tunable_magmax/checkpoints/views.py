"""A checkpoint under other names, and with tensors from memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.tensors import TensorInfo, dtype_code, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class View(Checkpoint):
    """Some tensors of an opened checkpoint under other names: `names` are its own names by those to be used.

    `made` are more tensors, small ones, which are in memory.
    """

    def __init__(self, opened: Checkpoint, names: Mapping[str, str], made: Mapping[str, Tensor] | None = None) -> None:
        self.path, self.files, self.in_memory = opened.path, opened.files, opened.in_memory
        self._opened, self._made = opened, dict(made or {})
        self._names = {name: opened.aliases.get(own, own) for name, own in names.items()}
        kept: dict[str, str] = {}
        for name, stored in self._names.items():
            kept.setdefault(stored, name)
        tensors = {name: replace(opened.tensors[stored], name=name) for stored, name in kept.items()}
        tensors |= {
            name: TensorInfo(name, dtype_code(tensor.dtype) or "", tuple(tensor.shape))
            for name, tensor in self._made.items()
        }
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.aliases: Mapping[str, str] = MappingProxyType(
            {name: kept[stored] for name, stored in self._names.items() if kept[stored] != name}
        )

    def with_made(self, made: Mapping[str, Tensor]) -> View:
        """Returns the same view with these tensors as well."""
        return View(self._opened, self._names, made)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = self._target(name, offset, buffer)
        if name not in self._made:
            self._opened.read_into(self._names[name], offset, buffer)
        elif target.nbytes:
            import torch

            content = self._made[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
            target[:] = content[offset : offset + target.nbytes]

    def stored_bytes(self, name: str) -> int:
        return 0 if name in self._made else self._opened.stored_bytes(self._names[name])

    def refuse_changed(self) -> None:
        self._opened.refuse_changed()

    def close(self) -> None:
        self._opened.close()


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Reads one whole tensor, in the type that it is stored in."""
    import torch

    info = checkpoint.tensors[checkpoint.aliases.get(name, name)]
    dtype = torch_dtype(info.dtype)
    assert dtype is not None
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    checkpoint.read_into(info.name, 0, raw.numpy().data)
    return raw.view(dtype).reshape(info.shape)
