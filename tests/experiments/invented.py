"""Records of experiments that never were: small, seeded, with a method that wins and one that loses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from tunable_magmax.experiments.records import (
    AlphaPoint,
    AlphaRecord,
    EnvironmentScore,
    Record,
    RowRecord,
    ScaleRecord,
    SequenceRecord,
)
from tunable_magmax.experiments.results import Results

SETTING = "mini-clip/cifar100-20"
VARIANTS = (42, 123, 456, 789, 1011)
RATIOS = ("D1", "D2", "D3", "D4", "D5")
BASE, LAST = "zero-shot+fit+prior:auto", "sequential@1+fit+prior:auto"
ABOVE = {
    "zero-shot": -0.12,
    BASE: 0.1,
    LAST: 0.08,
    "magmax@0.5": -0.02,
    "magmax@best": 0.0,
    "tunable:label@0.5": 0.01,
    "tunable:label@matched": 0.07,
    "tailor:auto": 0.15,
    "tailor:wrong": -0.2,
    "joint+fit+prior:auto": 0.2,
}
"""How far each row's accuracy is from MAGMAX's, on average."""
BATCH = 400


def row_record(
    row: str,
    seed: int,
    setting: str = SETTING,
    mixtures: Iterable[str] = RATIOS,
    variants: Iterable[int] = VARIANTS,
    above: Mapping[str, float] = ABOVE,
) -> RowRecord:
    """A row as the runner would write it; environments differ, seeds little, rows by `above`."""
    found = []
    for mixture in mixtures:
        for variant in variants:
            place = random.Random(f"{setting} {mixture} {variant}").gauss(0, 0.03)
            chance = random.Random(f"{setting} {mixture} {variant} {row} {seed}")
            share = 0.7 + place + above.get(row, 0.0) + chance.gauss(0, 0.01)
            told = {"tailored": (0.8, 0.7, 0.9), "base": (0.8, 0.75, 0.85)} if row == "tailor:auto" else {}
            found.append(
                EnvironmentScore(
                    name=f"{mixture}/{variant}",
                    mixture=mixture,
                    right=round(BATCH * min(max(share, 0.0), 1.0)),
                    samples=BATCH,
                    error=0.1 if ":" in row else None,
                    expected_error=0.15 if ":" in row else None,
                    expected=told,
                )
            )
    return RowRecord(setting=setting, seed=seed, row=row, environments=tuple(found))


def sequence_record(seed: int, setting: str = SETTING, elements: int = 1000) -> SequenceRecord:
    tasks = int(setting.rpartition("-")[2])
    versions = {"torch": "2.13.0"}
    own = {"tasks": tasks, "elements": elements, "config": {}}
    return SequenceRecord(setting=setting, seed=seed, versions=versions, device="cpu", **own)


def scale_record(seed: int, setting: str = SETTING, best: float = 0.75) -> ScaleRecord:
    grid = {"0.5": 0.7, f"{best:g}": 0.72}
    return ScaleRecord(setting=setting, seed=seed, method="magmax", grid=grid, best=best)


def alpha_records(seed: int, setting: str = SETTING, scale: float | str = 0.5) -> list[AlphaRecord]:
    points = [
        AlphaPoint(alpha=alpha, first=0.4 + 0.15 * alpha, last=0.85 - 0.12 * alpha) for alpha in (0.0, 0.5, 1.0, 2.0)
    ]
    fixed = AlphaPoint(alpha=None, first=0.55, last=0.75)
    key = {"setting": setting, "seed": seed, "scale": scale}
    return [
        AlphaRecord(**key, method="tunable", points=tuple(points)),
        AlphaRecord(**key, method="magmax", points=(fixed,)),
    ]


def whole_experiment(settings: Iterable[str] = (SETTING,)) -> list[Record]:
    """Every kind of record, three seeds, in each setting."""
    records: list[Record] = []
    for setting in settings:
        for seed in (3, 4, 5):
            records += [sequence_record(seed, setting), scale_record(seed, setting), *alpha_records(seed, setting)]
            records += [row_record(row, seed, setting, (*RATIOS, "M5", "M10")) for row in ABOVE]
            records.append(row_record("tunable:search@0.5", seed, setting, variants=VARIANTS[:1]))
            records += [
                row_record(f"tailor:auto,samples={size}", seed, setting, variants=VARIANTS[:1]) for size in (5, 10, 20)
            ]
    return records


def results_of(records: Iterable[Record]) -> Results:
    return Results(tuple(records))
