"""Reads records as scores (which row got how much right in which environment), with means and intervals."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.records import RECORDS, EnvironmentScore, Record, RowRecord, read_records
from tunable_magmax.experiments.rows import CHOSEN, RECOMMENDED, row_order
from tunable_magmax.files import write_json

SUMMARY = "summary.json"
REPLICATES = 10_000
LEVEL = 0.95
_SETTING = re.compile(r"(.+)-(\d+)")
_FAMILY = re.compile(r"([A-Za-z]+)(\d+)")
Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class Score:
    """What one row got in one environment with one seed."""

    seed: int
    found: EnvironmentScore

    @property
    def pair(self) -> tuple[int, str]:
        """Seed and environment: scores of two rows that have them in common can be compared."""
        return self.seed, self.found.name


@dataclass(frozen=True)
class Results:
    """Everything that was recorded."""

    records: tuple[Record, ...]

    @property
    def settings(self) -> list[str]:
        """All settings, those of one model and data set by their number of tasks."""
        return sorted({record.setting for record in self.records}, key=setting_parts)

    def of(self, kind: type[Kind], setting: str) -> list[Kind]:
        """Returns the records of a kind and a setting."""
        return [each for each in self.records if isinstance(each, kind) and each.setting == setting]

    def rows(self, setting: str) -> dict[str, list[Score]]:
        """Returns the scores of a setting by row, in the order of the tables."""
        rows: dict[str, list[Score]] = defaultdict(list)
        for record in sorted(self.of(RowRecord, setting), key=lambda record: row_order(record.row)):
            rows[record.row] += [Score(record.seed, each) for each in record.environments]
        return dict(rows)

    def main_rows(self, setting: str) -> dict[str, list[Score]]:
        """Returns those in the environments that count: the paper's ratios, else others, else equal shares."""
        rows = self.rows(setting)
        families = {mixture_family(each) for scores in rows.values() for each in scores}
        main = min(families, key=lambda name: (name != "D", name == "M", name), default="")
        return of_family(rows, main)


def load_results(folder: str | Path) -> Results:
    """Reads all records under a folder, in order of path."""
    files = sorted(Path(folder).rglob(RECORDS))
    if not files:
        raise InputError(f"no {RECORDS} under {folder}: run the experiment first")
    return Results(tuple(record for file in files for record in read_records(file)))


def of_family(rows: Mapping[str, Sequence[Score]], family: str) -> dict[str, list[Score]]:
    """Returns the scores in mixtures of one family: D are the paper's ratios, M equal shares of so many tasks."""
    chosen = {row: [each for each in scores if mixture_family(each) == family] for row, scores in rows.items()}
    return {row: scores for row, scores in chosen.items() if scores}


def partial_rows(by_row: Mapping[str, Sequence[Score]]) -> set[str]:
    """Returns the rows that lack environments or seeds that others have, so that their means can't be compared."""
    everywhere = {each.pair for scores in by_row.values() for each in scores}
    return {row for row, scores in by_row.items() if {each.pair for each in scores} != everywhere}


def setting_parts(setting: str) -> tuple[str, int]:
    """Returns a setting's model and data set, and its number of tasks (0 if it has none): a sort key.

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


def mixture_family(score: Score) -> str:
    return mixture_parts(score.found.mixture)[0]


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


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Returns mean and deviation of one value for each seed.

    >>> mean_over_seeds([1.0, 3.0])
    Mean(mean=2.0, deviation=1.4142135623730951, seeds=2)
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), deviation, len(values))


def averaged(scores: Sequence[Score]) -> Mean:
    """Returns the mean over seeds of the mean over mixtures of the mean over variants, of at least one score."""
    tree: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in scores:
        tree[each.seed][each.found.mixture].append(each.found.accuracy)
    return mean_over_seeds(
        [float(np.mean([np.mean(numbers) for numbers in tree[seed].values()])) for seed in sorted(tree)]
    )


def paired(row: Sequence[Score], reference: Sequence[Score]) -> Difference | None:
    """Returns row minus reference over seeds and the environments that both have with all of them, with an interval.

    Seeds and environments are resampled independently of each other (a difference is shared by neither alone), and the
    interval holds the middle `LEVEL` of the means of `REPLICATES` samples. With one seed, only environments vary.
    """
    ours, theirs = ({each.pair: each.found.accuracy for each in scores} for scores in (row, reference))
    both = ours.keys() & theirs.keys()
    seeds = sorted({seed for seed, _ in both})
    names = [name for name in sorted({name for _, name in both}) if all((seed, name) in both for seed in seeds)]
    if not names:
        return None
    table = np.array([[ours[seed, name] - theirs[seed, name] for name in names] for seed in seeds])
    by_seed, by_name = _resamples(*table.shape)
    means = ((by_seed @ table) * by_name).sum(axis=1) / table.size
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(table.mean()), float(low), float(high))


@lru_cache(maxsize=16)  # hundreds of differences share a few shapes
def _resamples(seeds: int, names: int) -> tuple[Floats, Floats]:
    """Draws how often each seed and each environment counts: [replicates, seeds] and [replicates, environments]."""
    rng = np.random.default_rng(0)
    first, second = (rng.multinomial(n, np.full(n, 1 / n), REPLICATES).astype(np.float64) for n in (seeds, names))
    return first, second


# -- the summary ------------------------------------------------------------------------------------------------------


def write_summary(results: Results, folder: Path) -> Path:
    """Writes `{setting: {row: {"mean", "std", "seeds", "environments"}}, ..., "chosen": ..., "recommended": ...}`.

    Means are over seeds, of means over environments: the paper's mixtures where a setting has them. `std` is the
    deviation over seeds (n - 1), null with one; `environments` how many each seed has. `chosen` is the scale that plain
    merges are shown at, `recommended` the row that `tmx tailor` makes by default from unlabelled inputs.
    """
    summary: dict[str, Any] = {}
    for setting in results.settings:
        for row, scores in results.main_rows(setting).items():
            mean, environments = averaged(scores), len({each.found.name for each in scores})
            entry = {"mean": mean.mean, "std": mean.deviation, "seeds": mean.seeds, "environments": environments}
            summary.setdefault(setting, {})[row] = entry
    path = folder / SUMMARY
    write_json(path, {**summary, "chosen": CHOSEN, "recommended": RECOMMENDED})
    return path
