"""LoRA adapters in PEFT's layout, written by hand, and the dense tensors that they stand for."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Factors = tuple[Tensor, Tensor]
PREFIX = "base_model.model."


def factors(out: int, inner: int, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Factors:
    """A [rank, inner] and B [out, rank], with values whose products and sums need rounding."""
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, inner, generator=random), torch.randn(out, rank, generator=random) * 0.1
    return a.to(dtype), b.to(dtype)


def save_adapter(
    folder: Path,
    layers: Mapping[str, Factors],
    *,
    whole: Mapping[str, Tensor] | None = None,
    adapter: str = "",
    prefix: str = PREFIX,
    torch_file: bool = False,
    **config: Any,
) -> Path:
    """Write an adapter; `adapter` is its name in the names of its tensors, where it has one there."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f".{adapter}" if adapter else ""
    tensors: dict[str, Tensor] = {f"{prefix}{key}": value for key, value in (whole or {}).items()}
    for module, (a, b) in layers.items():
        tensors |= {f"{prefix}{module}.lora_A{name}.weight": a, f"{prefix}{module}.lora_B{name}.weight": b}
    if torch_file:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors")
    ranks = [a.shape[0] for a, _ in layers.values()]
    settled = {"peft_type": "LORA", "r": ranks[0] if ranks else 8, "lora_alpha": 16, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settled))
    return folder


def product(pair: Factors, scaling: float, dtype: type = np.float32, transposed: bool = False) -> Tensor:
    """scaling * B @ A by the letter of docs/merge.md: one rank after the other in float64, then one rounding."""
    a, b = (factor.double().numpy() for factor in pair)
    total = np.zeros((b.shape[0], a.shape[1]))
    for k in range(len(a)):
        total = total + np.multiply.outer(b[:, k], a[k])
    delta = np.float64(scaling) * total
    return torch.from_numpy((delta.T if transposed else delta).astype(dtype).copy())


def moved(base: Tensor, pair: Factors, scaling: float, transposed: bool = False) -> Tensor:
    """The tensor that an adapter makes of the base's, in the working type."""
    wide = torch.float64 in (base.dtype, pair[0].dtype, pair[1].dtype)
    working = torch.float64 if wide else torch.float32
    return base.to(working) + product(pair, scaling, np.float64 if wide else np.float32, transposed)


def rslora(alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank)
