"""`tmx reproduce`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, table, tell, working
from tunable_magmax.errors import InputError, plural

if TYPE_CHECKING:
    from tunable_magmax.experiments.reproduce import ExperimentPlan


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of `tmx reproduce`."""

    out: Path = Path("results")
    """Write records, tables and figures into a folder here that is named after the setting."""
    work: Path = Path("work")
    """Keep checkpoints here; they can be removed when the records are complete."""
    changes: Sequence[str] = ()
    """Replace a value of the file, as seeds=[3]; repeatable. A path that is here counts from here."""
    device: str | None = None
    """Train and measure on this device. Default: the GPU if there is one."""
    dry_run: bool = False
    """Only say what would be done, and which data and weights are missing for it."""


def reproduce(config: Path, /, *, options: ReproduceOptions = parsed(ReproduceOptions)) -> int:
    """Run an experiment: train, tailor and measure what is missing; then write tables and figures.

    tmx reproduce glyphs/characters-5 -o glyphs-out
    tmx reproduce mini-clip/cifar100-20 --set run.model=DIR --set run.benchmark.data=DIR
    tmx reproduce paper/cifar100-20 --dry-run

    Started again, it goes on.

    Parameters
    ----------
    config
        A YAML, or the name of an experiment that comes with this package, such as glyphs/characters-5.
    """
    from tunable_magmax.experiments.config import read_experiment
    from tunable_magmax.experiments.reproduce import plan_experiment
    from tunable_magmax.experiments.reproduce import reproduce as run_experiment
    from tunable_magmax.experiments.results import load_results
    from tunable_magmax.experiments.tables import headlines

    experiment = read_experiment(config, options.changes)
    if options.out.is_file():
        raise InputError(f"{options.out} is a file: give a folder with -o")
    if options.dry_run:
        plan = plan_experiment(experiment, options.out, options.work)
        show_result(plan.to_dict(), _planned(plan, options.out))
        tell("".join(f"missing: {text}\n" for text in plan.missing))
        return 2 if plan.missing else 0
    with working() as progress:
        written = run_experiment(experiment, options.out, options.work, options.device, progress)
    folder = options.out / experiment.setting
    said = list(headlines(load_results(folder)))
    record = {"written": [str(path) for path in written], "headlines": said}
    show_result(record, [*said, f"report: {folder / 'report.md'}"])
    return 0


def _planned(plan: ExperimentPlan, out: Path) -> Iterator[str]:
    about, facts = plan.experiment, plan.to_dict()
    yield f"{about.name} ({about.setting}): {plural(len(plan.to_do), 'job')} to do"
    jobs = [[each["kind"], f"{each['jobs']:,}", f"{each['missing']:,}"] for each in facts["jobs"]]
    yield from table(jobs, ["kind", "jobs", "missing"])
    seeds = ", ".join(str(seed) for seed in about.seeds)
    yield f"it trains {facts['tasks']} tasks with each of the seeds {seeds}, measures {facts['rows']} rows in"
    yield f"{facts['environments']} environments, and writes {out / about.setting}/"
    yield from (f"note: {text}" for text in plan.notes)
