"""The options of a merge, read and checked once, before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tunable_magmax.errors import InputError, closest
from tunable_magmax.merging.budget import read_budget, read_decimal, read_weights

MATCHED = "matched"
SCOPES = ("model", "tensor")
COMPARISONS = ("all", "active")
KEEPS = ("random", "magnitude")
USUAL = {"scope": "model", "compare": "all", "keep": "random", "density": Fraction(1, 5), "seed": 0}
"""What options are that some methods read and others do not, if nobody sets them."""
OUT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "f64": "F64",
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options: weights and density as exact rationals, `out_dtype` as a safetensors code."""

    method: str
    weights: tuple[Fraction, ...] | None
    budget: tuple[int, ...] | None
    scale: float | None
    """None stands for `matched`."""
    scope: str
    compare: str
    keep: str
    density: Fraction
    seed: int
    out_dtype: str | None
    include: tuple[str, ...] | None
    exclude: tuple[str, ...] | None

    @classmethod
    def read(
        cls,
        tasks: int,
        *,
        method: str = "tunable_magmax",
        weights: Sequence[Any] | None = None,
        budget: Sequence[Any] | None = None,
        scale: float | str = MATCHED,
        scope: str = "model",
        compare: str = "all",
        keep: str = "random",
        density: Any = 0.2,
        seed: int = 0,
        out_dtype: Any = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> Options:
        """Check everything that can be checked without the checkpoints."""
        from tunable_magmax.merging.methods import METHODS

        if tasks == 0:
            raise InputError("there are no tasks: a merge needs a base and at least one task checkpoint")
        kind = METHODS[_one_of(method, "method", tuple(METHODS))]
        if weights is not None and budget is not None:
            raise InputError("weights and a budget were both given; give one of them")
        if weights is not None and kind.weights == "refused":
            raise InputError(f"method {method!r} takes no weights; leave them out or use tunable_magmax")
        if budget is not None and method != "tunable_magmax":
            raise InputError(f"method {method!r} takes no budget; only tunable_magmax does")
        if budget is not None and scope == "tensor":
            raise InputError(
                "a budget counts elements of the whole model: give weights with scope 'tensor', or use scope 'model'"
            )
        return cls(
            method=method,
            weights=read_weights(weights, tasks),
            budget=None if budget is None else read_budget(budget, tasks),
            scale=_read_scale(scale),
            scope=_one_of(scope, "scope", SCOPES),
            compare=_one_of(compare, "compare", COMPARISONS),
            keep=_one_of(keep, "keep", KEEPS),
            density=_read_density(density),
            seed=_read_seed(seed),
            out_dtype=_read_dtype(out_dtype),
            include=_read_patterns(include, "include"),
            exclude=_read_patterns(exclude, "exclude"),
        )

    def takes_part(self, task: int) -> bool:
        """Whether a task (from 0) has a weight or a budget above 0; all have where neither is given."""
        given = self.weights if self.budget is None else self.budget
        return given is None or given[task] > 0

    def idle(self) -> Iterator[str]:
        """Warnings about options that were set and that the method does not read.

        >>> list(Options.read(2, method="magmax", density=0.3).idle())
        ['density has no effect with magmax; it is for ties']
        """
        from tunable_magmax.merging.methods import METHODS

        for name, usual in USUAL.items():
            if getattr(self, name) != usual and name not in METHODS[self.method].reads:
                readers = ", ".join(known for known, kind in METHODS.items() if name in kind.reads)
                yield f"{name} has no effect with {self.method}; it is for {readers}"


def _one_of(value: Any, option: str, known: Sequence[str]) -> str:
    if isinstance(value, str) and value in known:
        return value
    raise InputError(f"unknown {option} {value!r}{closest(str(value), known)}; known: {', '.join(known)}")


def _read_scale(scale: Any) -> float | None:
    if scale == MATCHED:
        return None
    try:
        number = float(scale)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(scale, bool) or not math.isfinite(number):
        raise InputError(f"scale is {scale!r}{closest(str(scale), [MATCHED])}; expected a finite number or {MATCHED!r}")
    return number


def _read_density(density: Any) -> Fraction:
    exact = read_decimal(density, "density")
    if not 0 <= exact <= 1:
        raise InputError(f"density is {density}, expected a share between 0 and 1")
    return exact


def _read_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= int(seed) < 2**64:
        raise InputError(f"seed is {seed!r}, expected a whole number from 0 to 2**64 - 1")
    return int(seed)


def _read_dtype(dtype: Any) -> str | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.").lower()
    if name not in OUT_DTYPES:
        known = list(OUT_DTYPES)[:4]
        raise InputError(f"unknown out_dtype {dtype!r}{closest(name, known)}; known: {', '.join(known)}")
    return OUT_DTYPES[name]


def _read_patterns(patterns: Sequence[str] | None, option: str) -> tuple[str, ...] | None:
    if isinstance(patterns, str):
        raise InputError(f"{option} is the string {patterns!r}, expected a list of patterns such as [{patterns!r}]")
    if patterns is None:
        return None
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"{option} is {patterns!r}, expected a list of patterns such as ['head.*']")
    return tuple(patterns)
