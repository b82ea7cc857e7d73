"""The jobs of one seed: trains its sequence, and makes a record of everything that is to be measured."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.evaluation.choosing import title_of
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import Environment, draw_environments
from tunable_magmax.experiments.records import (
    AlphaPoint,
    AlphaRecord,
    EnvironmentScore,
    Record,
    RowRecord,
    SamplesPoint,
    SamplesRecord,
    ScaleRecord,
    SequenceRecord,
)
from tunable_magmax.experiments.rows import METHODS, Row
from tunable_magmax.experiments.sequence_bench import SequenceBench
from tunable_magmax.files import Progress
from tunable_magmax.models.head import Linear
from tunable_magmax.preference.preference import Preference
from tunable_magmax.training.config import TrainConfig, task_steps
from tunable_magmax.training.loop import Watch
from tunable_magmax.training.sequence import train_sequence


@dataclass(frozen=True)
class Job:
    """One thing to measure for one seed. Kind, seed and name are in the key of the record that it leaves."""

    kind: str
    seed: int
    name: str
    row: Row | None = None


def plan_jobs(experiment: Experiment) -> list[Job]:
    """Returns all jobs of an experiment, seed by seed, in the order in which they are done."""
    rows, jobs = experiment.planned, []
    for seed in experiment.seeds:
        jobs.append(Job("sequence", seed, "sequence"))
        jobs += [Job("scale", seed, name) for name in dict.fromkeys(row.base for row in rows if row.scale == "best")]
        jobs += [Job("row", seed, row.name, row) for row in rows]
        if experiment.alphas:
            scales: list[float | str] = [0.5, "matched"]
            jobs += [Job("alpha", seed, f"{method}@{scale}") for method in ("magmax", "tunable") for scale in scales]
        if experiment.meta_sizes:
            jobs += [Job("meta-size", seed, row.name, row) for row in rows if row.base == "tailor"]
    return jobs


def seed_records(
    experiment: Experiment,
    jobs: Sequence[Job],
    known: Sequence[Record],
    place: Path,
    device: str | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Iterator[Record]:
    """Trains what is not trained yet, and yields the records of one seed's jobs, one after the other.

    `known`: records that the seed has already. `place`: the run directory.
    """
    seed = jobs[0].seed
    config = experiment.training(seed)
    options: dict[str, Any] = {"device": device, "progress": progress, "watch": watch}
    trained = train_sequence(config, place, **options)
    benchmark = open_benchmark(config.benchmark)
    joint = None
    if any(job.row is not None and job.row.base == "joint" for job in jobs):
        steps = sum(task_steps(len(task.train), config.train) for task in benchmark.tasks)
        together = experiment.joint_training(seed, experiment.joint_steps or steps)
        joint = joint_place(place, together)
        train_sequence(together, joint, **options)
    environments = draw_environments(benchmark, experiment.environments)
    settings: dict[str, Any] = {"seed": seed, "device": device, "trials": experiment.search.trials, "joint": joint}
    with SequenceBench(place, benchmark, environments, **settings) as bench:
        best = {record.method: record.best for record in known if isinstance(record, ScaleRecord)}
        work = _Seed(experiment, config, bench, sum(result.seconds for result in trained.results), best)
        for job in jobs:
            if job.row is not None and job.row.base == "logistic" and find_spec("sklearn") is None:
                warnings.warn(f"the row {job.name} is left out: it needs scikit-learn", stacklevel=2)
                continue
            yield work.do(job)


def joint_place(place: Path, config: TrainConfig) -> Path:
    """Returns where the model on all tasks together is trained; experiments that differ in tasks alone share it."""
    digest = hashlib.sha256(json.dumps(config.record(), sort_keys=True).encode()).hexdigest()[:12]
    return place.parent.parent / f"joint-{digest}" / place.name


class _Seed:
    """Does the jobs of one seed. `best`: the best scale of each merge that has one already."""

    def __init__(
        self,
        experiment: Experiment,
        config: TrainConfig,
        bench: SequenceBench,
        training_seconds: float,
        best: dict[str, float],
    ) -> None:
        self._experiment, self._config, self._bench = experiment, config, bench
        self._training_seconds, self._best = training_seconds, best

    def do(self, job: Job) -> Record:
        """Measures, and returns the record."""
        key: dict[str, Any] = {"setting": self._experiment.setting, "seed": job.seed}
        if job.kind == "sequence":
            return SequenceRecord(**key, **self._sequence())
        if job.kind == "scale":
            grid = {
                f"{scale:g}": self._bench.held_accuracy(MergeSpec(METHODS[job.name], scale))
                for scale in self._experiment.grid
            }
            self._best[job.name] = float(max(grid, key=lambda text: grid[text]))
            return ScaleRecord(**key, method=job.name, grid=grid, best=self._best[job.name])
        if job.kind == "alpha":
            return self._alpha(job, key)
        assert job.row is not None
        if job.kind == "meta-size":
            return SamplesRecord(**key, row=job.name, points=tuple(self._samples(job.row)))
        return RowRecord(**key, row=job.name, environments=tuple(self._scores(job.row)))

    def _sequence(self) -> dict[str, Any]:
        import torch

        import tunable_magmax

        bench, on_gpu = self._bench, self._bench.trained.bench.encoder.device.type == "cuda"
        report = bench.trained.bench.report(MergeSpec("magmax", 1.0))
        kept = [entry for entry in bench.run.kept if entry is not None]
        sources = " and ".join(sorted({entry.source for entry in kept}))
        return {
            "tasks": len(bench.run.tasks),
            "task_names": tuple(task.name for task in bench.benchmark.tasks),
            "elements": report.elements,
            "magmax_counts": tuple(report.counts or ()),
            "seconds": round(self._training_seconds, 2),
            "config": _portable(self._config.record(), Path(self._experiment.root)),
            "kept": {"samples": sum(entry.samples for entry in kept), "source": sources} if kept else None,
            "versions": {
                "tunable_magmax": tunable_magmax.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        }

    def _alpha(self, job: Job, key: dict[str, Any]) -> AlphaRecord:
        """Measures first and last task, of MAGMAX once and of Tunable MAGMAX at every alpha."""
        method, _, text = job.name.partition("@")
        scale: float | str = text if text == "matched" else float(text)
        points = []
        for alpha in [None] if method == "magmax" else self._experiment.alphas:
            spec = MergeSpec("magmax", scale)
            if alpha is not None:
                weights = Preference.from_alpha(alpha, len(self._bench.run.tasks)).weights
                spec = MergeSpec("tunable_magmax", scale, weights)
            shares = self._bench.task_accuracies(spec)
            points.append(AlphaPoint(alpha=alpha, first=shares[0], last=shares[-1]))
        return AlphaRecord(**key, method=method, scale=scale, points=tuple(points))

    def _samples(self, row: Row) -> Iterator[SamplesPoint]:
        for size in self._experiment.meta_sizes:
            smaller = [each.with_samples(size) for each in self._bench.environments if len(each.meta) >= size]
            scores = [self._score(row, environment) for environment in smaller]
            if scores:
                share = float(np.mean([score.right / score.samples for score in scores]))
                yield SamplesPoint(size=size, accuracy=share, environments=len(scores))

    # -- one row in one environment ----------------------------------------------------------------------------------

    def _scores(self, row: Row) -> Iterator[EnvironmentScore]:
        wanted = row_environments(self._experiment, row)
        for environment in self._bench.environments:
            if environment.name in wanted:
                yield self._score(row, environment)

    def _score(self, row: Row, environment: Environment) -> EnvironmentScore:
        bench, trained = self._bench, self._bench.trained
        about: dict[str, Any] = {"name": environment.name, "mixture": environment.mixture}
        head: Linear | None = None
        about["samples"] = len(trained.part(environment.rest, f"{environment.name} rest"))
        if row.preference is not None:
            about |= _believed(bench.preference(row.preference, environment), bench.truth(environment))
        if row.base == "logistic":
            logits = bench.logistic_logits(str(row.preference), environment)
            return EnvironmentScore(**about, right=trained.count(logits, environment))
        if row.base == "tailor":
            made = bench.tailored(str(row.preference), environment, row.head)
            about["chosen"] = title_of(trained.bench, made.spec)
            spec, head = made.spec, None
            if made.head is not None:
                head, about["head"] = made.head.linear, made.head.kind
            if made.evidence is not None:
                expected = made.evidence.expected
                about["expected"] = {name: (each.value, each.low, each.high) for name, each in expected.items()}
                about["simpler"] = made.evidence.simpler
        elif row.base == "joint":
            trained, spec = bench.joint, MergeSpec(checkpoint=1)
        else:
            spec = self._spec(row, environment)
            about |= {"chosen": title_of(trained.bench, spec)} if row.base == "single-best" else {}
        if row.base != "tailor" and row.head != "old":
            head = bench.head(trained, spec, row.head, str(row.site), environment)
        right = trained.right(spec, environment, head)
        return EnvironmentScore(**about, leftovers=self._leftovers(spec), right=right)

    def _spec(self, row: Row, environment: Environment) -> MergeSpec:
        """Returns the model that a row makes in an environment."""
        if row.base == "zero-shot":
            return BASE
        if row.base == "single-best":
            return MergeSpec(checkpoint=self._bench.best_checkpoint(environment))
        scale = self._best[row.base] if row.scale == "best" else row.scale
        if row.preference is None:
            last = (row.base, scale) == ("sequential", 1)
            return MergeSpec(checkpoint=len(self._bench.run.tasks)) if last else MergeSpec(row.method, scale)
        weights = self._bench.preference(row.preference, environment).weights
        if row.base == "likeliest":
            return MergeSpec(checkpoint=int(np.argmax(weights)) + 1)
        return MergeSpec(row.method, scale, weights, options=tuple(sorted(row.options.items())))

    def _leftovers(self, spec: MergeSpec) -> float | None:
        """Returns the share of elements that a merge gave by key alone; None of what gives none so."""
        report = None if spec.checkpoint is not None else self._bench.trained.bench.report(spec)
        return None if report is None or report.leftovers is None else report.leftovers / max(report.elements, 1)


def row_environments(experiment: Experiment, row: Row) -> set[str]:
    """Returns the names of the environments that a row is measured in; a search is done for some draws only."""
    draws = experiment.search.variants if row.preference == "search" else experiment.environments.variants
    return {name for name in experiment.environments.names(experiment.tasks) if int(name.rpartition("/")[2]) in draws}


def _believed(preference: Preference, truth: Any) -> dict[str, Any]:
    weights = np.array(preference.weights)
    return {
        "error": float(np.abs(weights - truth).sum() / 2),
        "expected_error": preference.expected_error,
        "weights": {str(t): round(float(weight), 6) for t, weight in enumerate(weights, 1) if weight > 0},
        "chosen": preference.method,
    }


def _portable(value: Any, root: Path) -> Any:
    """Removes places of this machine from a record: absolute paths become relative to the experiment's file."""
    if isinstance(value, Mapping):
        return {key: _portable(part, root) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(part, root) for part in value]
    return os.path.relpath(value, root) if isinstance(value, str) and Path(value).is_absolute() else value
