"""Where the inputs of a merge were, as its log says, or its report."""

from __future__ import annotations

from pathlib import Path

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.engines.log import log_entries, read_report
from tunable_magmax.runs.recipe import Recipe


def logged_inputs(path: str | Path) -> Recipe | None:
    """Returns a merge's base and tasks: by its log, if all still exist, or by its report, if all are on the hub."""
    path = located(path)
    report = read_report(path)
    for entry in log_entries(path):
        try:
            made = entry["files"].items() <= dict(report.files).items()
            inputs = Recipe(Path(entry["base"]), tuple(map(Path, entry["tasks"])), names=report.names)
        except (KeyError, TypeError, AttributeError):
            continue
        there = all(place.exists() for place in (inputs.base, *inputs.tasks))
        if made and there and len(inputs.tasks) == report.tasks:
            return inputs
    if len(report.hub) <= report.tasks:
        return None
    base, *tasks = (Path(report.hub[role]) for role in ("base", *(f"task {t}" for t in range(1, report.tasks + 1))))
    return Recipe(base, tuple(tasks))
