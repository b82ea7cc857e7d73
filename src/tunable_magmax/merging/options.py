"""The options of a merge: listed, described and checked here, once, before anything is opened."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, TypeVar

from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.checkpoints.tensors import FLOATS
from tunable_magmax.errors import InputError, closest
from tunable_magmax.merging.budget import read_budget, read_decimal, read_weights

MATCHED = "matched"
_OUT_DTYPES = {name: code for code, name in FLOATS.items()} | {code.lower(): code for code in FLOATS}


@dataclass(frozen=True, slots=True)
class Options:
    """What a merge does. docs/method.md defines every option.

    `read` makes one of what users give: weights and density become exact rationals, `out_dtype` a safetensors code.
    """

    method: str = "tunable_magmax"
    """The method, by name; Python also takes a class."""
    weights: tuple[Fraction, ...] | None = None
    """How much each task matters: a number each, by name where tasks have names, or a `Preference`. Default: equal."""
    budget: tuple[int, ...] | None = None
    """How many elements each task gives, instead of weights."""
    scale: float | None = None
    """The paper's lambda: a number, or matched, as long as the last task vector. Default: the preference's if it has
    one, else the method's own, matched for all but tsv. None stands for matched once read."""
    scope: str = "model"
    """model: one budget over the whole model; tensor: inside each tensor."""
    compare: str = "all"
    """all: magnitudes are compared with those of all earlier tasks; active: of those that have a budget."""
    density: Fraction | tuple[Fraction, ...] = Fraction(1, 5)
    """The share of each task vector that ties keeps: one for all tasks, or one for each."""
    normalize: str = "count"
    """What ties divides the sum of those who agree by: their count, the sum of their weights, or none."""
    seed: int = 0
    """The seed of the lottery; one seed gives one result."""
    out_dtype: str | None = None
    """The type of the output. Default: for each tensor the widest of its inputs."""
    include: tuple[str, ...] | None = None
    """Only tensors whose names match one of these patterns are merged. Default: all."""
    exclude: tuple[str, ...] | None = None
    """Tensors whose names match one of these patterns are copied from the base."""
    fitted_head: FittedTensors | None = None
    """Tensors that take the place of the tasks' own classifiers; of files only."""
    adapter: int | None = None
    """Tasks that are LoRA adapters become one of this rank, not a model; of files only."""

    @classmethod
    def read(cls, tasks: int, **given: Any) -> Options:
        """Checks each option by itself; `methods.read_options` also checks that they go together."""
        if unknown := sorted(given.keys() - DEFAULTS.keys()):
            raise TypeError(f"a merge has no option {unknown[0]!r}{closest(unknown[0], list(DEFAULTS))}")
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
            adapter=_read_rank(options["adapter"]),
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


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Options)}
"""What the options of a merge are if nobody sets them."""

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(function: Function) -> Function:
    """Shows the fields of `Options` in the signature of a function, in place of its **options.

    >>> @takes_options
    ... def merge(base, **options): ...
    >>> list(inspect.signature(merge).parameters)[:3]
    ['base', 'method', 'weights']
    """
    own = inspect.signature(function)
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    ours = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=float(usual) if isinstance(usual, Fraction) else usual
        )
        for name, usual in DEFAULTS.items()
        if name not in ("fitted_head", "adapter")  # for files only
    ]
    first = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in kept)
    function.__signature__ = own.replace(parameters=kept[:first] + ours + kept[first:])  # type: ignore[attr-defined]
    return function


def one_of(value: Any, option: str, known: Sequence[str]) -> str:
    """Returns a value that is known; another one is an `InputError` that suggests the closest."""
    if isinstance(value, str) and value in known:
        return value
    raise InputError(f"unknown {option} {value!r}{closest(str(value), known)}; known: {', '.join(known)}")


def _read_fitted(fitted: Any) -> FittedTensors | None:
    if fitted is None or isinstance(fitted, FittedTensors):
        return fitted
    raise InputError(f"fitted_head is {fitted!r}, expected tensors: a report or configuration has their digest alone")


def _read_rank(rank: Any) -> int | None:
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise InputError(f"adapter is {rank!r}, expected the rank of an adapter, a whole number of at least 1")
    return rank


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
    if option == "include" and not patterns:
        raise InputError("include is empty, so nothing may be merged: name patterns, or leave it out to merge all")
    return tuple(patterns)
