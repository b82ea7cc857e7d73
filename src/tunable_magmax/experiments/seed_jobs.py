"""The jobs of one seed: trains its sequence, and makes records of everything that is to be measured.

Environments are done one after the other, each with all of its rows, so that rows share merges, embeddings and heads,
and a stopped experiment loses one environment at most.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.arrays import Floats
from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.evaluation.bench import BenchData
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import draw_environments
from tunable_magmax.experiments.records import (
    AlphaPoint,
    AlphaRecord,
    EnvironmentScore,
    Record,
    RowRecord,
    ScaleRecord,
    SequenceRecord,
)
from tunable_magmax.experiments.rows import METHODS, Row
from tunable_magmax.experiments.sequence_bench import EnvironmentBench, SequenceBench
from tunable_magmax.files import Progress
from tunable_magmax.models.head import Linear
from tunable_magmax.preference.preference import Preference
from tunable_magmax.training.config import TrainConfig
from tunable_magmax.training.sequence import train_sequence


@dataclass(frozen=True)
class Job:
    """One thing to do for one seed, which leaves a record, or of an environment a record for each of its `rows`."""

    kind: str
    seed: int
    name: str
    rows: tuple[Row, ...] = ()


def plan_jobs(experiment: Experiment) -> list[Job]:
    """Returns all jobs of an experiment, seed by seed, in the order in which they are done.

    Rows with fewer samples come last in each environment, since its samples have the same names on the bench.
    """
    rows, jobs = sorted(experiment.planned, key=lambda row: row.has_less), []
    for seed in experiment.seeds:
        jobs.append(Job("sequence", seed, "sequence"))
        jobs += [Job("scale", seed, name) for name in dict.fromkeys(row.base for row in rows if row.scale == "best")]
        if experiment.alphas:
            scales: list[float | str] = [0.5, "matched"]
            jobs += [Job("alpha", seed, f"{method}@{scale}") for method in ("magmax", "tunable") for scale in scales]
        for name in experiment.environments.names(experiment.tasks):
            jobs.append(Job("environment", seed, name, tuple(r for r in rows if experiment.measures(r, name))))
    return jobs


def jobs_to_do(experiment: Experiment, records: Sequence[Record]) -> list[Job]:
    """Returns the jobs without a record; those of environments with the rows that lack one.

    A row of more samples than are known of an environment has none there.
    """
    done: set[tuple[int, str, str]] = set()
    known: dict[tuple[int, str], int] = defaultdict(int)
    for record in records:
        if isinstance(record, RowRecord):
            for each in record.environments:
                done.add((record.seed, record.row, each.name))
                known[record.seed, each.name] = max(each.known or 0, known[record.seed, each.name])
        else:
            done.add((record.seed, record.kind, record.name))
    jobs = []
    for job in plan_jobs(experiment):
        most = known[job.seed, job.name] or sys.maxsize
        rows = [row for row in job.rows if (job.seed, row.name, job.name) not in done and (row.samples or 0) <= most]
        if rows if job.kind == "environment" else (job.seed, job.kind, job.name) not in done:
            jobs.append(replace(job, rows=tuple(rows)))
    return jobs


def seed_records(
    experiment: Experiment,
    jobs: Sequence[Job],
    known: Sequence[Record],
    place: Path,
    device: str | None = None,
    progress: Progress | None = None,
) -> Iterator[list[Record]]:
    """Trains what is not trained yet, and yields the records of each of one seed's jobs.

    `known`: records that the seed has already. `place`: the run directory.
    """
    seed = jobs[0].seed
    config = experiment.training(seed)
    options: dict[str, Any] = {"device": device, "progress": progress}
    trained = train_sequence(config, place, **options)
    benchmark = open_benchmark(config.benchmark)
    joint = None
    if any(row.base == "joint" for job in jobs for row in job.rows):
        steps = sum(config.train.task_steps(len(task.train)) for task in benchmark.tasks)
        together = experiment.joint_training(seed, experiment.joint_steps or steps)
        digest = hashlib.sha256(json.dumps(together.record(), sort_keys=True).encode()).hexdigest()[:12]
        joint = place.parent.parent / f"joint-{digest}" / place.name  # experiments that differ in tasks alone share it
        train_sequence(together, joint, **options)
    environments = draw_environments(benchmark, experiment.environments)
    with SequenceBench(place, benchmark, environments, seed=seed, device=device, joint=joint) as bench:
        best = {record.method: record.best for record in known if isinstance(record, ScaleRecord)}
        work = _Seed(experiment, config, bench, sum(result.seconds for result in trained.results), best)
        for job in jobs:
            yield work.do(job)


@dataclass(frozen=True)
class _Seed:
    """Does the jobs of one seed. `best`: the best scale of each merge that has one already."""

    experiment: Experiment
    config: TrainConfig
    bench: SequenceBench
    training_seconds: float
    best: dict[str, float]

    def do(self, job: Job) -> list[Record]:
        """Measures, and returns the records."""
        key: dict[str, Any] = {"setting": self.experiment.setting, "seed": job.seed}
        if job.kind == "sequence":
            return [self._sequence(key)]
        if job.kind == "scale":
            specs = {f"{scale:g}": MergeSpec(METHODS[job.name], scale) for scale in self.experiment.grid}
            grid = {text: self.bench.held_accuracy(spec) for text, spec in specs.items()}
            self.best[job.name] = float(max(grid, key=lambda text: grid[text]))
            return [ScaleRecord(**key, method=job.name, grid=grid, best=self.best[job.name])]
        if job.kind == "alpha":
            return [self._alpha(job, key)]
        [environment] = [each for each in self.bench.environments if each.name == job.name]
        with EnvironmentBench(self.bench, environment) as bench:
            found = [(row.name, self._score(row, bench)) for row in job.rows]
        return [RowRecord(**key, row=name, environments=(each,)) for name, each in found if each is not None]

    def _sequence(self, key: dict[str, Any]) -> SequenceRecord:
        import torch

        import tunable_magmax

        bench, on_gpu = self.bench, self.bench.trained.bench.encoder.device.type == "cuda"
        kept = [entry for entry in bench.run.kept if entry is not None]
        sources = " and ".join(sorted({entry.source for entry in kept}))
        versions = {
            "tunable_magmax": tunable_magmax.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        return SequenceRecord(
            **key,
            tasks=len(bench.run.tasks),
            elements=bench.trained.bench.models.elements,
            seconds=round(self.training_seconds, 2),
            config=_portable(self.config.record(), Path(self.experiment.root)),
            kept={"samples": sum(entry.samples for entry in kept), "source": sources} if kept else None,
            versions=versions,
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
        )

    def _alpha(self, job: Job, key: dict[str, Any]) -> AlphaRecord:
        """Measures first and last task, of MAGMAX once and of Tunable MAGMAX at every alpha."""
        method, _, text = job.name.partition("@")
        scale: float | str = text if text == "matched" else float(text)
        points, last = [], len(self.bench.run.tasks) - 1
        for alpha in [None] if method == "magmax" else self.experiment.alphas:
            spec = MergeSpec("magmax", scale)
            if alpha is not None:
                spec = MergeSpec("tunable_magmax", scale, Preference.from_alpha(alpha, last + 1).weights)
            first, final = (self.bench.task_accuracy(spec, task) for task in (0, last))
            points.append(AlphaPoint(alpha=alpha, first=first, last=final))
        return AlphaRecord(**key, method=method, scale=scale, points=tuple(points))

    # -- one row in one environment ----------------------------------------------------------------------------------

    def _score(self, row: Row, whole: EnvironmentBench) -> EnvironmentScore | None:
        """Returns what a row gets; None where it is of more samples than are known."""
        if row.samples is None:
            return self._scored(row, whole)
        if row.samples > len(whole.environment.meta):
            return None
        with EnvironmentBench(self.bench, whole.environment.with_samples(row.samples)) as bench:
            return self._scored(row, bench)

    def _scored(self, row: Row, bench: EnvironmentBench) -> EnvironmentScore:
        environment, trained = bench.environment, self.bench.trained
        about: dict[str, Any] = {"name": environment.name, "mixture": environment.mixture}
        about |= {"samples": len(trained.rest(environment)), "known": len(environment.meta)}
        if row.preference is not None:
            about |= _believed(bench.preference(row.preference), bench.truth())
        if row.base == "logistic":
            logits = bench.logistic_logits(str(row.preference))
            return EnvironmentScore(**about, right=_count_right(logits, trained.rest(environment)))
        head: Linear | None = None
        if row.base == "tailor":
            made = bench.tailored(str(row.preference), row.head, row.kept)
            spec, head, about["head"] = made.spec, made.head.linear, made.head.kind
            if made.head.loss is not None:
                expected = made.evidence.expected
                about["expected"] = {name: (each.value, each.low, each.high) for name, each in expected.items()}
                about["simpler"] = made.evidence.simpler
        elif row.base == "joint":
            trained, spec = self.bench.joint, MergeSpec(checkpoint=1)
        else:
            spec = self._spec(row, bench)
        if row.base in ("tailor", "single-best"):
            about["chosen"] = spec.title(trained.bench.run.names)
        if row.base != "tailor" and row.head != "old":
            head = bench.head(trained, spec, row.head, str(row.site))
        rest = trained.rest(environment)
        right = _count_right(trained.bench.logits(spec, rest, head), rest)
        return EnvironmentScore(**about, leftovers=self._leftovers(spec), right=right)

    def _spec(self, row: Row, bench: EnvironmentBench) -> MergeSpec:
        """Returns the model that a row makes in an environment."""
        if row.base == "zero-shot":
            return BASE
        if row.base == "single-best":
            return MergeSpec(checkpoint=bench.best_checkpoint())
        scale = self.best[row.base] if row.scale == "best" else row.scale
        if row.preference is None:
            last = (row.base, scale) == ("sequential", 1)
            return MergeSpec(checkpoint=len(self.bench.run.tasks)) if last else MergeSpec(row.method, scale)
        weights = bench.preference(row.preference).weights
        if row.base == "likeliest":
            return MergeSpec(checkpoint=int(np.argmax(weights)) + 1)
        return MergeSpec(row.method, scale, weights, options=tuple(sorted(row.merge_options.items())))

    def _leftovers(self, spec: MergeSpec) -> float | None:
        """Returns the share of elements that a merge gave by key alone; None of what gives none so."""
        report = None if spec.checkpoint is not None else self.bench.trained.bench.report(spec)
        return None if report is None or report.leftovers is None else report.leftovers / max(report.elements, 1)


def _count_right(logits: Floats, data: BenchData) -> int:
    return int((logits.argmax(axis=1) == data.labels).sum())


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
