"""The report of a finished merge, and what its user should be warned of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.errors import ExactnessError
from tunable_magmax.merging.report import MergeReport, TensorReport

if TYPE_CHECKING:
    from tunable_magmax.merging.stream import Merge

STRETCHED = 2.0
"""A matched scale above this is worth a warning. In experiments (docs/results.md) it was rare, and fatal in some."""


def summarize(merge: Merge) -> MergeReport:
    """What a merge did; that the tasks own other numbers of elements than their budget is an `ExactnessError`."""
    layout, method = merge.layout, merge.method
    merged = {stretch.tensor for stretch in merge.stretches}
    counts = _integers(sum(merge.counts.values(), np.zeros(merge.tasks, np.int64))) if method.owns else None
    if method.budget is not None and counts != method.budget:
        raise ExactnessError(f"the tasks own {counts} elements, their budget is {method.budget}; please report this")
    copied = [tensor.name for k, tensor in enumerate(layout.mergeable) if k not in merged]
    return MergeReport(
        method=merge.options.method,
        tasks=merge.tasks,
        elements=merge.elements,
        budget=method.budget,
        counts=counts,
        leftovers=method.leftovers,
        scale=merge.scale,
        seed=merge.options.seed,
        options=_options_used(merge),
        last_length=significant(math.sqrt(merge.last_square)),
        merged_length=significant(math.sqrt(merge.merged_square)),
        tensors={layout.mergeable[k].name: _tensor_report(merge, k) for k in sorted(merged)},
        copied=tuple(sorted(copied + [info.name for info in layout.copied])),
        warnings=tuple(_warnings(merge)),
    )


def significant(value: float) -> float:
    """A number to six significant digits, as reports and scales give it.

    >>> significant(2 / 3)
    0.666667
    """
    return float(f"{value:.5e}")


def _tensor_report(merge: Merge, k: int) -> TensorReport:
    tensor, counts = merge.layout.mergeable[k], merge.counts.get(k)
    return TensorReport(tensor.shape, merge.out_dtype(tensor), None if counts is None else _integers(counts))


def _options_used(merge: Merge) -> dict[str, Any]:
    options = merge.options
    used: dict[str, Any] = {
        "weights": None if options.weights is None else [_decimal(weight) for weight in options.weights],
        "budget": options.budget,
        "scale": "matched" if options.scale is None else options.scale,
        "out_dtype": options.out_dtype,
        "include": options.include,
        "exclude": options.exclude,
    }
    for name in merge.method.reads:
        value = getattr(options, name)
        used[name] = _decimal(value) if isinstance(value, Fraction) else value
    return used


def _warnings(merge: Merge) -> Iterator[str]:
    yield from merge.notes
    yield from merge.layout.warnings
    if not merge.stretches:
        yield "no task changed any mergeable tensor: the result is a copy of the base"
        return
    for t in merge.unchanged:
        yield f"{merge.labels[t]} is identical to the base"
    matched = merge.options.scale is None
    if matched and merge.tasks in merge.unchanged:
        yield "the last task vector is zero, so the matched scale is 0 and the result equals the base; give a scale"
    if matched and merge.scale > STRETCHED:
        yield (
            f"the matched scale is {merge.scale:g}: the chosen tasks moved far less than the last one, and their "
            "step is stretched to its length, which may gain much or spoil the model; try the result on a few "
            "samples, and if it is poor, give 1 as scale"
        )


def _integers(counts: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(n) for n in counts)


def _decimal(value: Fraction) -> str:
    """A number that reads back as exactly this value: short if it can be, else as a fraction."""
    short = str(int(value) if value.denominator == 1 else float(value))
    return short if Fraction(short) == value else str(value)
