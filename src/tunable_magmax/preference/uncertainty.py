"""How sure a preference is: bootstrap intervals over the target's samples, and shrinkage toward equal weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.preference.arrays import Floats
from tunable_magmax.preference.preference import JSON, Preference

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
        if self.replicates < 0:
            raise InputError(f"replicates must be >= 0, not {self.replicates}; 0 turns intervals off")
        if not 0 < self.level < 1:
            raise InputError(f"level must lie between 0 and 1, not {self.level}")
        if self.seed < 0:
            raise InputError(f"seed must be >= 0, not {self.seed}")
        if self.shrink == "auto":
            if self.replicates < 2:
                raise InputError("shrink='auto' needs at least 2 replicates")
        elif not (isinstance(self.shrink, (int, float)) and 0 <= self.shrink <= 1):
            raise InputError(f"shrink must lie between 0 and 1, or be 'auto', not {self.shrink!r}")


DEFAULT = Resampling()


def histogram_replicates(counts: Floats, resampling: Resampling, stream: int = 0) -> Floats:
    """Bootstrap samples of a histogram of n samples: [replicates, classes], every row sums to n."""
    rng = np.random.default_rng([resampling.seed, stream])
    total = counts.sum()
    return rng.multinomial(round(total), counts / total, size=resampling.replicates).astype(np.float64)


def sample_replicates(samples: int, resampling: Resampling) -> Iterator[Floats]:
    """Blocks [some replicates, samples] of how often each sample was drawn; together `replicates` rows."""
    rng = np.random.default_rng(resampling.seed)
    left = resampling.replicates
    while left:
        rows = min(left, max(1, BLOCK // samples))
        yield rng.multinomial(samples, np.full(samples, 1 / samples), size=rows).astype(np.float64)
        left -= rows


def half_l1(first: Floats, second: Floats) -> Floats:
    """Half the L1 distance over the last axis: the share of weight that sits on the wrong task.

    >>> float(half_l1(np.array([1.0, 0.0]), np.array([0.75, 0.25])))
    0.25
    """
    distance: Floats = np.abs(first - second).sum(axis=-1) / 2
    return distance


def shrunk(weights: Floats, amount: float) -> Floats:
    """`weights` moved toward equal ones by `amount`.

    >>> shrunk(np.array([1.0, 0.0]), 0.5).tolist()
    [0.75, 0.25]
    """
    mixed: Floats = (1 - amount) * weights + amount / weights.shape[-1]
    return mixed


def shrinkage(weights: Floats, replicates: Floats) -> float:
    """The share of the squared distance to equal weights that the replicates' variance explains, at most 1."""
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
) -> Preference:
    """The preference with intervals from `replicates` [replicates, tasks], after shrinkage where asked for."""
    record: dict[str, JSON] = {**provenance, "samples": samples}
    usable = replicates is not None and len(replicates) > 0 and samples > 1
    amount = 0.0
    if resampling.shrink == "auto":
        # One sample has no variance to estimate: nothing says that the differences are more than noise.
        amount = shrinkage(weights, replicates) if usable and replicates is not None else 1.0
    else:
        amount = float(resampling.shrink)
    weights = shrunk(weights, amount)
    intervals: tuple[tuple[float, float], ...] | None = None
    if usable and replicates is not None:
        tail = (1 - resampling.level) / 2
        low, high = np.quantile(shrunk(replicates, amount), [tail, 1 - tail], axis=0).clip(0, 1)
        intervals = tuple((float(a), float(b)) for a, b in zip(low, high, strict=True))
    elif resampling.replicates:
        intervals = ((0.0, 1.0),) * len(weights)
    if resampling.replicates:
        record["bootstrap"] = {
            "replicates": resampling.replicates,
            "level": resampling.level,
            "seed": resampling.seed,
        }
    if amount:
        record["shrinkage"] = amount
    return Preference(tuple(float(w) for w in weights), method, record, intervals)
