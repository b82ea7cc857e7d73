"""One small JSON of all experiments: the mean accuracy of every row in every setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunable_magmax.experiments.intervals import averaged
from tunable_magmax.experiments.results import Results, load_results
from tunable_magmax.experiments.tables import grouped
from tunable_magmax.files import write_atomic

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
