"""Records as measurements: which row got how much right in which environment, ready for tables and figures."""

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

from tunable_magmax.errors import InputError
from tunable_magmax.experiments import paper
from tunable_magmax.experiments.records import Key, Record, find_records, read_records, record_key
from tunable_magmax.experiments.rows import row_order
from tunable_magmax.files import write_atomic
from tunable_magmax.preference.arrays import Floats

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
        """All settings, those of one model and data set by their number of tasks."""
        found = {record["setting"] for kind in (self.rows, self.sequences, self.scales) for record in kind}
        found |= {record["setting"] for kind in (self.alphas, self.meta_sizes) for record in kind}
        return sorted(found, key=setting_parts)

    def of(self, setting: str, family: str | None = None) -> list[Measured]:
        """The measurements of a setting, and of the mixtures of one family."""
        return [
            found
            for found in self.measured
            if found.setting == setting and family in (None, mixture_parts(found.mixture)[0])
        ]

    def families(self, setting: str) -> list[str]:
        """Kinds of mixtures: "D" for D1, D2 ..., "M" for M1, M2 ..., "" for others."""
        return sorted({mixture_parts(found.mixture)[0] for found in self.of(setting)})

    def main_family(self, setting: str) -> str | None:
        """The environments that a setting is judged by: the paper's, else others, else the sweep over M."""
        families = self.families(setting)
        return next((name for name in ("D", *(n for n in families if n != "M"), "M") if name in families), None)

    def is_papers(self, setting: str) -> bool:
        """Whether the paper's numbers may stand beside this setting's."""
        own = [record for record in self.sequences if record["setting"] == setting]
        return bool(own) and all(paper.same_setting(setting, record["tasks"], record["elements"]) for record in own)


def load_results(
    places: str | Path | Sequence[str | Path], kinds: Collection[str] = (), rows: Collection[str] = ()
) -> Results:
    """All records at some places (files, or folders with files in them), perhaps only some kinds and rows.

    Several experiments may measure one row in other environments: then these are put together. What was measured
    twice is taken from the later place.
    """
    given = [places] if isinstance(places, str | Path) else list(places)
    files = [file for place in given for file in find_records(place)]
    if not files:
        raise InputError(f"no records.jsonl under {', '.join(str(place) for place in given)}: run the experiment first")
    kept: dict[tuple[Key, tuple[str, ...]], Record] = {}
    for file in files:
        for record in read_records(file):
            if kinds and record["kind"] not in kinds:
                continue
            if rows and record["kind"] in ("row", "meta-size") and record["row"] not in rows:
                continue
            mixtures = tuple(
                sorted({found["mixture"] for found in record.get("environments", ()) if "mixture" in found})
            )
            kept[record_key(record), mixtures if record["kind"] == "row" else ()] = record
    return results_of(kept.values())


def results_of(records: Iterable[Mapping[str, Any]]) -> Results:
    """Records by kind, and their measurements; rows in the order of the tables."""
    by_kind: dict[str, list[Record]] = {kind: [] for kind in ("row", "sequence", "scale", "alpha", "meta-size")}
    for record in records:
        by_kind[record["kind"]].append(dict(record))
    for kind in ("row", "meta-size"):
        by_kind[kind].sort(key=lambda record: row_order(record["row"]))
    measured: dict[tuple[str, int, str, str], Measured] = {}
    for record in by_kind["row"]:
        for found in record["environments"]:
            at = (record["setting"], record["seed"], record["row"], found["name"])
            known = found.get("known_right")
            measured[at] = Measured(
                *at,
                found["mixture"],
                found["right"] / found["samples"],
                None if known is None else known / found["samples"],
                found.get("error"),
                found.get("leftovers"),
                found.get("chosen"),
            )
    return Results(
        tuple(measured.values()),
        tuple(by_kind["row"]),
        tuple(by_kind["sequence"]),
        tuple(by_kind["scale"]),
        tuple(by_kind["alpha"]),
        tuple(by_kind["meta-size"]),
    )


def grouped(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    """Measurements by row, in the order of the tables."""
    rows: dict[str, list[Measured]] = {}
    for found in measured:
        rows.setdefault(found.row, []).append(found)
    return dict(sorted(rows.items(), key=lambda item: row_order(item[0])))


def partial_rows(by_row: dict[str, list[Measured]]) -> set[str]:
    """Rows that were not measured everywhere where others were: their means are of something else."""
    everywhere = {(found.seed, found.environment) for each in by_row.values() for found in each}
    return {row for row, found in by_row.items() if {(each.seed, each.environment) for each in found} != everywhere}


def setting_parts(setting: str) -> tuple[str, int]:
    """A setting's model and data set, and its number of tasks (0 if it has none).

    >>> setting_parts("mini-clip/cifar100-20"), setting_parts("glyphs")
    (('mini-clip/cifar100', 20), ('glyphs', 0))
    """
    match = _SETTING.fullmatch(setting)
    return (match[1], int(match[2])) if match else (setting, 0)


def mixture_parts(mixture: str) -> tuple[str, int, str]:
    """A mixture's family, its number and its name, in which order they are shown.

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
    behind: int
    seeds: int
    environments: int

    @property
    def verdict(self) -> str:
        """In a word: "ahead" or "behind" where the interval leaves 0 out."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "no clear difference"


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """One value for each seed.

    >>> mean_over_seeds([1.0, 3.0])
    Mean(mean=2.0, deviation=1.4142135623730951, seeds=2)
    """
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Mean(float(np.mean(values)), deviation, len(values))


def averaged(
    found: Iterable[Measured], value: Callable[[Measured], float | None] = lambda measured: measured.accuracy
) -> Mean | None:
    """The mean over seeds of the mean over mixtures of the mean over variants; None where nothing was measured."""
    tree: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for measured in found:
        number = value(measured)
        if number is not None:
            tree[measured.seed][measured.mixture].append(number)
    if not tree:
        return None
    return mean_over_seeds([float(np.mean([np.mean(each) for each in tree[seed].values()])) for seed in sorted(tree)])


def paired(row: Iterable[Measured], reference: Iterable[Measured], seed: int = 0) -> Difference | None:
    """Row minus reference over the seeds and environments that both have, with a bootstrap interval.

    Seeds and environments are resampled independently of each other (a difference is shared by neither alone), and the
    interval holds the middle `LEVEL` of the means of `REPLICATES` samples. With one seed, only environments vary.
    """
    ours = {(found.seed, found.environment): found.accuracy for found in row}
    theirs = {(found.seed, found.environment): found.accuracy for found in reference}
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
    by_seed, by_place = _resamples(len(seeds), len(places), seed)
    sums = ((by_seed @ table) * by_place).sum(axis=1)
    counts = ((by_seed @ there) * by_place).sum(axis=1)
    drawn = counts > 0  # a sample may hold no pair where some are missing
    low, high = np.quantile(sums[drawn] / counts[drawn], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    differences = table[there > 0]
    return Difference(
        float(differences.mean()),
        float(low),
        float(high),
        len(both),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        len(seeds),
        len(places),
    )


@lru_cache(maxsize=16)  # hundreds of differences share a few shapes
def _resamples(seeds: int, places: int, seed: int) -> tuple[Floats, Floats]:
    """How often each seed and each environment was drawn: [replicates, seeds] and [replicates, environments]."""
    rng = np.random.default_rng(seed)
    first, second = (rng.multinomial(n, np.full(n, 1 / n), REPLICATES).astype(np.float64) for n in (seeds, places))
    return first, second


def interval_note(seeds: int) -> str:
    """How intervals were made, for below a table."""
    drawn = "over environments alone (there is one seed)" if seeds < 2 else "over seeds and environments"
    rough = f" With {seeds} seeds it is a rough guide." if 2 <= seeds < 5 else ""
    return f"In brackets: {LEVEL:.0%} interval of a paired bootstrap {drawn}, {REPLICATES:,} samples, seed 0.{rough}"


SUMMARY = "summary.json"


def summary_of(results: Results, chosen: str = "matched") -> dict[str, Any]:
    """`{setting: {row: {"mean", "std", "seeds", "environments"}}, ..., "chosen": the recommended scale}`.

    Means are over seeds, of means over environments: the paper's mixtures where a setting has them. `std` is the
    deviation over seeds (n - 1), null with one; `environments` how many each seed has.
    """
    summary: dict[str, Any] = {}
    for setting in results.settings:
        rows = {}
        for row, found in grouped(results.of(setting, results.main_family(setting))).items():
            mean = averaged(found)
            if mean is not None:
                rows[row] = {
                    "mean": mean.mean,
                    "std": mean.deviation,
                    "seeds": mean.seeds,
                    "environments": len({each.environment for each in found}),
                }
        if rows:
            summary[setting] = rows
    return {**summary, "chosen": chosen}


def write_summary(results: str | Path, path: str | Path | None = None, chosen: str = "matched") -> Path:
    """Write the summary of all records under a folder, by default into it."""
    target = Path(path) if path is not None else Path(results) / SUMMARY
    summary = summary_of(load_results(results), chosen)
    write_atomic(target, (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())
    return target
