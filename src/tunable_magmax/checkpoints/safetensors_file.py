"""Opens one safetensors file: its header is checked completely, its data is read by position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.positioned_file import PositionedFile
from tunable_magmax.checkpoints.tensors import BITS, FORMAT_KEY, LONGEST_NAME, MOST_DIMENSIONS, TensorInfo
from tunable_magmax.errors import InputError, shortened
from tunable_magmax.files import parse_json

LARGEST_HEADER = 100_000_000  # as in the format's specification


class SafetensorsFile(Checkpoint):
    """A checkpoint in one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._file = PositionedFile(path)
        try:
            header, self._data_start = _read_header(self._file)
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise _DamagedError("'__metadata__' in its header must map names to texts")
            entries = [_entry(name, value) for name, value in header.items()]
            ordered = _in_file_order(entries, self._file.size - self._data_start)
        except _DamagedError as error:
            raise InputError(f"{path}: {error}") from None
        self._begins = {info.name: begin for info, begin, _ in ordered}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({info.name: info for info, _, _ in ordered})
        # What `safetensors.torch.save_model` writes for tied tensors: the dropped name, pointing to the one kept.
        self.aliases: Mapping[str, str] = MappingProxyType(
            {
                alias: name
                for alias, name in metadata.items()
                if alias != FORMAT_KEY and alias not in self.tensors and name in self.tensors
                if len(alias) <= LONGEST_NAME
            }
        )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = self._target(name, offset, buffer)
        self._file.read_into(self._data_start + self._begins[name] + offset, target)

    def refuse_changed(self) -> None:
        self._file.refuse_changed()


class _DamagedError(Exception):
    """Says what is wrong with a file, and what to do."""

    def __init__(self, problem: str, advice: str = "the file is damaged, download or save it again") -> None:
        super().__init__(f"{problem}: {advice}")


def _read_header(file: PositionedFile) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the data section starts."""
    if file.size < 8:
        raise _DamagedError(f"a safetensors file has at least 8 bytes, found {file.size}")
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > LARGEST_HEADER:
        raise _DamagedError(
            f"its first 8 bytes announce a header of {length} bytes, but safetensors allows {LARGEST_HEADER}",
            "this is not a safetensors file, or it is damaged",
        )
    if 8 + length > file.size:
        raise _DamagedError(f"header of {length} bytes announced, but only {file.size - 8} follow")
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    if not text.startswith(b"{"):
        raise _DamagedError(f"a safetensors header starts with '{{', found {bytes(text[:8])!r}")
    try:
        return parse_json(text, _without_duplicates), 8 + length
    except ValueError as error:
        raise _DamagedError(f"its header is not JSON ({error})") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise _DamagedError(f"its header has the name {shortened(repr(name))} twice")
        content[name] = value
    return content


def _entry(name: str, value: object) -> tuple[TensorInfo, int, int]:
    """Returns a tensor of the header, and where its data begins and ends."""
    where = f"tensor {shortened(repr(name), 200)}"
    if len(name) > LONGEST_NAME:
        raise _DamagedError(f"{where}: its name has {len(name):,} characters, at most {LONGEST_NAME:,} are allowed")
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        shown = shortened(repr(value))
        raise _DamagedError(f"{where}: expected an object with dtype, shape and data_offsets, found {shown}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        shown = shortened(repr(dtype))
        raise _DamagedError(
            f"{where} has the unknown dtype {shown}; known are {', '.join(BITS)}", "save it in one of these"
        )
    if isinstance(shape, list) and len(shape) > MOST_DIMENSIONS:
        raise _DamagedError(f"{where} has {len(shape):,} dimensions, at most {MOST_DIMENSIONS} are allowed")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise _DamagedError(f"{where}: its shape must be a list of integers >= 0, found {shortened(repr(shape))}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise _DamagedError(f"{where}: data_offsets must be two integers >= 0, found {shortened(repr(offsets))}")
    begin, end = offsets
    size, rest = divmod(math.prod(shape) * BITS[dtype], 8)
    if rest:
        raise _DamagedError(f"{where}: {math.prod(shape)} elements of {dtype} do not fill whole bytes")
    if end - begin != size:
        span = f"its data_offsets {offsets} span {end - begin}"
        raise _DamagedError(f"{where}: shape {shape} of {dtype} needs {size} bytes, but {span}")
    return TensorInfo(name, dtype, tuple(shape)), begin, end


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _in_file_order(entries: list[tuple[TensorInfo, int, int]], size: int) -> list[tuple[TensorInfo, int, int]]:
    """Sorts the tensors and checks that they fill the data section of `size` bytes without holes or overlaps."""
    at, before = 0, "the start of the data"
    ordered = sorted(entries, key=lambda entry: entry[1:])
    for info, begin, end in ordered:
        if end > size:
            raise _DamagedError(
                f"tensor {info.name!r} ends at byte {end} of the data, but the file has only {size}, so it is cut short"
            )
        if begin != at:
            what = "overlaps with" if begin < at else f"leaves a hole of {begin - at} bytes after"
            raise _DamagedError(f"tensor {info.name!r} {what} {before}")
        at, before = end, f"tensor {info.name!r}"
    if at != size:
        raise _DamagedError(f"{size - at} bytes follow after {before}, expected none")
    return ordered
