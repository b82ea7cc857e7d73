"""The tensors of ViT-B/16's image tower (CLIP), as a sequential random walk: what the benchmarks merge."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH, LAYERS, PATCHES, PATCH, OUT = 768, 12, 196, 16, 512


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the image tower: 86,192,640 elements."""
    found: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (WIDTH,),
        "vision_model.embeddings.patch_embedding.weight": (WIDTH, 3, PATCH, PATCH),
        "vision_model.embeddings.position_embedding.weight": (PATCHES + 1, WIDTH),
        "visual_projection.weight": (OUT, WIDTH),
    }
    for norm in ("pre_layrnorm", "post_layernorm"):
        found |= {f"vision_model.{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
    for layer in range(LAYERS):
        prefix = f"vision_model.encoder.layers.{layer}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            found |= {f"{prefix}.self_attn.{name}.weight": (WIDTH, WIDTH), f"{prefix}.self_attn.{name}.bias": (WIDTH,)}
        for norm in ("layer_norm1", "layer_norm2"):
            found |= {f"{prefix}.{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
        found |= {f"{prefix}.mlp.fc1.weight": (4 * WIDTH, WIDTH), f"{prefix}.mlp.fc1.bias": (4 * WIDTH,)}
        found |= {f"{prefix}.mlp.fc2.weight": (WIDTH, 4 * WIDTH), f"{prefix}.mlp.fc2.bias": (WIDTH,)}
    return found


ELEMENTS = sum(torch.Size(shape).numel() for shape in shapes().values())


def random_base(seed: int = 0) -> dict[str, Tensor]:
    """Base values."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def next_task(current: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The next checkpoint of the walk."""
    generator = torch.Generator().manual_seed(seed)
    return {name: v + 1e-3 * torch.randn(v.shape, generator=generator) for name, v in current.items()}
