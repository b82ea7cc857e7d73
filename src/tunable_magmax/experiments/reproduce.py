"""Runs an experiment: does the jobs that are missing, and writes its tables and figures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.checkpoints.hub import hub_name
from tunable_magmax.data.benchmark import FILE
from tunable_magmax.errors import InputError, bulleted
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.records import RECORDS, SequenceRecord, append_records, read_records
from tunable_magmax.experiments.report import write_overview, write_setting
from tunable_magmax.experiments.results import load_results, write_summary
from tunable_magmax.experiments.seed_jobs import Job, jobs_to_do, plan_jobs, seed_records
from tunable_magmax.files import Progress
from tunable_magmax.runs.run import BASE
from tunable_magmax.training.config import GLYPHS, TrainConfig

PLACES = {"model", "benchmark.data", "benchmark.order.file", "head.file", "keep"}
"""Settings that may differ from those of the records: where files lie, and how many samples are kept."""


def reproduce(
    experiment: Experiment,
    out: Path,
    work: Path,
    device: str | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Does what is missing of an experiment, writes the reports, and returns the written files.

    Records go to `out`, in a folder that is named after the setting, checkpoints and profiles to `work`. Killed and
    called again, it continues: training with the next task, measuring with the next environment.
    """
    plan = plan_experiment(experiment, out, work)
    if plan.missing:
        raise InputError(f"{experiment.name} needs what is not there:\n{bulleted(plan.missing)}")
    file, done = out / experiment.setting / RECORDS, 0
    for seed in experiment.seeds:
        jobs = [job for job in plan.to_do if job.seed == seed]
        known = [record for record in (read_records(file) if file.exists() else []) if record.seed == seed]
        place = work.absolute() / experiment.setting / f"seed-{seed}"
        for records in seed_records(experiment, jobs, known, place, device, progress) if jobs else ():
            append_records(file, records)
            done += 1
            if progress is not None:
                progress("measuring", done, len(plan.to_do))
    results = load_results(out)
    written = write_setting(results, experiment.setting, out / experiment.setting, experiment.about)
    return [*written, *write_overview(results, out), write_summary(results, out)]


@dataclass(frozen=True)
class ExperimentPlan:
    """What running an experiment would do. `jobs`: all by kind, `to_do`: those without a record.

    `missing`: data and weights that are not there, each with the key that says where it is. `notes`: downloads.
    """

    experiment: Experiment
    jobs: Mapping[str, int]
    to_do: tuple[Job, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        left = Counter(job.kind for job in self.to_do)
        return {
            "setting": self.experiment.setting,
            "about": self.experiment.about,
            "seeds": list(self.experiment.seeds),
            "tasks": self.experiment.tasks,
            "environments": len(self.experiment.environments.names(self.experiment.tasks)),
            "rows": len(self.experiment.planned),
            "jobs": [{"kind": kind, "jobs": count, "missing": left[kind]} for kind, count in self.jobs.items()],
            "problems": list(self.missing),
            "notes": list(self.notes),
        }


def plan_experiment(experiment: Experiment, out: Path, work: Path) -> ExperimentPlan:
    """Lists the jobs of an experiment, and what they need that is not here.

    A seed whose run directory has a base needs no model, and a model with a hub's name may still be fetched.
    """
    jobs, to_do = plan_jobs(experiment), missing_jobs(experiment, out / experiment.setting)
    missing: list[str] = []
    for seed in sorted({job.seed for job in to_do}):
        is_begun = (work / experiment.setting / f"seed-{seed}" / BASE).exists()
        missing += _missing_places(experiment.training(seed), needs_model=not is_begun)
    left_out = len(dict.fromkeys(experiment.rows)) - len(experiment.planned)
    notes = (f"{left_out} rows are left out: logistic needs scikit-learn",) if left_out else ()
    kinds = Counter(job.kind for job in jobs)
    return ExperimentPlan(experiment, kinds, tuple(to_do), tuple(dict.fromkeys(missing)), notes)


def missing_jobs(experiment: Experiment, folder: Path) -> list[Job]:
    """Returns the jobs without a record in a folder. Records of another training are an `InputError`."""
    file = folder / RECORDS
    records = read_records(file) if file.exists() else []
    for record in records:
        if isinstance(record, SequenceRecord) and record.seed in experiment.seeds:
            differences = list(_differences(experiment.training(record.seed).record(), record.config))
            if differences:
                raise InputError(
                    f"{file}: the records of seed {record.seed} were made with other settings: "
                    f"{'; '.join(differences)}. Give another folder with -o, or the settings of the records"
                )
    return jobs_to_do(experiment, records)


def _differences(now: Mapping[str, Any], then: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Says which settings have unequal values, by their names with dots; what only one knows is left alone.

    >>> list(_differences({"train": {"lr": 1.0}, "model": "a"}, {"train": {"lr": 2.0}, "model": "b"}))
    ['train.lr is 1.0, there 2.0']
    """
    for key in sorted(now.keys() & then.keys()):
        name, mine, theirs = f"{above}{key}", now[key], then[key]
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(mine, theirs, f"{name}.")
        elif name not in PLACES and mine != theirs:
            yield f"{name} is {mine!r}, there {theirs!r}"


def _missing_places(config: TrainConfig, needs_model: bool) -> Iterator[str]:
    """Says which data and weights are not there, and the key that says where each is."""
    benchmark, order = config.benchmark, getattr(config.benchmark.order, "file", None)
    places = {
        "run.benchmark.data": (f"the data of {benchmark.name}", getattr(benchmark, "data", None)),
        "run.benchmark.order.file": (f"the order of classes ({FILE}; or --set order_from_seed=true)", order),
        "run.head.file": ("the head", config.head.file if needs_model else None),
    }
    if needs_model and config.model != GLYPHS and hub_name(config.model) is None:
        places["run.model"] = ("the model", config.model)
    for key, (what, path) in places.items():
        if path is not None and not Path(path).exists():
            yield f"{what}: {os.path.normpath(path)} does not exist; say where it is with --set {key}=PATH"
