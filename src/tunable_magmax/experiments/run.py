"""`reproduce`: train, prefer, merge and evaluate what is missing, and write it down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunable_magmax.engines.choice import check_jobs
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.jobs import RECORDS, Job, missing_jobs
from tunable_magmax.experiments.records import Record, append_record, read_records
from tunable_magmax.experiments.seed import Progress, SeedWork, records_of
from tunable_magmax.training.trainer import Watch


def reproduce(
    experiment: Experiment,
    results: str | Path,
    work: str | Path,
    *,
    device: str | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> None:
    """Do the jobs of an experiment that are missing. Records go to `results`, checkpoints and profiles to `work`.

    Killed and called again, it goes on: training inside a task, everything else with the next record. With
    `engine="ray"`, seeds are done side by side on a cluster, whose nodes must see `work`; this process writes the
    records as they come.
    """
    check_jobs(engine, ray_address, device)
    results, work = Path(results), Path(work)
    results.mkdir(parents=True, exist_ok=True)
    file = results / RECORDS
    todo = missing_jobs(experiment, results)
    known = read_records(file) if file.exists() else []
    seeds = [_work_of(experiment, seed, todo, known, work.absolute(), device) for seed in experiment.seeds]
    seeds = [seed for seed in seeds if seed.jobs]
    if engine == "ray":
        from tunable_magmax.experiments.on_ray import records_on_ray

        found = records_on_ray(seeds, ray_address)
    else:
        found = (record for seed in seeds for record in records_of(seed, progress, watch))
    for done, record in enumerate(found, start=1):
        append_record(file, record)
        if progress is not None:
            progress("measuring", done, len(todo))


def _work_of(
    experiment: Experiment, seed: int, todo: Sequence[Job], known: Sequence[Record], work: Path, device: str | None
) -> SeedWork:
    jobs = tuple(job for job in todo if job.seed == seed)
    own = tuple(record for record in known if record["seed"] == seed)
    return SeedWork(experiment, seed, jobs, own, work / f"seed-{seed}", device)
