"""Records of experiments that never were: small, seeded, with a method that wins and one that loses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VARIANTS = (42, 123, 456, 789, 1011)
ABOVE_MAGMAX = {
    "zero-shot": -0.12,
    "sequential@0.5": -0.06,
    "random_mix@0.5": -0.05,
    "magmax@0.5": -0.02,
    "magmax@best": 0.0,
    "tunable:mmd@matched": -0.08,
    "tunable:ot@matched": 0.03,
    "tunable:auto@matched": 0.06,
    "tunable:label@0.5": 0.01,
    "tunable:label@matched": 0.07,
    "tunable:label@matched,compare=active": 0.065,
}
"""How far each row's accuracy is from MAGMAX's, on average."""
BATCH = 400


def row_record(
    row: str,
    seed: int,
    setting: str = "mini-clip/cifar100-20",
    mixtures: Iterable[str] = ("D1", "D2", "D3", "D4", "D5"),
    variants: Iterable[int] = VARIANTS,
    above: Mapping[str, float] = ABOVE_MAGMAX,
) -> dict[str, Any]:
    """A row as the runner would write it; environments differ, seeds little, rows by `above`."""
    base, _, rest = row.partition(":")
    preference = rest.partition("@")[0] or None
    found = []
    for mixture in mixtures:
        for variant in variants:
            place = random.Random(f"{setting} {mixture} {variant}").gauss(0, 0.03)
            chance = random.Random(f"{setting} {mixture} {variant} {row} {seed}")
            share = 0.7 + place + above.get(row, 0.0) + chance.gauss(0, 0.01)
            right = round(BATCH * min(max(share, 0.0), 1.0))
            found.append(
                {
                    "name": f"{mixture}/{variant}",
                    "mixture": mixture,
                    "variant": variant,
                    "right": right,
                    "samples": BATCH,
                    "known_right": min(BATCH, right + 40),
                    "lambda": 0.5,
                    "leftovers": round(chance.uniform(0, 0.3), 4) if preference else None,
                    "error": round(chance.uniform(0, 0.2), 4) if preference else None,
                    "weights": {"1": 0.5, "2": 0.5} if preference else None,
                    "chosen": "probe" if preference == "auto" else None,
                }
            )
    return {
        "kind": "row",
        "setting": setting,
        "seed": seed,
        "row": row,
        "method": "tunable_magmax" if preference else base,
        "preference": preference,
        "scale": "matched",
        "options": {},
        "seconds": {"embed": 0.75, "prefer": 2.5 if preference else 0.0, "merge": 1.25, "evaluate": 25.0},
        "environments": found,
    }


def sequence_record(seed: int, setting: str = "mini-clip/cifar100-20", elements: int = 1000) -> dict[str, Any]:
    tasks = int(setting.rpartition("-")[2])
    rest = elements - elements // 2
    counts = [rest // (tasks - 1)] * (tasks - 1)
    counts[0] += rest - sum(counts)
    return {
        "kind": "sequence",
        "setting": setting,
        "seed": seed,
        "tasks": tasks,
        "task_names": [f"task {t}" for t in range(1, tasks + 1)],
        "in_task": [0.9] * tasks,
        "lengths": [1.0] * tasks,
        "elements": elements,
        "magmax_counts": [*counts, elements // 2],
        "seconds": 12.0,
        "samples_per_second": 100.0,
        "config": {},
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
    }


def scale_record(seed: int, setting: str = "mini-clip/cifar100-20", best: float = 0.75) -> dict[str, Any]:
    grid = {"0.25": 0.6, "0.5": 0.7, "0.75": 0.71, "1": 0.65}
    grid[f"{best:g}"] = 0.72 + seed / 1000
    return {"kind": "scale", "setting": setting, "seed": seed, "method": "magmax", "grid": grid, "best": best}


def alpha_records(seed: int, setting: str = "mini-clip/cifar100-5", scale: float | str = 0.5) -> list[dict[str, Any]]:
    tasks, elements = int(setting.rpartition("-")[2]), 1_000_003
    head = {"kind": "alpha", "setting": setting, "seed": seed, "scale": scale}
    points = []
    for alpha in (0.0, 0.5, 0.75, 1.0, 1.5, 2.0):
        shares = [alpha ** (tasks - t) for t in range(1, tasks + 1)]
        budget = [int(elements * share / sum(shares)) for share in shares]
        points.append(
            {
                "alpha": alpha,
                "first": 0.4 + 0.15 * alpha + seed / 500,
                "last": 0.85 - 0.12 * alpha - seed / 500,
                "budget": budget,
            }
        )
    fixed = {"alpha": None, "first": 0.55 + seed / 500, "last": 0.75, "budget": None}
    return [{**head, "method": "tunable", "points": points}, {**head, "method": "magmax", "points": [fixed]}]


def meta_record(seed: int, row: str, setting: str = "mini-clip/cifar100-20") -> dict[str, Any]:
    gain = 0.01 if "label" in row else 0.0
    points = [
        {
            "size": size,
            "accuracy": 0.7 + gain + 0.05 * (1 - 1 / size) + seed / 1000,
            "environments": 25 if size < 50 else 10,
        }
        for size in (5, 10, 20, 50)
    ]
    return {"kind": "meta-size", "setting": setting, "seed": seed, "row": row, "points": points}


def whole_experiment(settings: Iterable[str] = ("mini-clip/cifar100-20",)) -> list[dict[str, Any]]:
    """Every kind of record, three seeds, in each setting."""
    records: list[dict[str, Any]] = []
    for setting in settings:
        for seed in (3, 4, 5):
            records.append(sequence_record(seed, setting))
            records.append(scale_record(seed, setting))
            records += [row_record(row, seed, setting) for row in ABOVE_MAGMAX]
            records.append(row_record("tunable:search@matched", seed, setting, variants=VARIANTS[:1]))
            records += alpha_records(seed, setting)
            records += [meta_record(seed, f"tunable:{name}@matched", setting) for name in ("auto", "label")]
    return records


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
