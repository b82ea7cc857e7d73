"""Sequences and options for merges whose bits and reports must be the same on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tunable_magmax as tmx

State = dict[str, torch.Tensor]

OPTIONS: list[dict[str, Any]] = [
    *(
        {"weights": True, "scope": scope, "compare": compare, "keep": keep, "scale": scale}
        for scope in ("model", "tensor")
        for compare in ("all", "active")
        for keep in ("random", "magnitude")
        for scale in (0.5, "matched")
    ),
    *({"method": method, "scale": scale} for method in tmx.METHODS if method != "tsv" for scale in (1.25, "matched")),
    {"method": "ties", "density": 0.4, "scope": "tensor", "normalize": True, "scale": 1},
    {"out_dtype": "bfloat16"},
    {"out_dtype": "float64", "seed": 12345678901},
    {"include": ["a", "d"]},
]
MIXED = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.float32)


def sequence(
    shapes: Mapping[str, tuple[int, ...]],
    tasks: int,
    seed: int = 0,
    kinds: Sequence[torch.dtype] = MIXED,
    still: str = "b",
) -> list[State]:
    """Base and tasks; every third task repeats "d", so that there are ties, and nobody touches the tensor `still`."""
    generator = torch.Generator().manual_seed(seed)
    found = [{n: torch.randn(s, generator=generator).to(k) for (n, s), k in zip(shapes.items(), kinds, strict=True)}]
    for t in range(tasks):
        moved = {
            name: tensor
            if name == still or (name == "d" and t % 3 == 2)
            else (tensor.double() + 0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
            for name, tensor in found[-1].items()
        }
        found.append(moved)
    return found


def coarse(tasks: int, elements: int = 20_000, seed: int = 0) -> list[State]:
    """Base and tasks of whole numbers: most magnitudes are equal. Each task changes one late element of "s"."""
    generator = torch.Generator().manual_seed(seed)
    found = [{"s": torch.zeros(3000), "w": torch.zeros(elements)}]
    for t in range(tasks):
        lone = torch.zeros(3000)
        lone[2999 - t] = 1.0
        found.append({"s": lone, "w": torch.randint(-1, 2, (elements,), generator=generator).float()})
    return found


def shrinking(tasks: int, elements: int) -> list[State]:
    """Base and tasks of ever shorter vectors: later tasks win few elements, and many are left over."""
    generator = torch.Generator().manual_seed(tasks)
    base = {"w": torch.randn(elements, generator=generator)}
    steps = [t * torch.randn(elements, generator=generator) for t in range(tasks, 0, -1)]
    return [base, *({"w": base["w"] + step} for step in steps)]


def given(options: dict[str, Any], tasks: int) -> dict[str, Any]:
    """Options with weights for so many tasks, some of them 0, where they ask for weights."""
    weights = {"weights": [float(3 * t % 7) for t in range(tasks - 1)] + [1.0]} if "weights" in options else {}
    return {**options, **weights}


def bits(merged: tmx.Merged) -> dict[str, bytes]:
    return {n: t.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in merged.state_dict.items()}


def assert_same(ours: tmx.Merged, theirs: tmx.Merged, options: object = None) -> None:
    assert ours.report == theirs.report, options
    assert bits(ours) == bits(theirs), options


class MissesAtFirst:
    """A `Drawing` for device_auction.py whose first windows are so narrow that the threshold is missed."""

    def __init__(self, real: type, misses: int = 1) -> None:
        self.made: list[float] = []
        self._real, self._misses = real, misses

    def __call__(self, kernels: Any, sizes: Any, deviations: float) -> Any:
        self.made.append(deviations)
        return self._real(kernels, sizes, 1e-9 if len(self.made) <= self._misses else deviations)
