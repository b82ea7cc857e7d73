"""The interfaces of opened models: `Opened` for adapters and checkpoints, `Checkpoint` for those that store values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.errors import InputError, closest


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
    def stored_bytes(self, name: str) -> int:
        """Returns how many bytes of its own files are read for the tensor `name`."""

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

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the row-major little-endian bytes of tensor `name`, from byte `offset` on.

        Threads may call this at the same time. Bytes beyond the tensor's end are an `InputError`, and so is a file that
        was changed since opening; one that cannot be read or was cut short is a `StorageError`.
        """

    def stored_bytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def _target(self, name: str, offset: int, buffer: memoryview) -> memoryview:
        """Returns `buffer` as plain bytes, after checking that the tensor has that many from `offset` on."""
        info = self.tensors.get(name)
        if info is None:
            raise InputError(f"{self.path}: there is no tensor {name!r}{closest(name, list(self.tensors))}")
        target = buffer.cast("B") if buffer.nbytes else memoryview(b"")  # cast refuses shapes with a 0
        if offset < 0 or offset + target.nbytes > info.nbytes:
            raise InputError(
                f"{self.path}: bytes {offset} to {offset + target.nbytes} of tensor {name!r} were asked for, "
                f"but it has {info.nbytes}"
            )
        return target
