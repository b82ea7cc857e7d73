"""Reads records as measurements (which row got how much right in which environment), with means and intervals."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError
from tunable_magmax.experiments import paper
from tunable_magmax.experiments.records import Key, Record, find_records, read_records, record_key
from tunable_magmax.experiments.rows import CHOSEN, recommended_row, row_order
from tunable_magmax.files import write_atomic

_SETTING = re.compile(r"(.+)-(\d+)")
_FAMILY = re.compile(r"([A-Za-z]+)(\d+)")


@dataclass(frozen=True)
class Measured:
    """One row in one environment with one seed. Shares lie between 0 and 1; None is what the row does not have.

    `accuracy` is over all classes, `known` among the classes of the sample's own task. `error`: half the L1 distance
    of the weights to the true mixture. `leftovers`: the share of elements given by lottery.
    """

    setting: str
    seed: int
    row: str
    environment: str
    mixture: str
    accuracy: float
    known: float | None
    error: float | None
    leftovers: float | None
    chosen: str | None


@dataclass(frozen=True)
class Results:
    """Everything that was recorded, by kind."""

    measured: tuple[Measured, ...]
    rows: tuple[Record, ...]
    sequences: tuple[Record, ...]
    scales: tuple[Record, ...]
    alphas: tuple[Record, ...]
    meta_sizes: tuple[Record, ...]

    @property
    def settings(self) -> list[str]:
        """Returns all settings, those of one model and data set by their number of tasks."""
        records = (*self.rows, *self.sequences, *self.scales, *self.alphas, *self.meta_sizes)
        return sorted({record["setting"] for record in records}, key=setting_parts)

    def of(self, setting: str, family: str | None = None) -> list[Measured]:
        """Returns the measurements of a setting, perhaps only in mixtures of one family."""
        return [
            each
            for each in self.measured
            if each.setting == setting and family in (None, mixture_parts(each.mixture)[0])
        ]

    def families(self, setting: str) -> list[str]:
        """Returns the kinds of mixtures: "D" for D1, D2 ..., "M" for M1, M2 ..., "" for others."""
        return sorted({mixture_parts(each.mixture)[0] for each in self.of(setting)})

    def main_family(self, setting: str) -> str | None:
        """Returns the environments that count for a setting: the paper's, else others, else the sweep over M."""
        families = self.families(setting)
        return next((name for name in ("D", *(n for n in families if n != "M"), "M") if name in families), None)

    def main_rows(self, setting: str) -> dict[str, list[Measured]]:
        """Returns the measurements of a setting that count, by row."""
        return grouped(self.of(setting, self.main_family(setting)))

    def is_papers(self, setting: str) -> bool:
        """Says whether the paper's numbers may stand beside this setting's."""
        own = of_setting(self.sequences, setting)
        return bool(own) and all(paper.same_setting(setting, record["tasks"], record["elements"]) for record in own)


def load_results(
    places: str | Path | Sequence[str | Path], kinds: Collection[str] = (), rows: Collection[str] = ()
) -> Results:
    """Reads all records at some places (files, or folders with files in them), perhaps only some kinds and rows.

    Several experiments may measure one row in other environments: then these are put together. What was measured
    twice is taken from the later place.
    """
    folders = [places] if isinstance(places, str | Path) else list(places)
    files = [file for place in folders for file in find_records(place)]
    if not files:
        raise InputError(
            f"no records.jsonl under {', '.join(str(place) for place in folders)}: run the experiment first"
        )
    kept: dict[tuple[Key, tuple[str, ...]], Record] = {}
    for file in files:
        for record in read_records(file):
            if kinds and record["kind"] not in kinds:
                continue
            if rows and record["kind"] in ("row", "meta-size") and record["row"] not in rows:
                continue
            mixtures = tuple(sorted({part["mixture"] for part in record.get("environments", ()) if "mixture" in part}))
            kept[record_key(record), mixtures if record["kind"] == "row" else ()] = record
    return results_of(kept.values())


def results_of(records: Iterable[Mapping[str, Any]]) -> Results:
    """Sorts records by kind and reads their measurements; rows are in the order of the tables."""
    by_kind: dict[str, list[Record]] = {kind: [] for kind in ("row", "sequence", "scale", "alpha", "meta-size")}
    for record in records:
        by_kind[record["kind"]].append(dict(record))
    for kind in ("row", "meta-size"):
        by_kind[kind].sort(key=lambda record: row_order(record["row"]))
    measured: dict[tuple[str, int, str, str], Measured] = {}
    for record in by_kind["row"]:
        for part in record["environments"]:
            at = (record["setting"], record["seed"], record["row"], part["name"])
            known = part.get("known_right")
            measured[at] = Measured(
                *at,
                part["mixture"],
                part["right"] / part["samples"],
                None if known is None else known / part["samples"],
                part.get("error"),
                part.get("leftovers"),
                part.get("chosen"),
            )
    return Results(
        tuple(measured.values()),
        tuple(by_kind["row"]),
        tuple(by_kind["sequence"]),
        tuple(by_kind["scale"]),
        tuple(by_kind["alpha"]),
        tuple(by_kind["meta-size"]),
    )


def of_setting(records: Iterable[Record], setting: str) -> list[Record]:
    """Returns the records of one setting."""
    return [record for record in records if record["setting"] == setting]


def grouped(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Groups measurements by row, in the order of the tables."""
    rows: dict[str, list[Measured]] = {}
    for each in measured:
        rows.setdefault(each.row, []).append(each)
    return dict(sorted(rows.items(), key=lambda item: row_order(item[0])))


def partial_rows(by_row: dict[str, list[Measured]]) -> set[str]:
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


REPLICATES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and their standard deviation (n - 1 below the line; None with one seed)."""

    mean: float
    deviation: float | None
    seeds: int


@dataclass(frozen=True)
class Difference:
    """A row minus another in the same environments with the same seeds. `ahead`: in how many of the `pairs`."""

    mean: float
    low: float
    high: float
    pairs: int
    ahead: int
    seeds: int

    @property
    def verdict(self) -> str:
        """Returns "ahead" or "behind" where the interval leaves 0 out."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "no clear difference"


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Returns mean and deviation of one value for each seed.

    >>> mean_over_seeds([1.0, 3.0])
    Mean(mean=2.0, deviation=1.4142135623730951, seeds=2)
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), deviation, len(values))


def averaged(
    measured: Iterable[Measured], value: Callable[[Measured], float | None] = lambda each: each.accuracy
) -> Mean | None:
    """Returns the mean over seeds of the mean over mixtures of the mean over variants; None without measurements."""
    tree: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in measured:
        number = value(each)
        if number is not None:
            tree[each.seed][each.mixture].append(number)
    if not tree:
        return None
    return mean_over_seeds(
        [float(np.mean([np.mean(numbers) for numbers in tree[seed].values()])) for seed in sorted(tree)]
    )


def paired(row: Iterable[Measured], reference: Iterable[Measured]) -> Difference | None:
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
    differences = table[there > 0]
    ahead = int((differences > 0).sum())
    return Difference(float(differences.mean()), float(low), float(high), len(both), ahead, len(seeds))


@lru_cache(maxsize=16)  # hundreds of differences share a few shapes
def _resamples(seeds: int, places: int) -> tuple[Floats, Floats]:
    """Draws how often each seed and each environment counts: [replicates, seeds] and [replicates, environments]."""
    rng = np.random.default_rng(0)
    first, second = (rng.multinomial(n, np.full(n, 1 / n), REPLICATES).astype(np.float64) for n in (seeds, places))
    return first, second


def interval_note(seeds: int) -> str:
    """Explains how intervals were made, for below a table."""
    drawn = "over environments alone (there is one seed)" if seeds < 2 else "over seeds and environments"
    rough = f" With {seeds} seeds it is a rough guide." if 2 <= seeds < 5 else ""
    return f"In brackets: {LEVEL:.0%} interval of a paired bootstrap {drawn}, {REPLICATES:,} samples, seed 0.{rough}"


SUMMARY = "summary.json"


def summary_of(results: Results) -> dict[str, Any]:
    """Returns `{setting: {row: {"mean", "std", "seeds", "environments"}}, ..., "chosen": ..., "recommended": ...}`.

    `chosen` is the scale that plain merges are shown at, `recommended` the row that `tmx tailor` makes by default from
    unlabelled inputs.

    Means are over seeds, of means over environments: the paper's mixtures where a setting has them. `std` is the
    deviation over seeds (n - 1), null with one; `environments` how many each seed has.
    """
    summary: dict[str, Any] = {}
    for setting in results.settings:
        rows = {}
        for row, measured in results.main_rows(setting).items():
            mean = averaged(measured)
            if mean is not None:
                rows[row] = {
                    "mean": mean.mean,
                    "std": mean.deviation,
                    "seeds": mean.seeds,
                    "environments": len({each.environment for each in measured}),
                }
        if rows:
            summary[setting] = rows
    recommended = recommended_row(row for rows in summary.values() for row in rows)
    return {**summary, "chosen": CHOSEN, "recommended": recommended}


def write_summary(results: str | Path, path: str | Path | None = None) -> Path:
    """Writes the mean accuracy of every row in every setting under a folder, by default into it."""
    target = Path(path) if path is not None else Path(results) / SUMMARY
    summary = summary_of(load_results(results))
    write_atomic(target, (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())
    return target
