"""Opens one safetensors file: the safetensors library checks its header, its data is read by position.

No data is mapped into memory: mapped pages would count as memory of the process, and reading a mapped file that was cut
short kills the process instead of raising an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.descriptors import PositionedFile
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.errors import InputError

LARGEST_HEADER = 100_000_000  # as in the format's specification


class SafetensorsFile(Checkpoint):
    """A checkpoint in one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._file = PositionedFile(path)
        try:
            header, self._data_start = _checked_header(self._file)
        except BaseException:
            self._file.close()
            raise
        metadata = header.pop("__metadata__", None) or {}
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        self._begins = {name: entry["data_offsets"][0] for name, entry in entries}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: TensorInfo(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries}
        )
        # What `safetensors.torch.save_model` writes for tied tensors: the dropped name, pointing to the one kept.
        self.aliases: Mapping[str, str] = MappingProxyType(
            {
                alias: name
                for alias, name in metadata.items()
                if alias != "format" and alias not in self.tensors and name in self.tensors
            }
        )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = self._target(name, offset, buffer)
        self._file.read_into(self._data_start + self._begins[name] + offset, target)

    def close(self) -> None:
        self._file.close()


def _checked_header(file: PositionedFile) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the data starts; a damaged file or a wrong header is an `InputError`."""
    try:
        with safe_open(file.path, "numpy"):  # checks types, shapes and sizes, and that tensors fill the file
            pass
    except SafetensorError as error:
        raise InputError(
            f"{file.path}: {error}. The file is damaged or cut short, or has a type unknown here: "
            "download or save it again"
        ) from None
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    text = bytearray(int.from_bytes(prefix, "little"))
    file.read_into(8, memoryview(text))
    return json.loads(text), 8 + len(text)
