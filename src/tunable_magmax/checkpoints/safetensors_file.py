"""One safetensors file: its header is checked to the letter, its data read by position.

No mapping into memory: mapped pages would count as memory of the process, and reading a mapped file that was cut short
kills the process instead of raising an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.descriptors import PositionedFile
from tunable_magmax.checkpoints.tensors import BITS, TensorInfo
from tunable_magmax.errors import InputError, shortened

LARGEST_HEADER = 100_000_000  # as in the format's specification
_AGAIN = "the file is damaged, download or save it again"


class SafetensorsFile(Checkpoint):
    """A checkpoint in one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._file = PositionedFile(path)
        try:
            entries, metadata, self._data_start = _read_header(self._file)
            self._begins = {
                info.name: begin for info, begin in _checked(path, entries, self._file.size - self._data_start)
            }
        except BaseException:
            self._file.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({name: entries[name][0] for name in self._begins})
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


def _read_header(file: PositionedFile) -> tuple[dict[str, tuple[TensorInfo, int, int]], dict[str, str], int]:
    """All tensors with where their data begins and ends, the metadata, and where the data section starts."""
    path = file.path
    if file.size < 8:
        raise InputError(f"{path}: a safetensors file has at least 8 bytes, found {file.size}: {_AGAIN}")
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > LARGEST_HEADER:
        raise InputError(
            f"{path}: its first 8 bytes announce a header of {length} bytes, but safetensors allows {LARGEST_HEADER}: "
            f"this is no safetensors file, or {_AGAIN}"
        )
    if 8 + length > file.size:
        raise InputError(f"{path}: header of {length} bytes announced, but only {file.size - 8} follow: {_AGAIN}")
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    if not text.startswith(b"{"):
        raise InputError(f"{path}: a safetensors header starts with '{{', found {bytes(text[:8])!r}: {_AGAIN}")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_Unique)
    except _DuplicateError as error:
        raise InputError(f"{path}: its header has the name {error.args[0]!r} twice: {_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: its header is not JSON ({error}): {_AGAIN}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{path}: '__metadata__' in its header must map names to texts: {_AGAIN}")
    return {name: _entry(path, name, value) for name, value in header.items()}, metadata, 8 + length


class _DuplicateError(Exception):
    pass


class _Unique(dict[str, Any]):
    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            raise _DuplicateError(next(name for name in names if names.count(name) > 1))


def _entry(path: Path, name: str, value: object) -> tuple[TensorInfo, int, int]:
    where = f"{path}: tensor {name!r}"
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: its name is not valid Unicode: {_AGAIN}") from None
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise InputError(
            f"{where}: expected an object with dtype, shape and data_offsets, found {shortened(repr(value))}: {_AGAIN}"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise InputError(
            f"{where} has the unknown dtype {shortened(repr(dtype))}; known are {', '.join(BITS)}: "
            "save it in one of these"
        )
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise InputError(
            f"{where}: its shape must be a list of integers >= 0, found {shortened(repr(shape))}: {_AGAIN}"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise InputError(f"{where}: data_offsets must be two integers >= 0, found {shortened(repr(offsets))}: {_AGAIN}")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise InputError(f"{where}: {math.prod(shape)} elements of {dtype} do not fill whole bytes: {_AGAIN}")
    if end - begin != bits // 8:
        raise InputError(
            f"{where}: shape {shape} of {dtype} needs {bits // 8} bytes, but its data_offsets {offsets} span "
            f"{end - begin}: {_AGAIN}"
        )
    return TensorInfo(name, dtype, tuple(shape)), begin, end


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _checked(path: Path, entries: Mapping[str, tuple[TensorInfo, int, int]], size: int) -> list[tuple[TensorInfo, int]]:
    """Tensors and their begins in file order, after checking that they tile the data section of `size` bytes."""
    at, before = 0, "the start of the data"
    ordered = sorted(entries.values(), key=lambda entry: entry[1:])
    for info, begin, end in ordered:
        if end > size:
            raise InputError(
                f"{path}: tensor {info.name!r} ends at byte {end} of the data, but the file has only {size}: "
                "the file is cut short, download or save it again"
            )
        if begin != at:
            what = "overlaps with" if begin < at else f"leaves a hole of {begin - at} bytes after"
            raise InputError(f"{path}: tensor {info.name!r} {what} {before}: {_AGAIN}")
        at, before = end, f"tensor {info.name!r}"
    if at != size:
        raise InputError(f"{path}: {size - at} bytes follow after {before}, expected none: {_AGAIN}")
    return [(info, begin) for info, begin, _ in ordered]
