"""`reproduce_all`: an experiment from its configuration to its tables, figures and page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.data.orders import FILE
from tunable_magmax.engines.settings import check_jobs
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.findings import headlines
from tunable_magmax.experiments.jobs import RECORDS, Job, missing_jobs
from tunable_magmax.experiments.records import Record, append_record, read_records
from tunable_magmax.experiments.report import render
from tunable_magmax.experiments.results import load_results, write_summary
from tunable_magmax.experiments.seed import SeedWork, records_of
from tunable_magmax.files import Progress
from tunable_magmax.runs.run import Run
from tunable_magmax.training.config import GLYPHS, TrainConfig
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


@dataclass(frozen=True)
class Supplies:
    """`missing`: what is not there, each thing once, with the key that says where it is; `notes`: what is fetched."""

    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Supplies) -> Supplies:
        return Supplies(
            tuple(dict.fromkeys((*self.missing, *other.missing))), tuple(dict.fromkeys((*self.notes, *other.notes)))
        )


def look_for_supplies(experiment: Experiment, seeds: Sequence[int], work: Path) -> Supplies:
    """What some seeds of an experiment need that is not here.

    Only places are looked at. A seed whose run directory holds base and head needs neither model nor head's file, and a
    model with a hub's name may still be fetched.
    """
    found = Supplies()
    for seed in seeds:
        config = experiment.training(seed)
        found += Supplies(tuple(_data(config)))
        if not Run.has_begun(work / f"seed-{seed}"):
            found += Supplies(tuple(_weights(config)), tuple(_fetched(config)))
    return found


def refuse_missing(name: str, missing: Sequence[str]) -> None:
    """Say everything that is missing, before anything is made."""
    if missing:
        listed = "\n".join(f"  - {text}" for text in missing)
        raise InputError(f"{name} needs what is not there:\n{listed}")


def _data(config: TrainConfig) -> Iterator[str]:
    benchmark = config.benchmark
    for path, what, key in (
        (benchmark.data, f"the data of {benchmark.name}", "data"),
        (benchmark.class_names, "the class names", "class_names"),
    ):
        if path is not None and not path.exists():
            yield _absent(what, path, f"run.benchmark.{key}")
    orders = benchmark.order.file
    if orders is not None and not orders.exists():
        yield (
            f"{_absent('the order of classes', orders, 'run.benchmark.order.file')} ({FILE}: docs/training.md), or "
            "order the classes by the seed with --set order_from_seed=true"
        )


def _weights(config: TrainConfig) -> Iterator[str]:
    from tunable_magmax.models.hub import is_hub_name

    place = config.root / Path(config.model).expanduser()
    if config.model == GLYPHS:
        pass  # it is built in
    elif place.exists():
        try:
            open_checkpoint(place).close()
        except InputError as error:
            yield f"the model: {error}; give another one with --set run.model=PATH"
    elif not is_hub_name(config.model):
        yield _absent("the model", place, "run.model")
    if config.head.file is not None and not Path(config.head.file).exists():
        yield _absent("the head", Path(config.head.file), "run.head.file")


def _fetched(config: TrainConfig) -> Iterator[str]:
    from tunable_magmax.models.hub import fetch_note

    note = None if config.model == GLYPHS else fetch_note(config.model, config.root)
    if note is not None:
        yield f"{note}; give another one with --set run.model=PATH"


def _absent(what: str, path: Path, key: str) -> str:
    return f"{what}: {os.path.normpath(path)} does not exist; say where it is with --set {key}=PATH"
