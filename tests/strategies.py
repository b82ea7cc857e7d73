"""Hypothesis strategies for small model sequences that are awkward on purpose.

Hypothesis draws the structure (tasks, names, shapes, types, what kind of numbers) and one number that seeds the values,
so that an example is quick to make and still shrinks to few tasks and few, small tensors.
"""

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import torch
from hypothesis import strategies as st
from naive import Layout
from torch import Tensor

from tunable_magmax import METHODS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Sorted by code point these are in an order that neither UTF-16 nor a case-blind or "natural" sort would give.
NAMES = ("w", "W", "b.10", "b.9", "b", "b-1", "layer.0.weight", "é", "\uff5e", "\U0001f600")
SHAPES = ((), (1,), (0,), (7,), (3, 5), (0, 3), (63,), (64,), (65,), (5, 1, 13), (2, 65), (130,), (1, 299), (12, 25))
FEW_TASKS = st.one_of(st.integers(1, 3), st.integers(1, 4), st.integers(2, 9))
TASKS = st.one_of(FEW_TASKS, FEW_TASKS, FEW_TASKS, FEW_TASKS, st.sampled_from([31, 32, 33, 63, 64, 65, 66, 70]))
NORMALIZE = ["count", True, False]
SEEDS = st.one_of(st.sampled_from([0, 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
SCALES = st.sampled_from(["matched", "matched", 1.0, 1, 0.5, 0.3, 0, -1.0, 1.7])
WEIGHTS = st.sampled_from([0, 0.0, 0.1, 0.2, 0.3, 0.05, 0.7, 1, 2, 3, 1.0, 1e-9, 1e-3, 17, 123456.789])


@dataclass(frozen=True)
class Models:
    base: dict[str, Tensor]
    tasks: list[dict[str, Tensor]]

    @property
    def elements(self) -> int:
        return len(Layout(self.base, self.tasks, None, None).elements)


@dataclass(frozen=True)
class Merge:
    """A call: `function(merge.base, merge.tasks, **merge.options)`."""

    base: dict[str, Tensor]
    tasks: list[dict[str, Tensor]]
    options: dict[str, object] = field(default_factory=dict)


@st.composite
def models(draw, tasks=TASKS, floats=FLOATS, only_merged=False, max_tensors=5, scalar=True) -> Models:
    """A base and its task checkpoints. `only_merged`: float tensors only, each changed by some task."""
    T = draw(tasks)
    shapes = [s for s in SHAPES if (scalar or s) and (math.prod(s) <= 65 or T <= 9) and (not only_merged or 0 not in s)]
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=max_tensors if T <= 9 else 2, unique=True))
    checkpoints: list[dict[str, Tensor]] = [{} for _ in range(T + 1)]
    for name in names:
        shape = draw(st.sampled_from(shapes))
        kinds = ["ties", "walk", "normal", "sparse", "tiny", "copies"]
        kind = draw(st.sampled_from(kinds if only_merged else [*kinds, "zeros", "frozen", "integer", "bool"]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        values = [np.array(value, dtype=np.float64) for value in VALUES[kind](rng, T, shape)]
        if only_merged:
            first = values[0].flat[0]
            values[-1].flat[0] = first + 1 if abs(first) < 2 else 0.0
        if kind in ("integer", "bool"):
            types = [torch.bool if kind == "bool" else draw(st.sampled_from([torch.int64, torch.uint8]))] * (T + 1)
        elif draw(st.booleans()):
            types = [draw(st.sampled_from(floats))] * (T + 1)
        else:
            types = [floats[i] for i in rng.integers(0, len(floats), T + 1)]
        if kind == "frozen":
            # Narrowest first, so that the wider types hold the very same value.
            narrow = torch.from_numpy(values[0]).to(torch.float16).to(torch.bfloat16)
            values = [narrow.to(torch.float64).numpy()] * (T + 1)
        strided = draw(st.booleans())
        for checkpoint, value, dtype in zip(checkpoints, values, types, strict=True):
            tensor = torch.from_numpy(value).to(dtype)
            checkpoint[name] = uncontiguous(tensor) if strided else tensor
    return Models(checkpoints[0], checkpoints[1:])


def uncontiguous(tensor: Tensor) -> Tensor:
    """The same values at every other place of a larger, column-major storage."""
    if tensor.ndim == 0:
        return torch.stack([tensor, tensor])[1]
    wide = torch.repeat_interleave(tensor, 2, dim=0)
    return wide.mT.contiguous().mT[::2] if tensor.ndim >= 2 else wide[::2]


def _copies(rng, T, shape):
    values = [rng.integers(-3, 4, shape) / 4]
    for _ in range(T):
        repeat = rng.random() < 0.5
        values.append(values[rng.integers(len(values))].copy() if repeat else values[-1] + rng.normal(size=shape))
    return values


def _sparse(rng, T, shape):
    base = rng.normal(size=shape)
    return [base, *(base + (rng.random(shape) < 0.2) * rng.normal(size=shape) for _ in range(T))]


def _each(draw):
    """Every checkpoint has values of its own."""
    return lambda rng, T, shape: [draw(rng, shape) for _ in range(T + 1)]


VALUES = {
    "ties": _each(lambda rng, shape: rng.integers(-3, 4, shape) / 4 * rng.choice([1.0, -1.0], shape)),
    "walk": lambda rng, T, shape: list(
        np.cumsum([rng.normal(size=shape), *rng.normal(scale=0.05, size=(T, *shape))], axis=0)
    ),
    "normal": _each(lambda rng, shape: rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3)),
    "sparse": _sparse,
    # Subnormal in float32, and in bfloat16 and float16 zero or subnormal.
    "tiny": _each(lambda rng, shape: rng.integers(-9, 10, shape) * 2.0 ** rng.choice([-24, -133, -149])),
    "copies": _copies,
    "zeros": _each(lambda rng, shape: rng.choice([0.0, -0.0], shape)),
    "frozen": _each(lambda rng, shape: rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3)),
    "integer": _each(lambda rng, shape: rng.integers(0, 100, shape).astype(np.float64)),
    "bool": _each(lambda rng, shape: rng.integers(0, 2, shape).astype(np.float64)),
}


@st.composite
def weights(draw, T: int, optional: bool = True) -> list[float] | None:
    """T weights with a positive sum: none at all, equal, one-hot, two-hot, decimals with zeros between."""
    shape = draw(st.sampled_from(["none"] * optional + ["one-hot", "two-hot", "decimals", "decimals"]))
    if shape == "none":
        return None
    hot = [draw(st.integers(0, T - 1)) for _ in range(2 if shape == "two-hot" else 1)]
    if shape == "decimals":
        drawn = draw(st.lists(WEIGHTS, min_size=T, max_size=T))
        return drawn if sum(drawn) > 0 else [1.0, *drawn[1:]]
    return [draw(st.sampled_from([0.1, 1, 3])) if t in hot else 0 for t in range(T)]


@st.composite
def budgets(draw, T: int, elements: int) -> list[int]:
    """T counts that sum to `elements`, some of them often 0."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shares = rng.random(T) * (rng.random(T) < draw(st.sampled_from([0.3, 1.0])))
    shares[draw(st.integers(0, T - 1))] += 0.1
    return rng.multinomial(elements, shares / shares.sum()).tolist()


@st.composite
def merges(draw, method: str, **kind) -> Merge:
    """A valid call of one method, over all the options that it has."""
    drawn = draw(models(**kind))
    T = len(drawn.tasks)
    options: dict[str, object] = {"method": method, "seed": draw(SEEDS), "scale": draw(SCALES)}
    if draw(st.integers(0, 3)) == 0:
        options["out_dtype"] = draw(st.sampled_from(FLOATS))
    if method == "tunable_magmax":
        options |= {
            "compare": draw(st.sampled_from(["all", "active"])),
            "scope": draw(st.sampled_from(["model", "tensor"])),
        }
        if options["scope"] == "model" and draw(st.booleans()):
            options["budget"] = draw(budgets(T, drawn.elements))
        else:
            options["weights"] = draw(weights(T))
    elif METHODS[method].weights != "refused":
        options["weights"] = draw(weights(T))
    if method == "ties":
        shares = st.sampled_from([0.2, 0, 1, 1.0, 0.1, 0.35, 0.5, 0.9])
        options["density"] = draw(st.one_of(shares, st.lists(shares, min_size=T, max_size=T)))
        options |= {"scope": draw(st.sampled_from(["model", "tensor"])), "normalize": draw(st.sampled_from(NORMALIZE))}
    if "budget" not in options:
        patterns = ["*", "w", "[bB]*", "?", "b.?", "*.weight", "[!w]"]
        matching = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in drawn.base)]
        if draw(st.integers(0, 4)) == 0 and matching:
            options["include"] = draw(st.lists(st.sampled_from(matching), min_size=1, max_size=2))
        if draw(st.integers(0, 4)) == 0:
            options["exclude"] = draw(st.lists(st.sampled_from(patterns), min_size=1, max_size=2))
    return Merge(drawn.base, drawn.tasks, options)
