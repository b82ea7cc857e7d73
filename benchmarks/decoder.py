"""The tensors of a decoder of 1.5 billion parameters, written as bfloat16 files without ever being whole in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from tunable_magmax.checkpoints.shards import plan_shards
from tunable_magmax.checkpoints.tensors import TensorInfo

WIDTH, INNER, HEADS, VOCABULARY, LAYERS = 1536, 8960, 256, 151_936, 28
BLOCK = 1 << 22


def shapes(layers: int = LAYERS, vocabulary: int = VOCABULARY) -> dict[str, tuple[int, ...]]:
    """Names and shapes: 1,543,714,304 elements with 28 layers."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", WIDTH), ("k_proj", HEADS), ("v_proj", HEADS)):
            found |= {f"{prefix}.self_attn.{name}.weight": (rows, WIDTH), f"{prefix}.self_attn.{name}.bias": (rows,)}
        found[f"{prefix}.self_attn.o_proj.weight"] = (WIDTH, WIDTH)
        found |= {f"{prefix}.mlp.{name}.weight": (INNER, WIDTH) for name in ("gate_proj", "up_proj")}
        found[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, INNER)
        found |= {f"{prefix}.{name}.weight": (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def elements(layers: int = LAYERS, vocabulary: int = VOCABULARY) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes(layers, vocabulary).values())


def write_walk(paths: Sequence[Path], layers: int = LAYERS, vocabulary: int = VOCABULARY, seed: int = 0) -> None:
    """Write a base and its tasks, a random walk, block by block into all files at once."""
    infos = [TensorInfo(name, "BF16", shape) for name, shape in sorted(shapes(layers, vocabulary).items())]
    [shard] = plan_shards(infos)
    random = torch.Generator().manual_seed(seed)
    values, step = torch.empty(BLOCK), torch.empty(BLOCK)
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb", buffering=0)) for path in paths]
        for file in files:
            file.write(shard.header)
        for info in infos:
            for start in range(0, info.numel, BLOCK):
                size = min(BLOCK, info.numel - start)
                now = values[:size].normal_(0, 0.02, generator=random)
                for t, file in enumerate(files):
                    if t:
                        now += step[:size].normal_(0, 1e-3, generator=random)
                    file.write(now.bfloat16().view(torch.uint8).numpy().data)
        for file in files:
            os.fsync(file.fileno())  # only clean pages can be dropped from the cache
