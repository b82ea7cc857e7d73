"""Runs an experiment: does the jobs that are missing, and writes its tables, figures and page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.data.orders import FILE, FileOrder
from tunable_magmax.engines.ray_session import ray_session
from tunable_magmax.engines.settings import check_jobs
from tunable_magmax.errors import ClusterError, InputError, bulleted
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import PAPER
from tunable_magmax.experiments.findings import headlines
from tunable_magmax.experiments.jobs import missing_jobs
from tunable_magmax.experiments.records import RECORDS, Record, append_record, read_records
from tunable_magmax.experiments.report import render
from tunable_magmax.experiments.results import load_results, write_summary
from tunable_magmax.experiments.seed_work import SeedWork, records_of
from tunable_magmax.files import Progress
from tunable_magmax.models.pretrained import fetch_note, is_hub_name
from tunable_magmax.runs.run import BASE
from tunable_magmax.training.config import GLYPHS, TrainConfig
from tunable_magmax.training.loop import Watch


@dataclass(frozen=True)
class JobOptions:
    """How the jobs of an experiment are done. `ray_address`: of a running cluster, else one is started here."""

    device: str | None = None
    engine: str = "local"
    ray_address: str | None = None
    progress: Progress | None = None
    watch: Watch | None = None


def reproduce(experiment: Experiment, results: Path, work: Path, options: JobOptions) -> None:
    """Does the jobs of an experiment that are missing. Records go to `results`, checkpoints and profiles to `work`.

    Killed and called again, it continues: training inside a task, everything else with the next record. With the
    engine "ray", seeds are done side by side on a cluster, whose nodes must see `work`; this process writes the
    records as they come.
    """
    check_jobs(options.engine, options.ray_address, options.device)
    results.mkdir(parents=True, exist_ok=True)
    file = results / RECORDS
    todo = missing_jobs(experiment, results)
    known = read_records(file) if file.exists() else []
    seeds = []
    for seed in experiment.seeds:
        jobs = tuple(job for job in todo if job.seed == seed)
        own = tuple(record for record in known if record["seed"] == seed)
        if jobs:
            seeds.append(SeedWork(experiment, seed, jobs, own, work.absolute() / f"seed-{seed}", options.device))
    if options.engine == "ray":
        records = _records_on_ray(seeds, options.ray_address)
    else:
        records = (record for seed in seeds for record in records_of(seed, options.progress, options.watch))
    for done, record in enumerate(records, start=1):
        append_record(file, record)
        if options.progress is not None:
            options.progress("measuring", done, len(todo))


def reproduce_all(experiment: Experiment, out: Path, work: Path, options: JobOptions) -> list[Path]:
    """Does what is missing of an experiment, or of its parts, writes the report, and returns the written files.

    Parts keep their records in their own folders, so that nothing is measured twice.
    """
    parts = experiment.parts or (experiment,)
    if options.engine == "local":  # nodes of a cluster may see what this one does not
        missing = look_for_supplies(experiment, out, work).missing
        if missing:
            raise InputError(f"{experiment.name} needs what is not there:\n{bulleted(missing)}")
    for part in parts:
        reproduce(part, results_folder(part, out), work / part.setting, options)
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
    kind = "" if PAPER.items() <= experiment.environments.mixtures.items() else f"-{experiment.name}"
    return out / f"{experiment.setting}{kind}"


# -- on a Ray cluster -------------------------------------------------------------------------------------------------

RETRIES = 3
"""How many times a seed whose machine died is started again; its training continues where it was."""


def _records_on_ray(seeds: Sequence[SeedWork], address: str | None) -> Iterator[Record]:
    """Yields the records of all seeds in the order in which they are made, by jobs with a GPU each.

    Jobs have no GPU if no node has one, or if the device is "cpu".
    """
    if not seeds:
        return
    with ray_session(address) as ray:
        resources, threads = _resources(ray, seeds[0].device)
        job = ray.remote(num_returns="streaming", max_retries=0, **resources)(_job)
        streams = {job.remote(seed, threads): (seed, 0) for seed in seeds}
        made: dict[int, list[Record]] = {seed.seed: [] for seed in seeds}
        try:
            while streams:
                [stream], _ = ray.wait(list(streams), num_returns=1, fetch_local=False)
                seed, deaths = streams[stream]
                try:
                    record = ray.get(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                except ray.exceptions.RayError as error:
                    del streams[stream]
                    if deaths == RETRIES:
                        raise ClusterError(
                            f"seed {seed.seed} died {deaths + 1} times ({str(error).splitlines()[0][:200]}). Records "
                            "and training so far are kept: see the nodes' memory, and run the same command again"
                        ) from None
                    streams[job.remote(seed.without(made[seed.seed]), threads)] = (seed, deaths + 1)
                    continue
                made[seed.seed].append(record)
                yield record
        finally:
            for stream in streams:
                with suppress(Exception):
                    ray.cancel(stream, force=True)


def _resources(ray: Any, device: str | None) -> tuple[dict[str, float], int]:
    """Returns what a job reserves (a GPU, or a CPU for each thread) and its threads, as here for the same last bits."""
    threads = torch.get_num_threads()
    if device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1:
        return {"num_gpus": 1, "num_cpus": 1}, threads
    largest = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if largest < 1:
        raise ClusterError("the Ray cluster has no CPUs for jobs: add nodes with `ray start --address=...`")
    return {"num_cpus": min(threads, int(largest))}, threads


def _job(seed: SeedWork, threads: int) -> Iterator[Record]:
    torch.set_num_threads(threads)
    yield from records_of(seed)


# -- what must be there ------------------------------------------------------------------------------------------------


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
            if not (work / part.setting / f"seed-{seed}" / BASE).exists():
                missing += _missing_weights(config)
                note = None if config.model == GLYPHS else fetch_note(config.model, config.root)
                notes += [f"{note}; give another one with --set run.model=PATH"] if note else []
    return Supplies(tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(notes)))


def _missing_data(config: TrainConfig) -> Iterator[str]:
    benchmark = config.benchmark
    data = getattr(benchmark, "data", None)
    if data is not None and not Path(data).exists():
        yield _absent(f"the data of {benchmark.name}", Path(data), "run.benchmark.data")
    orders = Path(benchmark.order.file) if isinstance(benchmark.order, FileOrder) else None
    if orders is not None and not orders.exists():
        yield (
            f"{_absent('the order of classes', orders, 'run.benchmark.order.file')} ({FILE}: docs/training.md), or "
            "order the classes by the seed with --set order_from_seed=true"
        )


def _missing_weights(config: TrainConfig) -> Iterator[str]:
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


def _absent(what: str, path: Path, key: str) -> str:
    return f"{what}: {os.path.normpath(path)} does not exist; say where it is with --set {key}=PATH"
