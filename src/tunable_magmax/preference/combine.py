"""One preference from several: a mean in which each source counts by what its samples can say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats
from tunable_magmax.preference.preference import JSON, Preference

# What more samples do not cure, as a half-L1 error. shift, pseudo, ot: rounded from how far behind labels they were on
# three CLINC150 settings (0.02 to 0.07, 0.07 to 0.20, 0.31 to 0.40); probe: the mean of three CLINC150 settings (0.015
# to 0.02) and three CIFAR-100 ones (0.07 to 0.11). The others are set by judgement, not measured: cosine and mmd like
# ot, shift+label between its parts. An unknown source counts like the worst.
BIAS: dict[str, float] = {
    "label": 0.0,
    "label-count": 0.0,
    "search": 0.0,
    "probe": 0.05,
    "shift": 0.05,
    "shift+label": 0.03,
    "pseudo": 0.15,
    "ot": 0.4,
    "cosine": 0.4,
    "mmd": 0.4,
}


def combined_preference(sources: Sequence[Preference], strengths: Sequence[float] | None = None) -> Preference:
    """The mean of `sources` by `strengths`, by default 1 / (bias^2 + 1/n) for a source with n samples.

    For different samples of one target: labels of some, inputs of others. Intervals are combined as if independent.

    >>> labels = Preference((1, 0), "label", {"samples": 20})
    >>> inputs = Preference((0, 1), "ot", {"samples": 20})
    >>> [round(weight, 3) for weight in combined_preference([labels, inputs]).weights]
    [0.808, 0.192]
    """
    if not sources:
        raise InputError("nothing to combine: give at least one preference")
    tasks = len(sources[0].weights)
    for position, source in enumerate(sources, 1):
        if len(source.weights) != tasks:
            raise InputError(f"preference 1 has {tasks} tasks and preference {position} has {len(source.weights)}")
    named = [source.tasks for source in sources if source.tasks is not None]
    if any(names != named[0] for names in named):
        raise InputError("the preferences name different tasks; combine preferences of one run only")
    if strengths is None:
        numbers = [_strength(source, position) for position, source in enumerate(sources, 1)]
        if not any(numbers):
            raise InputError("none of the preferences has a sample behind it; give strengths")
    else:
        numbers = [float(strength) for strength in strengths]
        if len(numbers) != len(sources):
            raise InputError(f"{len(numbers)} strengths for {len(sources)} preferences: give one per preference")
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not any(numbers):
            raise InputError(f"strengths must be finite, not negative and not all 0, not {numbers}")
    shares = np.array(numbers) / max(numbers)
    shares /= shares.sum()
    table = np.array([source.weights for source in sources])
    parts: list[JSON] = [
        {
            "method": source.method,
            "share": float(share),
            "samples": source.provenance.get("samples"),
            "weights": list(source.weights),
            "provenance": source.provenance,
        }
        for source, share in zip(sources, shares, strict=True)
    ]
    rule = "given strengths" if strengths is not None else "1 / (bias^2 + 1 / samples)"
    weights = shares @ table
    return Preference(
        tuple(float(weight) for weight in weights),
        "combined",
        {"rule": rule, "sources": parts},
        _intervals(sources, shares, weights),
        named[0] if named else None,
    )


def _strength(source: Preference, position: int) -> float:
    samples = source.provenance.get("samples")
    if isinstance(samples, bool) or not isinstance(samples, (int, float)) or samples < 0:
        raise InputError(
            f"preference {position} ({source.method}) does not say how many samples stand behind it; give strengths"
        )
    if samples == 0:
        return 0.0
    return 1 / (BIAS.get(source.method, max(BIAS.values())) ** 2 + 1 / samples)


def _intervals(
    sources: Sequence[Preference], shares: Floats, weights: Floats
) -> tuple[tuple[float, float], ...] | None:
    """Distances from each end to the weight add up as independent errors do, by their squares."""
    ends = [source.intervals for source in sources]
    if any(pairs is None for pairs in ends):
        return None
    table = np.array(ends)
    own = np.array([source.weights for source in sources])
    low = np.sqrt(np.square(shares[:, None] * np.maximum(own - table[:, :, 0], 0)).sum(axis=0))
    high = np.sqrt(np.square(shares[:, None] * np.maximum(table[:, :, 1] - own, 0)).sum(axis=0))
    return tuple(zip(np.clip(weights - low, 0, 1).tolist(), np.clip(weights + high, 0, 1).tolist(), strict=True))
