"""Records as measurements: which row got how much right in which environment, ready for tables and figures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.experiments import paper
from tunable_magmax.experiments.records import Key, Record, find_records, read_records, record_key

_SETTING = re.compile(r"(.+)-(\d+)")
_FAMILY = re.compile(r"([A-Za-z]+)(\d+)")
_BASES = ("zero-shot", "sequential", "single-best", "random_mix", "average", "ties", "magmax", "tunable")
_PREFERENCES = ("", "cosine", "mmd", "ot", "shift", "pseudo", "probe", "auto", "label", "search")
_SCALES = ("", "1", "0.5", "matched", "best")


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


def row_parts(row: str) -> tuple[str, str, str, str]:
    """A row's base, preference, scale and changed options.

    >>> row_parts("tunable:label@matched,compare=active")
    ('tunable', 'label', 'matched', 'compare=active')
    """
    name, _, options = row.partition(",")
    name, _, scale = name.partition("@")
    base, _, preference = name.partition(":")
    return base, preference, scale, options


def row_order(row: str) -> tuple[int, bool, int, int, str]:
    """Where a row stands in a table: baselines, preferences, variations."""
    base, preference, scale, options = row_parts(row)
    return (_place(base, _BASES), bool(options), _place(preference, _PREFERENCES), _place(scale, _SCALES), row)


def _place(name: str, known: Sequence[str]) -> int:
    return known.index(name) if name in known else len(known)
