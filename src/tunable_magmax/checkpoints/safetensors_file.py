"""The safetensors format: opens files after a complete check of their header, and plans those of outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint, PositionedFile
from tunable_magmax.checkpoints.tensors import (
    BITS,
    FORMAT_KEY,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    TensorInfo,
    names_by_tensor,
)
from tunable_magmax.errors import InputError, shortened
from tunable_magmax.files import parse_json

INDEX = "model.safetensors.index.json"
"""Says in which file each tensor is, if there are several."""
LARGEST_HEADER = 100_000_000  # as in the format's specification


class SafetensorsFile(Checkpoint):
    """A checkpoint in one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._file = PositionedFile(path)
        try:
            header, self._data_start = _read_header(self._file)
            metadata = header.pop("__metadata__", None)
            metadata = {} if metadata is None else metadata
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise _DamagedError("'__metadata__' in its header must map names to texts")
            entries = [_entry(name, value) for name, value in header.items()]
            ordered = _in_file_order(entries, self._file.size - self._data_start)
        except _DamagedError as error:
            raise InputError(f"{path}: {error}: the file is damaged, download or save it again") from None
        self.metadata: dict[str, str] = metadata
        self._begins = {info.name: begin for info, begin in ordered}
        self.tensors = {info.name: info for info, _ in ordered}
        # What `safetensors.torch.save_model` writes for tied tensors: the dropped name, pointing to the one kept.
        self.aliases = {
            alias: name
            for alias, name in metadata.items()
            if alias != FORMAT_KEY and alias not in self.tensors and name in self.tensors and len(alias) <= LONGEST_NAME
        }

    def _read(self, name: str, offset: int, target: memoryview) -> None:
        self._file.read_into(self._data_start + self._begins[name] + offset, target)

    def refuse_changed(self) -> None:
        self._file.refuse_changed()


class _DamagedError(Exception):
    """Says what is wrong with a file."""


def _read_header(file: PositionedFile) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the data section starts."""
    if file.size < 8:
        raise _DamagedError(f"a safetensors file has at least 8 bytes, found {file.size}")
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(LARGEST_HEADER, file.size - 8):
        raise _DamagedError(f"its first 8 bytes announce a header of {length} bytes, but the file has {file.size}")
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
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if (
            dtype in BITS and len(shape) <= MOST_DIMENSIONS and all(map(_is_size, (*shape, begin, end)))
        ):
            bits = math.prod(shape) * BITS[dtype]
            if bits != 8 * (end - begin):
                raise _DamagedError(f"{where}: shape {shape} of {dtype} has {bits} bits, but {end - begin} bytes")
            return TensorInfo(name, dtype, tuple(shape)), begin, end
    raise _DamagedError(
        f"{where}: expected a known dtype, a shape of at most {MOST_DIMENSIONS} sizes and two data_offsets, "
        f"found {shortened(repr(value), 200)}"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _in_file_order(entries: list[tuple[TensorInfo, int, int]], size: int) -> list[tuple[TensorInfo, int]]:
    """Sorts the tensors and checks that they fill the data section of `size` bytes without holes or overlaps."""
    at, before = 0, "the start of the data"
    ordered = sorted(entries, key=lambda entry: entry[1:])
    for info, begin, end in ordered:
        if begin != at:
            raise _DamagedError(f"tensor {info.name!r} begins at byte {begin}, not at {at}, the end of {before}")
        at, before = end, f"tensor {info.name!r}"
    if at != size:
        raise _DamagedError(f"its tensors end at byte {at} of the data, but the file has {size}")
    return [(info, begin) for info, begin, _ in ordered]


# -- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: `header` (with its length in front) and then `data_size` bytes, the `tensors` in their order."""

    name: str
    tensors: tuple[TensorInfo, ...]
    header: bytes
    data_size: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_size


def plan_shards(
    tensors: Sequence[TensorInfo],
    shard_size: int | None = None,
    stem: str = "model",
    *,
    metadata: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> tuple[Shard, ...]:
    """Distributes tensors, in the given order, over safetensors files of at most `shard_size` bytes of data each.

    A tensor beyond that size gets a file of its own; None means one file. Every header carries `metadata`; an alias
    (other name -> tensor name; none may be `FORMAT_KEY`) is recorded in the metadata of the file that holds its tensor.

    >>> w = [TensorInfo(name, "F32", (10,)) for name in "abc"]
    >>> [(shard.name, shard.data_size) for shard in plan_shards(w, 100)]
    [('model-00001-of-00002.safetensors', 80), ('model-00002-of-00002.safetensors', 40)]
    >>> [shard.name for shard in plan_shards(w)]
    ['model.safetensors']
    """
    if shard_size is not None and shard_size < 1:
        raise InputError(f"the shard size is {shard_size}, expected at least 1 byte")
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in tensors:
        if shard_size is not None and groups[-1] and filled + info.nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(info)
        filled += info.nbytes
    count, tied_to = len(groups), names_by_tensor(aliases or {})
    shards = []
    for number, group in enumerate(groups, 1):
        name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        tied = {alias: info.name for info in group for alias in tied_to.get(info.name, ())}
        header = _header(group, {**(metadata or {}), **tied, FORMAT_KEY: "pt"})
        shards.append(Shard(name, tuple(group), header, sum(info.nbytes for info in group)))
    return tuple(shards)


def _header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for info in tensors:
        if info.name in content:
            raise InputError(f"two output tensors have the name {info.name!r}, which one file cannot hold")
        end = at + info.nbytes
        content[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts aligned
    if len(text) > LARGEST_HEADER:
        raise InputError(f"a header of {len(text)} bytes is more than safetensors allows: use a smaller shard size")
    return len(text).to_bytes(8, "little") + text


def index_json(shards: Sequence[Shard]) -> bytes:
    """Returns the content of the index file.

    >>> shards = plan_shards([TensorInfo("b", "I8", (2,)), TensorInfo("a", "I8", (1,))], 2)
    >>> json.loads(index_json(shards))["weight_map"]
    {'a': 'model-00002-of-00002.safetensors', 'b': 'model-00001-of-00002.safetensors'}
    """
    weight_map = {info.name: shard.name for shard in shards for info in shard.tensors}
    total = sum(shard.data_size for shard in shards)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
