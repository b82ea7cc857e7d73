"""How sure an estimate is: bootstrap intervals, shrinkage toward equal weights, and the mean of several estimates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError
from tunable_magmax.preference.estimate import JSON, Intervals, WeightEstimate

BLOCK = 2_000_000


@dataclass(frozen=True)
class Resampling:
    """How the bootstrap is done. One seed, one result.

    `replicates`: 0 turns it off. `level`: the share of replicates inside an interval. `shrink`: from 0 (off) to 1
    (equal weights), or "auto": as far as the replicates' variance says that the differences between weights are noise.
    """

    replicates: int = 200
    level: float = 0.9
    seed: int = 0
    shrink: float | Literal["auto"] = 0.0

    def __post_init__(self) -> None:
        if min(self.replicates, self.seed) < 0 or not 0 < self.level < 1:
            raise InputError(f"replicates and seed must be >= 0, and level between 0 and 1: {self}")
        if self.shrink == "auto":
            if self.replicates < 2:
                raise InputError("shrink='auto' needs at least 2 replicates")
        elif not (isinstance(self.shrink, (int, float)) and 0 <= self.shrink <= 1):
            raise InputError(f"shrink must lie between 0 and 1, or be 'auto', not {self.shrink!r}")


RESAMPLING = Resampling()


def histogram_replicates(counts: Floats, resampling: Resampling, stream: int = 0) -> Floats:
    """Draws bootstrap samples of a histogram of n samples: [replicates, classes], every row sums to n."""
    rng = np.random.default_rng([resampling.seed, stream])
    total = counts.sum()
    return rng.multinomial(round(total), counts / total, size=resampling.replicates).astype(np.float64)


def sample_replicates(samples: int, resampling: Resampling) -> Iterator[Floats]:
    """Yields blocks [some replicates, samples] of how often each sample was drawn; together `replicates` rows."""
    rng = np.random.default_rng(resampling.seed)
    left = resampling.replicates
    while left:
        rows = min(left, max(1, BLOCK // samples))
        yield rng.multinomial(samples, np.full(samples, 1 / samples), size=rows).astype(np.float64)
        left -= rows


def half_l1(first: Floats, second: Floats) -> Floats:
    """Returns half the L1 distance over the last axis: the share of weight that sits on the wrong task.

    >>> float(half_l1(np.array([1.0, 0.0]), np.array([0.75, 0.25])))
    0.25
    """
    distance: Floats = np.abs(first - second).sum(axis=-1) / 2
    return distance


def shrunk(weights: Floats, amount: float) -> Floats:
    """Returns `weights` moved toward equal ones by `amount`.

    >>> shrunk(np.array([1.0, 0.0]), 0.5).tolist()
    [0.75, 0.25]
    """
    mixed: Floats = (1 - amount) * weights + amount / weights.shape[-1]
    return mixed


def shrinkage(weights: Floats, replicates: Floats) -> float:
    """Returns the share of the squared distance to equal weights that the replicates' variance explains, at most 1."""
    noise = float(replicates.var(axis=0, ddof=1).sum())
    signal = float(np.square(weights - 1 / len(weights)).sum())
    return 1.0 if noise >= signal else noise / signal


def conclude(
    method: str,
    weights: Floats,
    replicates: Floats | None,
    samples: int,
    provenance: Mapping[str, JSON],
    resampling: Resampling,
) -> WeightEstimate:
    """Returns the estimate with intervals from `replicates` [replicates, tasks], shrunk where that was asked for."""
    drawn = replicates if replicates is not None and len(replicates) and samples > 1 else None
    if resampling.shrink != "auto":
        amount = float(resampling.shrink)
    else:
        # One sample has no variance to estimate: nothing says that the differences are more than noise.
        amount = 1.0 if drawn is None else shrinkage(weights, drawn)
    record: dict[str, JSON] = {**provenance, "samples": samples}
    intervals: Intervals | None = None
    if drawn is not None:
        tail = (1 - resampling.level) / 2
        low, high = np.quantile(shrunk(drawn, amount), [tail, 1 - tail], axis=0).clip(0, 1)
        # What no draw shows may still be missing from the sample: the share that n samples miss with the tail's chance.
        missed = 1 - tail ** (1 / samples)
        high = np.where(high == 0, missed, high)
        low = np.where(low == 1, 1 - missed, low)
        intervals = tuple((float(a), float(b)) for a, b in zip(low, high, strict=True))
    elif resampling.replicates:
        intervals = ((0.0, 1.0),) * len(weights)
    if resampling.replicates:
        record["bootstrap"] = {name: getattr(resampling, name) for name in ("replicates", "level", "seed")}
    if amount:
        record["shrinkage"] = amount
    return WeightEstimate(tuple(shrunk(weights, amount).tolist()), method, record, intervals)


def conclude_nothing(
    method: str, tasks: int, samples: int, record: Mapping[str, JSON], resampling: Resampling
) -> WeightEstimate:
    """Returns equal weights, with a warning: all features are identical, so they say nothing."""
    warnings.warn(
        "all features are identical, in every task and in the target: they say nothing, so the weights are equal; "
        "check the encoder and the inputs",
        stacklevel=4,
    )
    facts = {**record, "reason": "all features are identical"}
    return conclude(method, np.full(tasks, 1 / tasks), None, samples, facts, resampling)


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
# Measured with other seeds and environments than the tables': 0.35 to 0.80 (normalised) and 0.32 to 0.79 (raw) where
# two or three tasks are mixed, 0.30 to 0.89 and 0.45 to 0.81 where more are.
TRANSPORT_ERROR = 0.6

# The half-L1 error of weights that somebody gave without a sample behind them: nothing is known of it.
OPINION_ERROR = 0.6
# About one in twenty samples of a mixture of the tasks lies outside all of them; more than this are another kind.
MOST_OUTSIDE = 0.1


def expected_error(estimate: WeightEstimate) -> float:
    """Returns the half-L1 error to be expected of an estimate: its own simulation's, or bias and chance together.

    Samples that lie outside all tasks count as misjudged. It is at least the share 1 / (2 n + 2) that n samples may
    well have missed, and it is about the weights as they were estimated: tempering does not change it.

    >>> round(expected_error(WeightEstimate((1, 1), "label", {"samples": 50})), 3)
    0.056
    >>> expected_error(WeightEstimate((3, 1), "weights"))
    0.6
    """
    if estimate.expected_error is not None:
        return estimate.expected_error
    facts = estimate.provenance
    parts = facts.get("sources")
    if estimate.method == "combined" and isinstance(parts, Sequence):
        return math.fsum(part["share"] * expected_error(_part(part)) for part in parts if isinstance(part, Mapping))  # type: ignore[operator]
    auto = facts.get("auto")
    simulated = facts.get("expected_error", auto.get("expected_error") if isinstance(auto, Mapping) else None)
    samples, outside = facts.get("samples"), facts.get("outside")
    if isinstance(simulated, (int, float)):
        error = float(simulated)
    elif isinstance(samples, (int, float)) and samples > 0:
        # The mean of |estimate - share| of a binomial share, by its normal limit, half of it for each task.
        chance = sum(math.sqrt(w * (1 - w) / (2 * math.pi * samples)) for w in _estimated(estimate))
        error = TRANSPORT_ERROR if estimate.method == "ot" else BIAS.get(estimate.method, max(BIAS.values())) + chance
    else:
        error = OPINION_ERROR
    if isinstance(outside, (int, float)):
        error += max(0.0, float(outside) - MOST_OUTSIDE)
    if isinstance(samples, (int, float)) and samples > 0 and len(estimate.weights) > 1:
        error = max(error, 1 / (2 * samples + 2))
    return min(1.0, error)


def _estimated(estimate: WeightEstimate) -> Sequence[float]:
    """Returns the weights before they were tempered, which a `Preference` says, or shrunk, which its facts say."""
    tempering = getattr(estimate, "tempering", None)
    amount = estimate.provenance.get("shrinkage") if tempering is None else tempering
    if not isinstance(amount, (int, float)) or not 0 < amount < 1:
        return estimate.weights
    added = amount / len(estimate.weights)
    return [min(1.0, max(0.0, (weight - added) / (1 - amount))) for weight in estimate.weights]


def _part(record: Mapping[str, Any]) -> WeightEstimate:
    return WeightEstimate(tuple(record["weights"]), str(record["method"]), dict(record["provenance"]))


def combined_estimate(sources: Sequence[WeightEstimate], strengths: Sequence[float] | None = None) -> WeightEstimate:
    """Returns the mean of `sources` by `strengths`, by default 1 / (bias^2 + 1/n) for a source with n samples.

    For different samples of one target: labels of some, inputs of others. Intervals are combined as if independent.

    >>> labels = WeightEstimate((1, 0), "label", {"samples": 20})
    >>> inputs = WeightEstimate((0, 1), "ot", {"samples": 20})
    >>> [round(weight, 3) for weight in combined_estimate([labels, inputs]).weights]
    [0.808, 0.192]
    """
    if not sources:
        raise InputError("nothing to combine: give at least one preference")
    tasks = len(sources[0].weights)
    for position, source in enumerate(sources, 1):
        if len(source.weights) != tasks:
            raise InputError(f"preference 1 has {tasks} tasks and preference {position} has {len(source.weights)}")
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
    weights = shares @ np.array([source.weights for source in sources])
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
    record: dict[str, JSON] = {"rule": rule, "sources": parts}
    return WeightEstimate(tuple(weights.tolist()), "combined", record, _combined_intervals(sources, shares, weights))


def _strength(source: WeightEstimate, position: int) -> float:
    samples = source.provenance.get("samples")
    if isinstance(samples, bool) or not isinstance(samples, (int, float)) or samples < 0:
        raise InputError(
            f"preference {position} ({source.method}) does not say how many samples stand behind it; give strengths"
        )
    if samples == 0:
        return 0.0
    return 1 / (BIAS.get(source.method, max(BIAS.values())) ** 2 + 1 / samples)


def _combined_intervals(sources: Sequence[WeightEstimate], shares: Floats, weights: Floats) -> Intervals | None:
    """Adds up the distances from each end to the weight as independent errors do, by their squares."""
    ends = [source.intervals for source in sources]
    if any(pairs is None for pairs in ends):
        return None
    table = np.array(ends)
    own = np.array([source.weights for source in sources])
    low = np.sqrt(np.square(shares[:, None] * np.maximum(own - table[:, :, 0], 0)).sum(axis=0))
    high = np.sqrt(np.square(shares[:, None] * np.maximum(table[:, :, 1] - own, 0)).sum(axis=0))
    return tuple(zip(np.clip(weights - low, 0, 1).tolist(), np.clip(weights + high, 0, 1).tolist(), strict=True))
