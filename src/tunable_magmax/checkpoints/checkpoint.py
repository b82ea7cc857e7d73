"""The interfaces of opened models: `Opened` for adapters and checkpoints, `Checkpoint` for those that store values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tunable_magmax.checkpoints.tensors import TensorInfo, dtype_code, torch_dtype
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class Opened(ABC):
    """An opened model: a checkpoint, or an adapter on a base. Use it as a context manager or call `close`.

    `tensors` are in file order; `aliases` maps the other names of tied tensors to the name kept in `tensors`;
    `files` are all files that the values depend on; `in_memory` bytes of them are loaded when it is opened.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    files: tuple[Path, ...]
    in_memory: int = 0

    @abstractmethod
    def refuse_changed(self) -> None:
        """Raises an `InputError` if a file is not what it was when it was opened; for after the last read."""

    def close(self) -> None:  # noqa: B027 - files are opened for each read
        """Frees what was loaded. Nothing may be read afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def would_be_replaced_by(self, out: Path) -> bool:
        """Whether an output at `out` would replace a file of this model, or a link to one."""
        target = out.resolve()
        places = {self.path.resolve()}
        for file in self.files:
            places |= {file.resolve(), file.parent.resolve() / file.name}
        return any(target == place or target in place.parents for place in places)


class Checkpoint(Opened):
    """An opened checkpoint: headers are known, data is read on demand."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the row-major little-endian bytes of tensor `name`, from byte `offset` on.

        Threads may call this at the same time. Bytes beyond the tensor's end are an `InputError`, and so is a file that
        was changed since opening; one that cannot be read or was cut short is a `StorageError`.
        """
        size = self.tensors[name].nbytes if name in self.tensors else 0
        if name not in self.tensors or offset < 0 or offset + buffer.nbytes > size:
            raise InputError(
                f"{self.path}: bytes {offset} to {offset + buffer.nbytes} of tensor {name!r} were asked for, "
                f"but it has {size}"
            )
        if buffer.nbytes:  # cast refuses shapes with a 0
            self._read(name, offset, buffer.cast("B"))

    @abstractmethod
    def _read(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target`, at least one byte, with a part of the tensor `name` that is there."""


class View(Checkpoint):
    """Some tensors of an opened checkpoint under other names: `names` are its own names by those to be used.

    `made` are more tensors, small ones, which are in memory.
    """

    def __init__(self, opened: Checkpoint, names: Mapping[str, str], made: Mapping[str, Tensor] | None = None) -> None:
        self.path, self.files, self.in_memory = opened.path, opened.files, opened.in_memory
        self._opened, self._made = opened, dict(made or {})
        self._names = {name: opened.aliases.get(own, own) for name, own in names.items()}
        kept = {stored: name for name, stored in reversed(self._names.items())}
        made_infos = {
            name: TensorInfo(name, dtype_code(tensor.dtype) or "", tuple(tensor.shape))
            for name, tensor in self._made.items()
        }
        infos = {name: replace(opened.tensors[own], name=name) for own, name in reversed(kept.items())}
        self.tensors = infos | made_infos
        self.aliases = {name: kept[stored] for name, stored in self._names.items() if kept[stored] != name}

    def with_made(self, made: Mapping[str, Tensor]) -> View:
        """Returns the same view with these tensors as well."""
        return View(self._opened, self._names, made)

    def _read(self, name: str, offset: int, target: memoryview) -> None:
        if name not in self._made:
            self._opened.read_into(self._names[name], offset, target)
            return
        import torch

        content = self._made[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
        target[:] = content[offset : offset + target.nbytes]

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
