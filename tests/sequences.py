"""Model sequences for the tests of the engine, and the ways to put them on disk."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

StateDict = dict[str, Tensor]

# Odd sizes, some beyond a chunk of 2**17 elements; sorted by name, the frozen tensors lie between merged ones.
LARGE = {
    "embed.weight": (231, 257),
    "h.0.bias": (97,),
    "h.0.weight": (401, 331),
    "h.1.frozen": (63, 5),
    "h.1.scale": (),
    "h.1.weight": (110_001,),
    "h.2.empty": (0, 7),
    "h.2.frozen": (129,),
    "h.2.weight": (3, 11, 19),
    "head": (65, 64),
}
SMALL = {
    "a.weight": (33, 31),
    "b.bias": (64,),
    "b.frozen": (130,),
    "b.one": (1,),
    "c.scalar": (),
    "c.weight": (5, 7, 13),
    "d.empty": (0,),
    "d.weight": (769,),
}
TINY = {"a": (333,), "b.frozen": (70,), "c": (5, 13), "d": ()}
TYPES: dict[str, tuple[torch.dtype, ...]] = {
    "f32": (torch.float32,),
    "f64": (torch.float64,),
    "bf16": (torch.bfloat16,),
    "f32+f64": (torch.float32, torch.float64),
    "f32+bf16": (torch.bfloat16, torch.float32, torch.bfloat16),
    "f16+bf16": (torch.float16, torch.bfloat16),
}


def sequence(
    tasks: int, shapes: Mapping[str, tuple[int, ...]] = LARGE, types: str = "f32", seed: int = 0
) -> tuple[StateDict, list[StateDict]]:
    """A base and its tasks, a random walk with many equal magnitudes; "frozen" tensors do not change.

    The k-th tensor of checkpoint t has type (k + t) of `types`, so that a tensor is of several types over the sequence.
    Integer and bool tensors come along.
    """
    random = torch.Generator().manual_seed(seed)
    kinds = TYPES[types]
    checkpoints: list[StateDict] = [{} for _ in range(tasks + 1)]
    for k, (name, shape) in enumerate(sorted(shapes.items())):
        values = torch.randint(-64, 65, shape, generator=random) / 32
        for t, checkpoint in enumerate(checkpoints):
            if t and "frozen" not in name:
                step = torch.randn(shape, generator=random) * 0.02
                tie = torch.randint(0, 3, shape, generator=random) == 0
                values = values + torch.where(tie, torch.round(step * 64) / 64, step)
            checkpoint[name] = values.to(kinds[(k + t) % len(kinds)])
    for checkpoint in checkpoints:
        checkpoint["steps"] = torch.tensor(7)
        checkpoint["position_ids"] = torch.arange(77).reshape(1, 77)
        checkpoint["mask"] = torch.arange(13) % 3 == 0
    return checkpoints[0], checkpoints[1:]


def save_sharded(folder: Path, tensors: StateDict, shards: int) -> Path:
    """A Hugging Face directory whose shards hold the tensors in an order of their own."""
    folder.mkdir(parents=True)
    names = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())
    weight_map = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[k::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_sequence(
    folder: Path, base: StateDict, tasks: Sequence[StateDict], form: str = "file"
) -> tuple[Path, list[Path]]:
    """Write base and tasks into a folder: as "file", "shards", "torch" or "mixed" (each in turn)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for t, tensors in enumerate([base, *tasks]):
        kind = ("file", "shards", "torch")[t % 3] if form == "mixed" else form
        path = folder / f"theta-{t}"
        if kind == "file":
            path = path.with_suffix(".safetensors")
            save_file(tensors, path)
        elif kind == "torch":
            path = path.with_suffix(".pt")
            torch.save({"state_dict": tensors, "epoch": 3} if t % 2 else tensors, path)
        else:
            save_sharded(path, tensors, 2 + t % 3)
        paths.append(path)
    return paths[0], paths[1:]


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of everything that a merge to `out` has written, by the path beneath it."""
    if out.is_file():
        files = [out, out.with_name(f"{out.stem}.report.json")]
    else:
        files = sorted(path for path in out.rglob("*") if path.is_file())
    found = {}
    for path in files:
        name = path.name.removeprefix(out.stem) if out.is_file() else str(path.relative_to(out))
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def raw(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], str]]:
    """Type, shape and a digest of the bytes of each tensor: equal means the same to the bit, signs of zeros too."""
    return {
        name: (value.dtype, tuple(value.shape), hashlib.sha256(data_of(value)).hexdigest())
        for name, value in tensors.items()
    }


def data_of(value: Tensor) -> bytes:
    if not math.prod(value.shape):
        return b""
    whole = value.detach().clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()
