"""The jobs of an experiment: what is to be measured, which of it is missing, and the work of one seed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.data.splits import shuffled
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import Environment, draw_environments
from tunable_magmax.experiments.records import RECORDS, Record, read_records, record_key
from tunable_magmax.experiments.rows import DEFAULTS, MERGED, Row
from tunable_magmax.experiments.workbench import Count, Workbench, preference_for
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.uncertainty import half_l1
from tunable_magmax.training.sequence import train_sequence
from tunable_magmax.training.tracking import training_seconds
from tunable_magmax.training.trainer import Watch

META_ROWS = ("label", "auto", "ot")


@dataclass(frozen=True)
class Job:
    """One thing to measure for one seed. Kind, seed and name are the key of the record that it leaves."""

    kind: str
    seed: int
    name: str
    row: Row | None = None


def plan_jobs(experiment: Experiment) -> list[Job]:
    """Returns all jobs of an experiment, seed by seed, in the order in which they are done.

    Rows at their best scale bring the search for it along, also if `kinds` does not name it.
    """
    if experiment.parts:
        return [job for part in experiment.parts for job in plan_jobs(part)]
    jobs: list[Job] = []
    for seed in experiment.seeds:
        jobs.append(Job("sequence", seed, "sequence"))
        if "best" in experiment.scales:
            jobs += [Job("scale", seed, name) for name in experiment.baselines if name in MERGED]
        jobs += [Job("row", seed, row.name, row) for row in experiment.rows]
        if experiment.alphas:
            jobs += [
                Job("alpha", seed, f"{method}@{scale}")
                for method in ("magmax", "tunable")
                for scale in experiment.scales
                if scale != "best"
            ]
        if experiment.meta_sizes:
            sources = [name for name in META_ROWS if name in experiment.preferences]
            jobs += [Job("meta-size", seed, f"tunable:{name}@matched") for name in sources]
    kinds = set(experiment.kinds)
    scaled = {row.base for row in experiment.rows if row.scale == "best"} if "row" in kinds else set()
    return [job for job in jobs if job.kind in kinds or (job.kind == "scale" and job.name in scaled)]


def missing_jobs(experiment: Experiment, results: Path) -> list[Job]:
    """Returns the jobs whose records are not there yet. Records of other settings are an `InputError`."""
    file = results / RECORDS
    records = read_records(file) if file.exists() else []
    refuse_other_settings(experiment, records, file)
    known = {record_key(record) for record in records}
    return [job for job in plan_jobs(experiment) if (experiment.setting, job.kind, job.seed, job.name) not in known]


PLACES = {"model", "benchmark.data", "head.file", "train.log_every"}
"""Settings that may differ from those of the records: where files lie, and how often training reports."""


def refuse_other_settings(experiment: Experiment, records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Raises an `InputError` if records of this experiment's seeds come from another training."""
    for record in records:
        seed = record["seed"]
        if record["kind"] != "sequence" or record["setting"] != experiment.setting or seed not in experiment.seeds:
            continue
        now = json.loads(json.dumps(experiment.training(seed).record()))  # lists for tuples, as in the file
        differences = [
            f"{name} is {mine!r}, there {theirs!r}" for name, mine, theirs in _differences(now, record["config"])
        ]
        if differences:
            raise InputError(
                f"{file}: the records of seed {seed} were made with other settings: {'; '.join(differences)}. "
                "Give another folder with -o, or the settings of the records"
            )


def _differences(now: Mapping[str, Any], then: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields settings with unequal values, by their names with dots.

    >>> list(_differences({"train": {"lr": 1.0}, "model": "a"}, {"train": {"lr": 2.0}, "model": "b"}))
    [('train.lr', 1.0, 2.0)]
    """
    for key in sorted({*now, *then}):
        mine, theirs = now.get(key), then.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(mine, theirs, f"{above}{key}.")
        elif f"{above}{key}" not in PLACES and mine != theirs:
            yield f"{above}{key}", mine, theirs


# -- the work of one seed ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedWork:
    """The missing jobs of one seed, and the records that it has."""

    experiment: Experiment
    seed: int
    jobs: tuple[Job, ...]
    known: tuple[Record, ...]
    place: Path
    device: str | None

    def without(self, records: Sequence[Record]) -> SeedWork:
        """Returns what is left to do when these records have been made."""
        made = {record_key(record) for record in records}
        left = [job for job in self.jobs if (self.experiment.setting, job.kind, job.seed, job.name) not in made]
        return replace(self, jobs=tuple(left), known=(*self.known, *records))


def records_of(work: SeedWork, progress: Progress | None = None, watch: Watch | None = None) -> Iterator[Record]:
    """Trains what is not trained yet, and yields the records of the missing jobs, one after the other."""
    config = work.experiment.training(work.seed)
    train_sequence(config, work.place, device=work.device, progress=progress, watch=watch)
    benchmark = open_benchmark(config.benchmark)
    environments = draw_environments(benchmark, work.experiment.environments)
    with Workbench(work.place, benchmark, environments, seed=config.seed, device=work.device) as bench:
        runner = _Seed(work, bench)
        for job in work.jobs:
            yield runner.do(job)


class _Seed:
    """Does the jobs of one seed."""

    def __init__(self, work: SeedWork, bench: Workbench) -> None:
        self._experiment, self._seed, self._bench = work.experiment, work.seed, bench
        self._training_seconds = training_seconds(work.place)
        self._records = {record_key(record): record for record in work.known}
        self._preferences: dict[tuple[str, str], Preference] = {}

    def do(self, job: Job) -> Record:
        """Measures, and returns the record."""
        self._bench.seconds.clear()
        make = {
            "sequence": self._sequence,
            "scale": self._scale,
            "row": self._row,
            "alpha": self._alpha,
            "meta-size": self._meta_size,
        }[job.kind]
        record = {"kind": job.kind, "setting": self._experiment.setting, "seed": self._seed, **make(job)}
        self._records[record_key(record)] = record
        return record

    def _sequence(self, job: Job) -> dict[str, Any]:
        import torch

        import tunable_magmax

        bench, config = self._bench, self._experiment.training(self._seed)
        _, report = bench.merge(method="magmax", scale=1)
        samples = sum(len(task.train) for task in bench.benchmark.tasks) * config.train.epochs
        return {
            "tasks": len(bench.states),
            "task_names": [task.name for task in bench.benchmark.tasks],
            "in_task": bench.in_task(),
            "lengths": bench.lengths(),
            "elements": report.elements,
            "magmax_counts": list(report.counts or ()),
            "seconds": round(self._training_seconds, 2),
            "samples_per_second": round(samples / self._training_seconds, 1) if self._training_seconds else None,
            "config": _portable(config.record(), self._experiment.root),
            "environments": [_described(environment) for environment in bench.environments],
            "versions": {
                "tunable_magmax": tunable_magmax.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "device": torch.cuda.get_device_name() if bench.encoder.device.type == "cuda" else "cpu",
        }

    def _scale(self, job: Job) -> dict[str, Any]:
        grid = {}
        for scale in self._experiment.grid:
            state, _ = self._bench.merge(method=MERGED[job.name], scale=scale)
            grid[f"{scale:g}"] = self._bench.held_accuracy(state)
        best = max(grid, key=lambda text: grid[text])
        return {"method": job.name, "grid": grid, "best": float(best)}

    def _row(self, job: Job) -> dict[str, Any]:
        row = job.row
        assert row is not None
        if not row.tailored:
            environments = self._for_all(row)
        elif row.base == "single-best":
            environments = [self._single(environment) for environment in self._bench.environments]
        else:
            searched = self._experiment.search.variants if row.preference == "search" else None
            environments = [
                self._one(row, environment)
                for environment in self._bench.environments
                if searched is None or environment.variant in searched
            ]
        return {
            "row": row.name,
            "method": row.method or row.base,
            "preference": row.preference,
            "scale": row.scale,
            "options": {**DEFAULTS, **row.options} if row.method == "tunable_magmax" else {},
            "seconds": {kind: round(value, 4) for kind, value in sorted(self._bench.seconds.items())},
            "environments": environments,
        }

    def _for_all(self, row: Row) -> list[dict[str, Any]]:
        """Measures one model in all environments."""
        bench = self._bench
        if row.base == "zero-shot":
            state, report = bench.base, None
        else:
            state, report = bench.merge(method=row.method, scale=self._lambda(row))
        counts = bench.count(state, bench.environments)
        return [
            _measured(environment, count, report) for environment, count in zip(bench.environments, counts, strict=True)
        ]

    def _single(self, environment: Environment) -> dict[str, Any]:
        """Measures the one task vector that does best on the labelled meta samples; of equal ones the last."""
        scores = self._bench.task_correct(environment.meta)
        best = int(np.flatnonzero(scores == scores.max())[-1])
        count = self._bench.count(self._bench.states[best], [environment])[0]
        return _measured(environment, count, None) | {"chosen": f"task {best + 1}"}

    def _one(self, row: Row, environment: Environment) -> dict[str, Any]:
        assert row.preference is not None
        bench = self._bench
        # One preference serves all scales.
        key = (row.preference, environment.name)
        if key not in self._preferences:
            trials = self._experiment.search.trials
            self._preferences[key] = preference_for(bench, row.preference, environment, trials=trials)
        preference = self._preferences[key]
        state, report = bench.merge(weights=preference.weights, scale=row.scale, **row.options)
        count = bench.count(state, [environment])[0]
        return _measured(environment, count, report) | _preferred(preference, bench.truth(environment))

    def _lambda(self, row: Row) -> float | str:
        """Returns the scale of a row; `best` is what was chosen on held-out training data."""
        if row.scale != "best":
            assert row.scale is not None
            return row.scale
        return float(self._records[self._experiment.setting, "scale", self._seed, row.base]["best"])

    def _alpha(self, job: Job) -> dict[str, Any]:
        method, _, text = job.name.partition("@")
        scale: float | str = text if text == "matched" else float(text)
        tasks = len(self._bench.states)
        points = []
        for alpha in [None] if method == "magmax" else self._experiment.alphas:
            options: Mapping[str, Any] = {"method": "magmax"}
            if alpha is not None:
                options = {"weights": Preference.from_alpha(alpha, tasks).weights}
            state, report = self._bench.merge(scale=scale, **options)
            accuracies = self._bench.task_accuracies(state)
            budget = None if report.budget is None else list(report.budget)
            points.append({"alpha": alpha, "first": accuracies[0], "last": accuracies[-1], "budget": budget})
        return {"method": method, "scale": scale, "points": points}

    def _meta_size(self, job: Job) -> dict[str, Any]:
        """Measures with fewer meta samples: the first ones of a seeded order, the same for all sources."""
        source = job.name.partition(":")[2].partition("@")[0]
        bench, points = self._bench, []
        for size in self._experiment.meta_sizes:
            shares = []
            for environment in bench.environments:
                if len(environment.meta) < size:
                    continue
                order = shuffled(len(environment.meta), derived_seed(environment.variant, environment.mixture, "meta"))
                meta = sorted(environment.meta[k] for k in order[:size])
                preference = preference_for(bench, source, environment, meta)
                state, _ = bench.merge(weights=preference.weights)
                count = bench.count(state, [environment])[0]
                shares.append(count.right / count.samples)
            if shares:
                points.append({"size": size, "accuracy": float(np.mean(shares)), "environments": len(shares)})
        return {"row": job.name, "points": points}


def _portable(value: Any, root: Path) -> Any:
    """Removes places of this machine from a record: absolute paths become relative to the experiment's file."""
    if isinstance(value, Mapping):
        return {key: _portable(part, root) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(part, root) for part in value]
    return os.path.relpath(value, root) if isinstance(value, str) and Path(value).is_absolute() else value


def _described(environment: Environment) -> dict[str, Any]:
    return {
        "name": environment.name,
        "tasks": [t + 1 for t in environment.tasks],
        "ratio": list(environment.ratio),
        "meta": len(environment.meta),
        "rest": len(environment.rest),
        "short": list(environment.short),
    }


def _measured(environment: Environment, count: Count, report: MergeReport | None) -> dict[str, Any]:
    leftovers = None
    if report is not None and report.leftovers is not None and report.elements:
        leftovers = report.leftovers / report.elements
    return {
        "name": environment.name,
        "mixture": environment.mixture,
        "variant": environment.variant,
        "right": count.right,
        "samples": count.samples,
        "known_right": count.known_right,
        "lambda": None if report is None else report.scale,
        "leftovers": leftovers,
        "error": None,
        "weights": None,
        "chosen": None,
    }


def _preferred(preference: Preference, truth: Any) -> dict[str, Any]:
    auto = preference.provenance.get("auto")
    chosen = auto if isinstance(auto, dict) else {}
    return {
        "error": float(half_l1(np.array(preference.weights), truth)),
        "weights": {str(t): round(weight, 6) for t, weight in enumerate(preference.weights, 1) if weight > 0},
        "chosen": chosen.get("chosen"),
        "expected_error": chosen.get("expected_error"),
    }
