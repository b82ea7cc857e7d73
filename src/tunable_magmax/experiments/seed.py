"""Does the jobs of one seed of an experiment: trains its sequence, and makes a record of each job."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import Environment, draw_environments
from tunable_magmax.experiments.jobs import Job
from tunable_magmax.experiments.records import Record, record_key
from tunable_magmax.experiments.rows import DEFAULTS, MERGED, Row
from tunable_magmax.experiments.workbench import Count, Workbench, preference_for
from tunable_magmax.files import Progress
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.uncertainty import half_l1
from tunable_magmax.training.sequence import train_sequence
from tunable_magmax.training.tracking import training_seconds
from tunable_magmax.training.trainer import Watch


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
        runner = _Seed(work.experiment, work.seed, bench, work.known, training_seconds(work.place))
        for job in work.jobs:
            yield runner.do(job)


class _Seed:
    """Does the jobs of one seed."""

    def __init__(
        self, experiment: Experiment, seed: int, bench: Workbench, known: Sequence[Record], seconds: float
    ) -> None:
        self._experiment, self._seed, self._bench = experiment, seed, bench
        self._training_seconds = seconds
        self._records = {record_key(record): record for record in known}
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
            environments = [self._one(row, environment) for environment in self._searchable(row)]
        return {
            "row": row.name,
            "method": row.method or row.base,
            "preference": row.preference,
            "scale": row.scale,
            "options": {**DEFAULTS, **row.options} if row.method == "tunable_magmax" else {},
            "seconds": {kind: round(value, 4) for kind, value in sorted(self._bench.seconds.items())},
            "environments": environments,
        }

    def _searchable(self, row: Row) -> Sequence[Environment]:
        everywhere = self._bench.environments
        if row.preference != "search":
            return everywhere
        return [each for each in everywhere if each.variant in self._experiment.search.variants]

    def _for_all(self, row: Row) -> list[dict[str, Any]]:
        """Measures one model in all environments."""
        bench = self._bench
        report: MergeReport | None = None
        if row.base == "zero-shot":
            state = bench.base
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
        from tunable_magmax.data.splits import shuffled
        from tunable_magmax.lottery import derived_seed

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
