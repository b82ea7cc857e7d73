"""Reads records as scores (which row got how much right in which environment), with means and intervals."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.records import (
    AlphaRecord,
    EnvironmentScore,
    Record,
    RowRecord,
    SequenceRecord,
    find_records,
    joined,
    read_records,
)
from tunable_magmax.experiments.rows import CHOSEN, RECOMMENDED, row_order
from tunable_magmax.files import write_atomic

SUMMARY = "summary.json"
REPLICATES = 10_000
LEVEL = 0.95
_SETTING = re.compile(r"(.+)-(\d+)")
_FAMILY = re.compile(r"([A-Za-z]+)(\d+)")


@dataclass(frozen=True)
class Score:
    """One row in one environment with one seed."""

    setting: str
    seed: int
    row: str
    found: EnvironmentScore

    @property
    def environment(self) -> str:
        return self.found.name

    @property
    def mixture(self) -> str:
        return self.found.mixture

    @property
    def accuracy(self) -> float:
        """The share that is right, from 0 to 1."""
        return self.found.right / self.found.samples


@dataclass(frozen=True)
class Results:
    """Everything that was recorded, one record for each key."""

    records: tuple[Record, ...]

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """The scores of all rows."""
        rows = [record for record in self.records if isinstance(record, RowRecord)]
        return tuple(Score(row.setting, row.seed, row.row, each) for row in rows for each in row.environments)

    @property
    def settings(self) -> list[str]:
        """All settings, those of one model and data set by their number of tasks."""
        return sorted({record.setting for record in self.records}, key=setting_parts)

    def sequences(self, setting: str) -> list[SequenceRecord]:
        return [each for each in self.records if isinstance(each, SequenceRecord) and each.setting == setting]

    def alphas(self, setting: str) -> list[AlphaRecord]:
        return [each for each in self.records if isinstance(each, AlphaRecord) and each.setting == setting]

    def rows(self, setting: str, family: str | None = None) -> dict[str, list[Score]]:
        """Returns the scores of a setting by row, in the order of the tables; perhaps in mixtures of one family."""
        rows: dict[str, list[Score]] = {}
        for each in self.scores:
            if each.setting == setting and family in (None, mixture_parts(each.mixture)[0]):
                rows.setdefault(each.row, []).append(each)
        return dict(sorted(rows.items(), key=lambda item: row_order(item[0])))

    def main_rows(self, setting: str) -> dict[str, list[Score]]:
        """Returns those in the environments that count: the paper's ratios, else others, else equal shares."""
        families = sorted({mixture_parts(each.mixture)[0] for each in self.scores if each.setting == setting})
        order = ("D", *(name for name in families if name != "M"), "M")
        return self.rows(setting, next((name for name in order if name in families), None))


def load_results(places: str | Path | Sequence[str | Path]) -> Results:
    """Reads all records at some places: files, or folders with files in them."""
    folders = [places] if isinstance(places, str | Path) else list(places)
    files = [file for place in folders for file in find_records(place)]
    if not files:
        raise InputError(
            f"no records.jsonl under {', '.join(str(place) for place in folders)}: run the experiment first"
        )
    return Results(tuple(joined([record for file in files for record in read_records(file)])))


def partial_rows(by_row: dict[str, list[Score]]) -> set[str]:
    """Returns the rows that lack environments or seeds that others have, so that their means can't be compared."""
    everywhere = {(one.seed, one.environment) for each in by_row.values() for one in each}
    return {row for row, own in by_row.items() if {(each.seed, each.environment) for each in own} != everywhere}


def setting_parts(setting: str) -> tuple[str, int]:
    """Returns a setting's model and data set, and its number of tasks (0 if it has none).

    >>> setting_parts("mini-clip/cifar100-20"), setting_parts("glyphs")
    (('mini-clip/cifar100', 20), ('glyphs', 0))
    """
    match = _SETTING.fullmatch(setting)
    return (match[1], int(match[2])) if match else (setting, 0)


def mixture_parts(mixture: str) -> tuple[str, int, str]:
    """Returns a mixture's family, its number and its name: a sort key.

    >>> mixture_parts("M10"), mixture_parts("hospital")
    (('M', 10, 'M10'), ('', 0, 'hospital'))
    """
    match = _FAMILY.fullmatch(mixture)
    return (match[1], int(match[2]), mixture) if match else ("", 0, mixture)


# -- means and differences --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and their standard deviation (n - 1 below the line; None with one seed)."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Difference:
    """A row minus another in the same environments with the same seeds, with a 95% interval."""

    mean: float
    low: float
    high: float
    pairs: int
    seeds: int

    @property
    def verdict(self) -> str:
        """ "ahead" or "behind" where the interval leaves 0 out."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Returns mean and deviation of one value for each seed.

    >>> mean_over_seeds([1.0, 3.0])
    Mean(mean=2.0, deviation=1.4142135623730951, seeds=2)
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), deviation, len(values))


def averaged(scores: Iterable[Score]) -> Mean | None:
    """Returns the mean over seeds of the mean over mixtures of the mean over variants; None without scores."""
    tree: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in scores:
        tree[each.seed][each.mixture].append(each.accuracy)
    if not tree:
        return None
    return mean_over_seeds(
        [float(np.mean([np.mean(numbers) for numbers in tree[seed].values()])) for seed in sorted(tree)]
    )


def paired(row: Iterable[Score], reference: Iterable[Score]) -> Difference | None:
    """Returns row minus reference over the seeds and environments that both have, with a bootstrap interval.

    Seeds and environments are resampled independently of each other (a difference is shared by neither alone), and the
    interval holds the middle `LEVEL` of the means of `REPLICATES` samples. With one seed, only environments vary.
    """
    ours = {(each.seed, each.environment): each.accuracy for each in row}
    theirs = {(each.seed, each.environment): each.accuracy for each in reference}
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    seeds = sorted({pair[0] for pair in both})
    places = sorted({pair[1] for pair in both})
    table = np.zeros((len(seeds), len(places)))
    there = np.zeros_like(table)
    for pair in both:
        at = seeds.index(pair[0]), places.index(pair[1])
        table[at], there[at] = ours[pair] - theirs[pair], 1.0
    by_seed, by_place = _resamples(len(seeds), len(places))
    sums = ((by_seed @ table) * by_place).sum(axis=1)
    counts = ((by_seed @ there) * by_place).sum(axis=1)
    drawn = counts > 0  # a sample may hold no pair where some are missing
    low, high = np.quantile(sums[drawn] / counts[drawn], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(table[there > 0].mean()), float(low), float(high), len(both), len(seeds))


@lru_cache(maxsize=16)  # hundreds of differences share a few shapes
def _resamples(seeds: int, places: int) -> tuple[Floats, Floats]:
    """Draws how often each seed and each environment counts: [replicates, seeds] and [replicates, environments]."""
    rng = np.random.default_rng(0)
    first, second = (rng.multinomial(n, np.full(n, 1 / n), REPLICATES).astype(np.float64) for n in (seeds, places))
    return first, second


# -- the summary ------------------------------------------------------------------------------------------------------


def summary_of(results: Results) -> dict[str, Any]:
    """Returns `{setting: {row: {"mean", "std", "seeds", "environments"}}, ..., "chosen": ..., "recommended": ...}`.

    Means are over seeds, of means over environments: the paper's mixtures where a setting has them. `std` is the
    deviation over seeds (n - 1), null with one; `environments` how many each seed has. `chosen` is the scale that plain
    merges are shown at, `recommended` the row that `tmx tailor` makes by default from unlabelled inputs.
    """
    summary: dict[str, Any] = {}
    for setting in results.settings:
        rows = {}
        for row, scores in results.main_rows(setting).items():
            mean = averaged(scores)
            assert mean is not None
            environments = len({each.environment for each in scores})
            rows[row] = {"mean": mean.mean, "std": mean.deviation, "seeds": mean.seeds, "environments": environments}
        if rows:
            summary[setting] = rows
    return {**summary, "chosen": CHOSEN, "recommended": RECOMMENDED}


def write_summary(results: str | Path, path: str | Path | None = None) -> Path:
    """Writes the mean accuracy of every row in every setting under a folder, by default into it."""
    target = Path(path) if path is not None else Path(results) / SUMMARY
    summary = summary_of(load_results(results))
    write_atomic(target, (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())
    return target
