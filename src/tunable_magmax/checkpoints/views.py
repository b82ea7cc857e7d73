"""A checkpoint under other names, and with tensors that are made rather than read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

Make = Callable[[str], "Tensor"]
"""Makes the tensor of a name."""


class View(Checkpoint):
    """Some tensors of an opened checkpoint under other names: `names` are its own names by those to be used.

    `made` describes more tensors, small ones, which `make` gives when they are first read.
    """

    def __init__(
        self,
        opened: Checkpoint,
        names: Mapping[str, str],
        made: Mapping[str, TensorInfo] | None = None,
        make: Make | None = None,
    ) -> None:
        self.path, self.files = opened.path, opened.files
        self._opened, self._make = opened, make
        self._names = {name: opened.aliases.get(own, own) for name, own in names.items()}
        kept: dict[str, str] = {}
        for name, stored in self._names.items():
            kept.setdefault(stored, name)
        self._made = dict(made or {})
        tensors = {name: replace(opened.tensors[stored], name=name) for stored, name in kept.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors | self._made)
        self.aliases: Mapping[str, str] = MappingProxyType(
            {name: kept[stored] for name, stored in self._names.items() if kept[stored] != name}
        )
        self._bytes: dict[str, memoryview] = {}

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = self._target(name, offset, buffer)
        if name not in self._made:
            self._opened.read_into(self._names[name], offset, buffer)
        elif target.nbytes:
            target[:] = self._content(name)[offset : offset + target.nbytes]

    def _content(self, name: str) -> memoryview:
        """Returns the bytes of a made tensor; two threads that ask at once make it twice."""
        if name not in self._bytes:
            import torch

            assert self._make is not None
            values = self._make(name).contiguous()
            self._bytes[name] = values.reshape(-1).view(torch.uint8).numpy().data
        return self._bytes[name]

    def making(self, make: Make) -> View:
        """Returns the same view, whose made tensors `make` gives."""
        return View(self._opened, self._names, self._made, make)

    def stored_bytes(self, name: str) -> int:
        return 0 if name in self._made else self._opened.stored_bytes(self._names[name])

    def refuse_changed(self) -> None:
        self._opened.refuse_changed()

    def digests(self) -> dict[Path, str]:
        return self._opened.digests()

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
