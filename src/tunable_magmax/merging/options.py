"""The options of a merge: named, described and checked here, once, before anything is opened.

The command's options, the keys of a YAML, and what reports and model cards hold are made from `Options`; how the
command line parses them is in workflows/options.py. The module imports next to nothing: `tmx --help` reads it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, TypeVar

from tunable_magmax.checkpoints.tensors import FLOATS
from tunable_magmax.errors import InputError, closest

MATCHED = "matched"


@dataclass(frozen=True)
class MethodOptions:
    """Method, scale and seed of a merge. None: not given."""

    method: Any = None
    """tunable_magmax (default), magmax, average, ties, tsv, ..., or a class of your own as FILE.py:NAME."""
    scale: Any = None
    """Multiply the merged vector by this, the paper's lambda; matched: as long as the last task vector. Default: the
    preference's, else the method's own, matched for all but tsv, which has 1."""
    seed: Any = None
    """The seed of the lottery; one seed gives one result. Default: 0."""


@dataclass(frozen=True)
class WeightedOptions(MethodOptions):
    """These, and how much each task matters. Default: all alike."""

    weights: Any = None
    """How much each task matters, as 3,1,0 or by name as travel=7,bank=3, where other tasks weigh 0. Default: equal."""
    budget: Any = None
    """How many elements each task gives, instead of weights."""


@dataclass(frozen=True)
class Options(WeightedOptions):
    """What a merge does. docs/method.md defines every option. None: not given.

    `read` makes one of what users give, in which every option that has a default has a value: weights and density are
    exact rationals, and `out_dtype` is a safetensors code.
    """

    scope: str | None = None
    """Share the budget over the whole model (default) or inside each tensor."""
    compare: str | None = None
    """Compare magnitudes with all earlier tasks (default), or with those that have a budget."""
    density: Any = None
    """The share of each task vector that ties keeps: one for all tasks, or one for each. Default: 0.2."""
    normalize: Any = None
    """What ties divides the sum of those who agree by: their count (default), the sum of their weights, or none."""
    out_dtype: Any = None
    """The type of the output. Default: for each tensor the widest of its inputs."""
    include: Sequence[str] | None = None
    """Merge only tensors whose names match this pattern; repeatable."""
    exclude: Sequence[str] | None = None
    """Copy tensors whose names match this pattern from the base; repeatable."""
    fitted_head: Any = None
    """Tensors that take the place of the tasks' own classifiers; of files only."""
    adapter: int | None = None
    """Write a LoRA adapter of this rank, not a model, where all tasks are LoRA adapters; the report says its error."""

    @classmethod
    def read(cls, tasks: int, **given: Any) -> Options:
        """Checks each option by itself, all that is wrong in one error; `methods.read_options` also checks that they
        go together.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise TypeError(f"a merge has no option {unknown[0]!r}{closest(unknown[0], known)}")
        from tunable_magmax.merging.budget import read_budget, read_weights  # which import numpy

        readers: dict[str, Callable[[Any], Any]] = {
            "scale": _read_scale,
            "seed": lambda seed: _read_whole(seed, "seed", 0),
            "weights": lambda weights: read_weights(weights, tasks),
            "budget": lambda budget: read_budget(budget, tasks),
            "scope": lambda scope: one_of(scope, "scope", ("model", "tensor")),
            "compare": lambda compare: one_of(compare, "compare", ("all", "active")),
            "density": lambda density: _read_density(density, tasks),
            "normalize": _read_normalize,
            "out_dtype": _read_dtype,
            "include": lambda patterns: _read_patterns(patterns, "include"),
            "exclude": lambda patterns: _read_patterns(patterns, "exclude"),
            "fitted_head": _read_fitted,
            "adapter": lambda rank: _read_whole(rank, "adapter", 1),
        }
        options = USUAL | {name: value for name, value in given.items() if value is not None}
        read, problems = dict[str, Any](), list[str]()
        for name, value in options.items():
            try:
                read[name] = readers[name](value) if name in readers else value
            except InputError as error:
                problems.append(str(error))
        if problems:
            raise InputError("\n".join(problems), problems=problems)
        return cls(**read)

    @property
    def matched(self) -> bool:
        """Whether the scale is that at which the step is as long as the last task vector."""
        return bool(self.scale == MATCHED)

    def head_weights(self, tasks: int) -> list[float]:
        """Returns how much each task's head counts: by weights or budget, equally, or the last one's alone."""
        if self.method == "last_task":
            return [float(t == tasks - 1) for t in range(tasks)]
        given = self.weights if self.budget is None else self.budget
        return [1.0] * tasks if given is None else [max(0.0, float(weight)) for weight in given]

    def densities(self, tasks: int) -> tuple[Fraction, ...]:
        """Returns the density of each task."""
        return self.density if isinstance(self.density, tuple) else (self.density,) * tasks


USUAL: dict[str, Any] = {
    "method": "tunable_magmax",
    "scale": MATCHED,
    "seed": 0,
    "scope": "model",
    "compare": "all",
    "density": 0.2,
    "normalize": "count",
}
"""What options are that nobody gives."""
FOR_FILES = ("fitted_head", "adapter")
"""Options of merges of files only."""

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(*groups: type, without: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Shows the fields of some classes of options in the signature of a function, in place of its **options.

    >>> @takes_options(Options)
    ... def merge(base, **options): ...
    >>> list(inspect.signature(merge).parameters)[:3]
    ['base', 'method', 'scale']
    """

    def show(function: Function) -> Function:
        own = inspect.signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        ours = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=USUAL.get(field.name, field.default))
            for group in groups
            for field in fields(group)
            if field.name not in without
        ]
        first = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in kept)
        parameters = kept[:first] + ours + kept[first:]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return show


def one_of(value: Any, option: str, known: Sequence[str]) -> str:
    """Returns a value that is known; another one is an `InputError` that suggests the closest."""
    if isinstance(value, str) and value in known:
        return value
    raise InputError(f"unknown {option} {value!r}{closest(str(value), known)}; known: {', '.join(known)}")


def _read_fitted(fitted: Any) -> Any:
    from tunable_magmax.checkpoints.heads import FittedTensors

    if isinstance(fitted, FittedTensors):
        return fitted
    raise InputError(f"fitted_head is {fitted!r}, expected tensors: a report or configuration has their digest alone")


def _read_whole(value: Any, option: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= int(value) < 2**64:
        raise InputError(f"{option} is {value!r}, expected a whole number from {least} to 2**64 - 1")
    return int(value)


def _read_scale(scale: Any) -> float | str:
    if scale == MATCHED:
        return MATCHED
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


def _one_density(density: Any) -> Fraction:
    from tunable_magmax.merging.budget import read_decimal

    exact = read_decimal(density, "density")
    if not 0 <= exact <= 1:
        raise InputError(f"density is {density}, expected a share between 0 and 1")
    return exact


def _read_normalize(normalize: Any) -> str:
    if isinstance(normalize, bool):
        return "weights" if normalize else "none"
    return one_of(normalize, "normalize", ("count", "weights", "none"))


def _read_dtype(dtype: Any) -> str:
    codes = {name: code for code, name in FLOATS.items()} | {code.lower(): code for code in FLOATS}
    return codes[one_of(str(dtype).removeprefix("torch.").lower(), "out_dtype", list(codes))]


def _read_patterns(patterns: Any, option: str) -> tuple[str, ...]:
    listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"{option} is {patterns!r}, expected a list of patterns such as ['head.*']")
    if option == "include" and not patterns:
        raise InputError("include is empty, so nothing may be merged: name patterns, or leave it out to merge all")
    return tuple(patterns)
