"""Runs an experiment: does the jobs that are missing, and writes its tables, figures and page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.data.orders import FILE
from tunable_magmax.engines.settings import check_jobs
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.findings import headlines
from tunable_magmax.experiments.jobs import missing_jobs
from tunable_magmax.experiments.records import RECORDS, append_record, read_records
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
    """Does the jobs of an experiment that are missing. Records go to `results`, checkpoints and profiles to `work`.

    Killed and called again, it continues: training inside a task, everything else with the next record. With
    `engine="ray"`, seeds are done side by side on a cluster, whose nodes must see `work`; this process writes the
    records as they come.
    """
    check_jobs(engine, ray_address, device)
    results, work = Path(results), Path(work)
    results.mkdir(parents=True, exist_ok=True)
    file = results / RECORDS
    todo = missing_jobs(experiment, results)
    known = read_records(file) if file.exists() else []
    seeds = []
    for seed in experiment.seeds:
        jobs = tuple(job for job in todo if job.seed == seed)
        own = tuple(record for record in known if record["seed"] == seed)
        if jobs:
            seeds.append(SeedWork(experiment, seed, jobs, own, work.absolute() / f"seed-{seed}", device))
    if engine == "ray":
        from tunable_magmax.experiments.on_ray import records_on_ray

        records = records_on_ray(seeds, ray_address)
    else:
        records = (record for seed in seeds for record in records_of(seed, progress, watch))
    for done, record in enumerate(records, start=1):
        append_record(file, record)
        if progress is not None:
            progress("measuring", done, len(todo))


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
    """Does what is missing of an experiment, or of its parts, writes the report, and returns the written files.

    Parts keep their records in their own folders, so that nothing is measured twice.
    """
    out, work = Path(out), Path(work)
    parts = experiment.parts or (experiment,)
    if engine == "local":  # nodes of a cluster may see what this one does not
        missing = look_for_supplies(experiment, out, work).missing
        if missing:
            listed = "\n".join(f"  - {text}" for text in missing)
            raise InputError(f"{experiment.name} needs what is not there:\n{listed}")
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


def headlines_of(experiment: Experiment, out: Path) -> list[str]:
    """Says what the records of an experiment show, in a line for each setting."""
    parts = experiment.parts or (experiment,)
    return headlines(load_results([results_folder(part, out) for part in parts], parts[0].kinds, parts[0].only))


def results_folder(experiment: Experiment, out: Path) -> Path:
    """Returns an experiment's folder: named by its setting, and its name where environments are not the paper's.

    An experiment of parts lies beside them.
    """
    if experiment.parts:
        return out / Path(experiment.parts[0].setting).parent / experiment.name
    kind = "" if experiment.environments.mixtures == PAPER else f"-{experiment.name}"
    return out / f"{experiment.setting}{kind}"


@dataclass(frozen=True)
class Supplies:
    """`missing`: data and weights that are not there, each with the key that says where it is; `notes`: downloads."""

    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def look_for_supplies(experiment: Experiment, out: Path, work: Path) -> Supplies:
    """Lists what the missing jobs of an experiment need that is not here; nothing is opened but checkpoints' headers.

    A seed whose run directory holds base and head needs neither model nor head's file, and a model with a hub's name
    may still be fetched.
    """
    missing: list[str] = []
    notes: list[str] = []
    for part in experiment.parts or (experiment,):
        for seed in sorted({job.seed for job in missing_jobs(part, results_folder(part, out))}):
            config = part.training(seed)
            missing += _missing_data(config)
            if not Run.has_begun(work / part.setting / f"seed-{seed}"):
                missing += _missing_weights(config)
                notes += _downloads(config)
    return Supplies(tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(notes)))


def _missing_data(config: TrainConfig) -> Iterator[str]:
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


def _missing_weights(config: TrainConfig) -> Iterator[str]:
    from tunable_magmax.models.pretrained import is_hub_name

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


def _downloads(config: TrainConfig) -> Iterator[str]:
    from tunable_magmax.models.pretrained import fetch_note

    note = None if config.model == GLYPHS else fetch_note(config.model, config.root)
    if note is not None:
        yield f"{note}; give another one with --set run.model=PATH"


def _absent(what: str, path: Path, key: str) -> str:
    return f"{what}: {os.path.normpath(path)} does not exist; say where it is with --set {key}=PATH"
