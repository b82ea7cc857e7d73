"""`reproduce_all`: an experiment from its configuration to its tables, figures and page."""

from __future__ import annotations

from pathlib import Path

from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.jobs import missing_jobs
from tunable_magmax.experiments.report import render
from tunable_magmax.experiments.results import load_results
from tunable_magmax.experiments.run import reproduce
from tunable_magmax.experiments.seed import Progress
from tunable_magmax.experiments.summary import write_summary
from tunable_magmax.experiments.supplies import Supplies, look_for_supplies, refuse_missing
from tunable_magmax.experiments.words import headlines
from tunable_magmax.training.trainer import Watch


def reproduce_all(
    experiment: Experiment,
    out: str | Path,
    work: str | Path,
    *,
    device: str | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> list[Path]:
    """Do what is missing of an experiment, or of its parts, and show what the records say; what was written.

    Parts keep their records in their own folders, so that nothing is measured twice.
    """
    out, work = Path(out), Path(work)
    parts = experiment.parts or (experiment,)
    if engine == "local":  # nodes of a cluster may see what this one does not
        refuse_missing(experiment.name, lacking(experiment, out, work).missing)
    for part in parts:
        reproduce(
            part,
            results_folder(part, out),
            work / part.setting,
            device=device,
            engine=engine,
            ray_address=ray_address,
            progress=progress,
            watch=watch,
        )
    place = results_folder(experiment, out)
    written = render(
        [results_folder(part, out) for part in parts],
        place,
        title=place.relative_to(out).as_posix(),
        about=experiment.about,
        kinds=parts[0].kinds,
        rows=parts[0].only,
    )
    return [*written, write_summary(out)]


def lacking(experiment: Experiment, out: Path, work: Path) -> Supplies:
    """Data and weights that the missing jobs of an experiment need and that are not here."""
    found = Supplies()
    for part in experiment.parts or (experiment,):
        seeds = sorted({job.seed for job in missing_jobs(part, results_folder(part, out))})
        found += look_for_supplies(part, seeds, work / part.setting)
    return found


def headlines_of(experiment: Experiment, out: Path) -> list[str]:
    """What the records of an experiment say, a line for each setting."""
    parts = experiment.parts or (experiment,)
    return headlines(load_results([results_folder(part, out) for part in parts], parts[0].kinds, parts[0].only))


def results_folder(experiment: Experiment, out: Path) -> Path:
    """Where an experiment's results lie: by its setting, and its name where environments are not the paper's.

    What shows other experiments together lies beside them.
    """
    if experiment.parts:
        return out / Path(experiment.parts[0].setting).parent / experiment.name
    kind = "" if experiment.environments.mixtures == PAPER else f"-{experiment.name}"
    return out / f"{experiment.setting}{kind}"
