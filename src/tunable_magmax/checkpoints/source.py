"""Opens checkpoints: a safetensors file, a torch file, or a directory in the Hugging Face layout."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from tunable_magmax.checkpoints.checkpoint import Checkpoint, PositionedFile
from tunable_magmax.checkpoints.safetensors_file import INDEX, SafetensorsFile
from tunable_magmax.errors import InputError, StorageError, some_of
from tunable_magmax.files import is_plain_name, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Where PEFT keeps an adapter's tensors, in order of preference."""

# In order of preference: safetensors before torch, and an index before a single file of the same kind.
_LAYOUTS = (INDEX, "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save before it wrote zip archives
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt"})


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a safetensors file, a file of `torch.save`, or a directory that holds one or an index and its shards.

    Only headers are read; data comes with `read_into`. Files are told apart by content, not by name.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"w": torch.tensor([1.0, 2.0])}, f"{folder}/model.safetensors")
    ...     with open_checkpoint(folder) as checkpoint:
    ...         data = bytearray(checkpoint.tensors["w"].nbytes)
    ...         checkpoint.read_into("w", 0, memoryview(data))
    ...         checkpoint.tensors["w"], torch.frombuffer(data, dtype=torch.float32)
    (TensorInfo(name='w', dtype='F32', shape=(2,)), tensor([1., 2.]))
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_directory(path)
        if not path.exists():
            raise InputError(f"{path} does not exist: give a checkpoint, a file or directory, or org/name of the hub")
    except StorageError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    return open_file(path)


def open_file(path: Path) -> Checkpoint:
    """Opens a checkpoint in one file."""
    file = PositionedFile(path)
    head = bytearray(min(64, file.size))
    file.read_into(0, memoryview(head))
    if not head:
        raise InputError(f"{path} is empty (0 bytes): download or save it again")
    if head[8:9] == b"{" and head[4:8] == bytes(4):
        return SafetensorsFile(path)
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not the weights themselves: fetch them with `git lfs pull`")
    is_torch = head.startswith((b"PK\x03\x04", _LEGACY_TORCH))
    if path.suffix == ".safetensors":
        if is_torch:  # torch itself would go by the name
            raise InputError(f"{path} is a torch file in spite of its name: rename it so that it ends in .pt")
        return SafetensorsFile(path)  # damaged; its header's errors tell more
    if is_torch or head[0] == 0x80:
        from tunable_magmax.checkpoints.torch_file import TorchFile

        return TorchFile(path)  # or any other pickle, which torch refuses safely
    raise InputError(f"{path} is neither a safetensors nor a torch file: it starts with {bytes(head[:8])!r}")


def holds_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter, and no whole model."""
    try:
        whole = any((path / name).exists() for name in _LAYOUTS)
        return not whole and any((path / name).exists() for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def as_checkpoint(adapter: Path) -> str:
    """Returns the command that makes a checkpoint of an adapter; BASE is to be filled in.

    >>> as_checkpoint(Path("lora"))
    'tmx merge --base BASE --task lora --method last_task --scale 1 -o lora-merged'
    """
    made = adapter.with_name(f"{adapter.name}-merged") if adapter.name else Path("merged")
    task = ["--task", str(adapter), "--method", "last_task", "--scale", "1", "-o", str(made)]
    return shlex.join(["tmx", "merge", "--base", "BASE", *task])


def _open_directory(path: Path) -> Checkpoint:
    for name in _LAYOUTS:
        if (path / name).exists():
            parts = _open_shards(path, path / name) if name.endswith(".json") else [open_file(path / name)]
            return _Directory(path, parts)
    if holds_adapter(path):
        raise InputError(
            f"{path} is an adapter: give it as a task, or make a checkpoint of it first: {as_checkpoint(path)}"
        )
    if (path / "run.json").is_file():
        raise InputError(f"{path} is a run directory with several models: give one of its checkpoints")
    weights = sorted(item.name for item in path.iterdir() if item.suffix in WEIGHT_SUFFIXES)
    found = f"weight files found there: {', '.join(weights) or 'none'}"
    raise InputError(f"{path} holds none of {', '.join(_LAYOUTS)}; {found}. Point at a file, or add an index")


class _Directory(Checkpoint):
    """Files with different tensors, as one checkpoint."""

    def __init__(self, path: Path, parts: Sequence[Checkpoint]) -> None:
        self.path = path
        self.files = tuple(file for part in parts for file in part.files)
        self.in_memory = sum(part.in_memory for part in parts)
        self._parts = parts
        self._holder = {name: part for part in parts for name in part.tensors}
        self.tensors = {name: part.tensors[name] for name, part in self._holder.items()}
        aliases = {alias: name for part in parts for alias, name in part.aliases.items()}
        self.aliases = {alias: name for alias, name in aliases.items() if alias not in self._holder}

    def _read(self, name: str, offset: int, target: memoryview) -> None:
        self._holder[name].read_into(name, offset, target)

    def refuse_changed(self) -> None:
        for part in self._parts:
            part.refuse_changed()

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _open_shards(path: Path, index: Path) -> list[Checkpoint]:
    """Opens the shards of an index in order of their names, or raises one error with all that is wrong with them."""
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if "\\" in name or not is_plain_name(name)]:
        shown = some_of(outside, 20, show=repr)
        raise InputError(f"{index}: shards must be plain names of files beside the index, found {shown}: correct them")
    placed: dict[str, set[str]] = {name: set() for name in names}
    for tensor, shard in weight_map.items():
        placed[shard].add(tensor)
    parts: list[Checkpoint] = []
    problems: list[str] = []
    for name in names:
        try:
            parts.append(open_file(path / name))
        except InputError as error:
            problems.append(str(error))
        else:
            problems += _disagreements(name, parts[-1], placed[name])
    if problems:
        shown = some_of(problems, 20, joint="; ")
        raise InputError(f"{index} and its shards do not fit: {shown}. Get the missing or right files again")
    return parts


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index}: expected a 'weight_map' from tensor to shard names: download or save it again")
    return weight_map


def _disagreements(shard: str, part: Checkpoint, listed: Set[str]) -> Iterator[str]:
    if absent := sorted(listed - {*part.tensors, *part.aliases}):
        yield f"{shard} should hold by the index but does not: {some_of(absent, 20, show=repr)}"
    if unlisted := [name for name in part.tensors if name not in listed]:
        yield f"{shard} holds but the index puts elsewhere or nowhere: {some_of(unlisted, 20, show=repr)}"
