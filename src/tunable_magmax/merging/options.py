"""The options of a merge, read and checked once, before anything is opened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.checkpoints.tensors import FLOATS
from tunable_magmax.errors import InputError, closest
from tunable_magmax.merging.budget import read_budget, read_decimal, read_weights

MATCHED = "matched"
DEFAULTS: dict[str, Any] = {
    "method": "tunable_magmax",
    "weights": None,
    "budget": None,
    "scale": None,
    "scope": "model",
    "compare": "all",
    "density": 0.2,
    "normalize": "count",
    "seed": 0,
    "out_dtype": None,
    "include": None,
    "exclude": None,
    "fitted_head": None,
}
"""What the options of a merge are if nobody sets them. A scale of None is the method's own default."""
_OUT_DTYPES = {name: code for code, name in FLOATS.items()} | {code.lower(): code for code in FLOATS}


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
    density: Fraction | tuple[Fraction, ...]
    """What TIES keeps of each task vector: one share for all, or one for each."""
    normalize: str
    """What TIES divides the sum of those who agree by: their "count", the sum of their "weights", or "none"."""
    seed: int
    out_dtype: str | None
    include: tuple[str, ...] | None
    exclude: tuple[str, ...] | None
    fitted_head: FittedTensors | None = None
    """Tensors that take the place of the tasks' own classifiers; of files only."""

    @classmethod
    def read(cls, tasks: int, **given: Any) -> Options:
        """Checks each option by itself; `methods.read_options` also checks that they go together."""
        if unknown := sorted(given.keys() - DEFAULTS.keys()):
            raise TypeError(f"a merge has no option {unknown[0]!r}")
        options = DEFAULTS | given
        return cls(
            method=options["method"],
            weights=read_weights(options["weights"], tasks),
            budget=None if options["budget"] is None else read_budget(options["budget"], tasks),
            scale=_read_scale(options["scale"]),
            scope=one_of(options["scope"], "scope", ("model", "tensor")),
            compare=one_of(options["compare"], "compare", ("all", "active")),
            density=_read_density(options["density"], tasks),
            normalize=_read_normalize(options["normalize"]),
            seed=_read_seed(options["seed"]),
            out_dtype=_read_dtype(options["out_dtype"]),
            include=_read_patterns(options["include"], "include"),
            exclude=_read_patterns(options["exclude"], "exclude"),
            fitted_head=_read_fitted(options["fitted_head"]),
        )

    def head_weights(self, tasks: int) -> list[float]:
        """Returns how much each task's head counts: by weights or budget, equally, or the last one's alone."""
        if self.method == "last_task":
            return [float(t == tasks - 1) for t in range(tasks)]
        given = self.weights if self.budget is None else self.budget
        return [1.0] * tasks if given is None else [max(0.0, float(weight)) for weight in given]

    def densities(self, tasks: int) -> tuple[Fraction, ...]:
        """Returns the density of each task."""
        return self.density if isinstance(self.density, tuple) else (self.density,) * tasks

    def takes_part(self, task: int) -> bool:
        """Whether a task (from 0) has a weight or a budget above 0; all have where neither is given."""
        given = self.weights if self.budget is None else self.budget
        return given is None or given[task] > 0


def one_of(value: Any, option: str, known: Sequence[str]) -> str:
    """Returns a value that is known; another one is an `InputError` that suggests the closest."""
    if isinstance(value, str) and value in known:
        return value
    raise InputError(f"unknown {option} {value!r}{closest(str(value), known)}; known: {', '.join(known)}")


def _read_fitted(fitted: Any) -> FittedTensors | None:
    if fitted is None or isinstance(fitted, FittedTensors):
        return fitted
    raise InputError(f"fitted_head is {fitted!r}, expected tensors: a report or configuration has their digest alone")


def _read_scale(scale: Any) -> float | None:
    if scale is None or scale == MATCHED:
        return None
    try:
        number = float(scale)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(scale, bool) or not math.isfinite(number):
        raise InputError(f"scale is {scale!r}{closest(str(scale), [MATCHED])}; expected a finite number or {MATCHED!r}")
    return number


def _read_density(density: Any, tasks: int) -> Fraction | tuple[Fraction, ...]:
    if isinstance(density, Sequence) and not isinstance(density, str):
        if len(density) != tasks:
            raise InputError(f"{len(density)} densities for {tasks} tasks: give one for all, or one for each task")
        read = tuple(_one_density(each) for each in density)
        return read[0] if len(set(read)) == 1 else read
    return _one_density(density)


def _read_normalize(normalize: Any) -> str:
    if isinstance(normalize, bool):
        return "weights" if normalize else "none"
    return one_of(normalize, "normalize", ("count", "weights", "none"))


def _one_density(density: Any) -> Fraction:
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
    if name not in _OUT_DTYPES:
        known = list(FLOATS.values())
        raise InputError(f"unknown out_dtype {dtype!r}{closest(name, known)}; known: {', '.join(known)}")
    return _OUT_DTYPES[name]


def _read_patterns(patterns: Sequence[str] | None, option: str) -> tuple[str, ...] | None:
    if patterns is None:
        return None
    listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"{option} is {patterns!r}, expected a list of patterns such as ['head.*']")
    return tuple(patterns)
