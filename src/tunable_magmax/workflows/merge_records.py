"""What a merge left beside its weights: its report, and its log, which says where its inputs were."""

from __future__ import annotations

from pathlib import Path

from tunable_magmax.checkpoints.hub import located
from tunable_magmax.engines.log import log_entries, report_place
from tunable_magmax.errors import InputError
from tunable_magmax.files import read_whole
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.runs.recipe import Recipe


def read_report(path: str | Path) -> MergeReport:
    """Reads the report of a merged checkpoint; a missing or broken one is an `InputError`."""
    path = Path(path)
    place = report_place(path)
    if not path.exists() and not place.exists():
        raise InputError(f"{path} does not exist: give a merged checkpoint, a directory or a .safetensors file")
    try:
        text = read_whole(place).decode()
    except FileNotFoundError:
        raise InputError(f"{path} has no merge report: {place} does not exist, so this is not a merge of tmx") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{place} cannot be read: {error}") from None
    try:
        return MergeReport.from_json(text)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


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
