"""`tmx reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.terminal import plain_warnings, show, table, tell, training_bars
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.experiments.reproduce import ExperimentPlan


def reproduce(
    config: Path,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("results"),
    work: Path = Path("work"),
    change: Annotated[list[str] | None, Parameter(name="--set")] = None,
    device: str | None = None,
    dry_run: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Run an experiment: train, tailor and measure what is missing; then write tables and figures.

    tmx reproduce glyphs/characters-5 -o glyphs-out
    tmx reproduce mini-clip/cifar100-20 --set run.model=DIR --set run.benchmark.data=DIR
    tmx reproduce paper/cifar100-20 --dry-run

    Started again, it goes on.

    Parameters
    ----------
    config
        A YAML, or the name of an experiment that comes with this package, such as glyphs/characters-5.
    out
        Records, tables and figures go into a folder of it, named after the setting.
    work
        Checkpoints go there; they can be removed when the records are complete.
    change
        KEY=VALUE instead of what the file says; may be repeated. Relative paths count from the current directory here,
        and from the file's own inside the file.
    device
        Default: the GPU if there is one.
    dry_run
        Only say what would be done, which data and weights are missing for it, and which model would be fetched.
    quiet
        No progress bars, no summary.
    as_json
        Print what was written as JSON on stdout.
    """
    from tunable_magmax.experiments.config import read_experiment
    from tunable_magmax.experiments.reproduce import plan_experiment
    from tunable_magmax.experiments.reproduce import reproduce as run_experiment
    from tunable_magmax.experiments.results import load_results
    from tunable_magmax.experiments.tables import headlines

    experiment = read_experiment(config, change or ())
    if dry_run:
        plan = plan_experiment(experiment, out, work)
        show(json.dumps(plan.to_dict(), indent=1) + "\n" if as_json else _planned(plan, out))
        tell("" if as_json else "".join(f"missing: {text}\n" for text in plan.missing))
        return 2 if plan.missing else 0
    with training_bars(quiet or as_json) as (progress, watch), plain_warnings():
        written = run_experiment(experiment, out, work, device, progress, watch)
    said = list(headlines(load_results(out / experiment.setting)))
    if as_json:
        show(json.dumps({"written": [str(path) for path in written], "headlines": said}, indent=1) + "\n")
    elif not quiet:
        show("".join(f"{line}\n" for line in (*said, f"report: {out / experiment.setting / 'report.md'}")))
    return 0


def _planned(plan: ExperimentPlan, out: Path) -> str:
    about, facts = plan.experiment, plan.to_dict()
    jobs = [[each["kind"], f"{each['jobs']:,}", f"{each['missing']:,}"] for each in facts["jobs"]]
    seeds = ", ".join(str(seed) for seed in about.seeds)
    lines = [
        f"{about.name} ({about.setting}): {plural(len(plan.to_do), 'job')} to do",
        *table([["kind", "jobs", "missing"], *jobs]),
        f"It trains with seeds {seeds}, measures {facts['rows']} rows in {facts['environments']} environments",
        f"and writes {out / about.setting}/.",
        *(f"note: {text}" for text in plan.notes),
    ]
    return "\n".join([*lines, ""])
