"""The work of one seed of an experiment: trains its sequence, and does its jobs, each of which gives a record."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.data.splits import shuffled
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import Environment, draw_environments
from tunable_magmax.experiments.jobs import Job
from tunable_magmax.experiments.records import Record, record_key
from tunable_magmax.experiments.rows import DEFAULTS, MERGED, Row
from tunable_magmax.experiments.workbench import Count, State, Workbench, preference_for, with_prior
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.preference.estimate import half_l1
from tunable_magmax.preference.preference import Preference
from tunable_magmax.training.config import TrainConfig, task_steps
from tunable_magmax.training.loop import Watch
from tunable_magmax.training.sequence import train_sequence
from tunable_magmax.workflows.tailoring import default_method, default_scale


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
    options: dict[str, Any] = {"device": work.device, "progress": progress, "watch": watch}
    trained = train_sequence(config, work.place, **options)
    benchmark = open_benchmark(config.benchmark)
    joint = None
    if any(job.row is not None and job.row.base == "joint" for job in work.jobs):
        steps = sum(task_steps(len(task.train), config.train) for task in benchmark.tasks)
        together = work.experiment.joint_training(work.seed, work.experiment.joint_steps or steps)
        joint = joint_place(work.place, together)
        train_sequence(together, joint, **options)
    environments = draw_environments(benchmark, work.experiment.environments)
    with Workbench(work.place, benchmark, environments, seed=config.seed, device=work.device, joint=joint) as bench:
        runner = _Seed(work, bench, sum(result.seconds for result in trained.results))
        for job in work.jobs:
            yield runner.do(job)
            runner.forget(job)


def joint_place(place: Path, config: TrainConfig) -> Path:
    """Returns where the model on all tasks together is trained; experiments that differ in tasks alone share it."""
    digest = hashlib.sha256(json.dumps(config.record(), sort_keys=True).encode()).hexdigest()[:12]
    return place.parent.parent / f"joint-{digest}" / place.name


@dataclass(frozen=True, eq=False)
class _Answers:
    """What the head gives for a model in an environment, without a prior, and facts for the record."""

    logits: Tensor
    report: MergeReport | None
    facts: Mapping[str, Any] = field(default_factory=dict)


class _Seed:
    """Does the jobs of one seed."""

    def __init__(self, work: SeedWork, bench: Workbench, training_seconds: float) -> None:
        self._experiment, self._seed, self._bench = work.experiment, work.seed, bench
        self._training_seconds = training_seconds
        self._records = {record_key(record): record for record in work.known}
        self._preferences: dict[tuple[str, str], Preference] = {}
        self._kept: dict[tuple[str, str], _Answers] = {}
        self._waiting = Counter(job.row.model.name for job in work.jobs if job.kind == "row" and job.row is not None)

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

    def forget(self, job: Job) -> None:
        """Lets go of a model's answers after the last row that needs them: they may be large."""
        if job.kind != "row" or job.row is None:
            return
        name = job.row.model.name
        self._waiting[name] -= 1
        if not self._waiting[name]:
            self._kept = {key: answers for key, answers in self._kept.items() if key[0] != name}

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
        searched = self._experiment.search.variants if row.preference == "search" else None
        environments = [
            self._measure(row, environment)
            for environment in self._bench.environments
            if searched is None or environment.variant in searched
        ]
        return {
            "row": row.name,
            "method": row.method or row.base,
            "preference": row.preference,
            "scale": row.scale,
            "options": {**DEFAULTS, **row.options} if row.method == "tunable_magmax" else dict(row.options),
            "seconds": {kind: round(value, 4) for kind, value in sorted(self._bench.seconds.items())},
            "environments": environments,
        }

    def _measure(self, row: Row, environment: Environment) -> dict[str, Any]:
        """Measures a row in an environment. Rows that differ in the prior alone share the model's answers."""
        answers = self._answers(row.model, environment)
        site = None
        if row.prior is not None:
            preference = self._preference(row.prior, environment)
            site = with_prior(self._bench, preference, row.eps)
        count = self._bench.count(answers.logits, environment, site)
        return {**_measured(environment, count, answers.report), **answers.facts, **_prior_facts(site)}

    def _answers(self, model: Row, environment: Environment) -> _Answers:
        key = (model.name, environment.name)
        if key not in self._kept:
            if model.tailored:
                self._kept[key] = self._tailored(model, environment)
            else:
                self._for_all(model)
        return self._kept[key]

    def _for_all(self, row: Row) -> None:
        """Makes one model and keeps its answers in all environments."""
        bench = self._bench
        report = None
        if row.base in ("zero-shot", "joint"):
            state = bench.base if row.base == "zero-shot" else bench.joint
        else:
            state, report = bench.merge(method=row.method, scale=self._lambda(row))
        every = bench.logits(state, bench.environments)
        for environment, logits in zip(bench.environments, every, strict=True):
            self._kept[row.name, environment.name] = _Answers(logits, report)

    def _tailored(self, row: Row, environment: Environment) -> _Answers:
        """Makes the model of one environment."""
        bench = self._bench
        if row.base == "single-best":  # by labelled meta samples; of equal ones the last
            scores = bench.task_correct(environment.meta)
            best = int(np.flatnonzero(scores == scores.max())[-1])
            return _Answers(bench.logits(bench.states[best], [environment])[0], None, {"chosen": f"task {best + 1}"})
        assert row.preference is not None
        preference = self._preference(row.preference, environment)
        state, report = self._made(row, preference)
        facts = _preferred(preference, bench.truth(environment))
        return _Answers(bench.logits(state, [environment])[0], report, facts)

    def _made(self, row: Row, preference: Preference) -> tuple[State, MergeReport | None]:
        """Returns the model that a row makes with a preference."""
        bench, options = self._bench, dict(row.options)
        if row.base == "likeliest":
            return bench.states[int(np.argmax(preference.weights))], None
        if row.base == "tailor":
            weights = preference.weights
            method = default_method(weights)
            return bench.merge(method=method, weights=weights, scale=default_scale(method, prior=True))
        return bench.merge(method=row.method, weights=preference.weights, scale=row.scale, **options)

    def _preference(self, source: str, environment: Environment) -> Preference:
        """Returns an environment's preference by a source, which is found once."""
        key = (source, environment.name)
        if key not in self._preferences:
            trials = self._experiment.search.trials
            self._preferences[key] = preference_for(self._bench, source, environment, trials=trials)
        return self._preferences[key]

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
        row = job.row
        assert row is not None
        assert row.preference is not None
        bench, points = self._bench, []
        for size in self._experiment.meta_sizes:
            shares = []
            for environment in bench.environments:
                if len(environment.meta) < size:
                    continue
                order = shuffled(len(environment.meta), derived_seed(environment.variant, environment.mixture, "meta"))
                meta = sorted(environment.meta[k] for k in order[:size])
                preference = preference_for(bench, row.preference, environment, meta)
                state, _ = self._made(row, preference)
                site = None if row.prior is None else with_prior(bench, preference)
                count = bench.count(bench.logits(state, [environment])[0], environment, site)
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


def _prior_facts(site: Preference | None) -> dict[str, Any]:
    return {} if site is None or site.prior is None else {"eps": site.prior.eps}


def _preferred(preference: Preference, truth: Any) -> dict[str, Any]:
    return {
        "error": float(half_l1(np.array(preference.weights), truth)),
        "weights": {str(t): round(weight, 6) for t, weight in enumerate(preference.weights, 1) if weight > 0},
        "chosen": preference.method,
        "expected_error": None if preference.expected_error is None else round(preference.expected_error, 6),
    }
