"""Plans which tensors go into which output file, and makes the headers and the index that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunable_magmax.checkpoints.safetensors_file import LARGEST_HEADER
from tunable_magmax.checkpoints.tensors import FORMAT_KEY, TensorInfo, names_by_tensor
from tunable_magmax.errors import InputError

INDEX = "model.safetensors.index.json"
"""Says in which file each tensor is, if there are several."""


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
        raise InputError(
            f"the header of {len(tensors)} tensors would have {len(text)} bytes, but safetensors allows "
            f"{LARGEST_HEADER}: use a smaller shard size"
        )
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
