"""Opened models: `Opened` for adapters and checkpoints, `Checkpoint` for those that store values, and their files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tunable_magmax.checkpoints.tensors import TensorInfo, dtype_code, torch_dtype
from tunable_magmax.errors import InputError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_READ = 1 << 30  # one system call gives at most 2 GiB


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
            asked = f"bytes {offset} to {offset + buffer.nbytes} of tensor {name!r}"
            raise InputError(f"{self.path}: {asked} were asked for, but it has {size}")
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


class PositionedFile:
    """A file that threads read at given positions, and that is refused if it was changed after it was opened.

    Each read compares device, inode, size and time of the last write with those at opening. The time of the last change
    of the inode is not compared: backups, new names and new permissions change it. No descriptor stays open: fifty
    sharded checkpoints are thousands of files. Nothing is mapped into memory: mapped pages count as memory of the
    process, and reading a mapped file that was cut short kills it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise InputError(f"{path} is missing or not a regular file: check its name")
            with open(path, "rb", buffering=0) as file:
                self._identity = _identity(file.fileno())
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror or error}): check permissions and disk"
            ) from error
        self.size = self._identity[2]

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fills `buffer` (bytes, writable) from `position` on, or raises a `StorageError`."""
        done = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                self._compare(file.fileno())
                while done < buffer.nbytes:
                    count = os.preadv(file.fileno(), [buffer[done : done + _LARGEST_READ]], position + done)
                    if count == 0:
                        raise OSError("the file ends there")
                    done += count
                self._compare(file.fileno())
        except OSError as error:
            failed = f"reading failed at byte {position + done} ({error.strerror or error})"
            raise StorageError(f"{self.path}: {failed}: check the disk or restore the file, and run again") from error

    def refuse_changed(self) -> None:
        """Raises an `InputError` if the file is not the one that was opened, or was written to since then."""
        self.read_into(0, memoryview(b""))

    def _compare(self, descriptor: int) -> None:
        if _identity(descriptor) != self._identity:
            raise InputError(f"{self.path}: was changed after it was opened: wait until it is complete, and run again")


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Reads one whole tensor, in the type that it is stored in."""
    import torch

    info = checkpoint.tensors[checkpoint.aliases.get(name, name)]
    if (dtype := torch_dtype(info.dtype)) is None:
        raise InputError(
            f"{checkpoint.path}: {info.name!r} has type {info.dtype}, which torch cannot compute in; convert it"
        )
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    checkpoint.read_into(info.name, 0, raw.numpy().data)
    return raw.view(dtype).reshape(info.shape)
