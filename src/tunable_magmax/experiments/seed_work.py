"""The work of one seed of an experiment: trains its sequence, and does its jobs, each of which gives a record."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.data.splits import shuffled
from tunable_magmax.evaluation.choosing import default_method, default_scale, title_of
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.environments import Environment, draw_environments
from tunable_magmax.experiments.jobs import Job
from tunable_magmax.experiments.records import Record, record_key
from tunable_magmax.experiments.rows import DEFAULTS, MERGED, Row
from tunable_magmax.experiments.workbench import (
    Count,
    Model,
    Workbench,
    preference_for,
    weights_of,
    why_no_logistic,
    with_prior,
)
from tunable_magmax.files import Progress
from tunable_magmax.lottery import derived_seed
from tunable_magmax.preference.estimate import half_l1
from tunable_magmax.preference.preference import Preference
from tunable_magmax.training.config import TrainConfig, task_steps
from tunable_magmax.training.loop import Watch
from tunable_magmax.training.sequence import train_sequence


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
            if job.row is not None and job.row.base == "logistic" and (reason := why_no_logistic()):
                warnings.warn(f"the row {job.name} is left out: {reason}", stacklevel=2)
                continue
            yield runner.do(job)


def joint_place(place: Path, config: TrainConfig) -> Path:
    """Returns where the model on all tasks together is trained; experiments that differ in tasks alone share it."""
    digest = hashlib.sha256(json.dumps(config.record(), sort_keys=True).encode()).hexdigest()[:12]
    return place.parent.parent / f"joint-{digest}" / place.name


class _Seed:
    """Does the jobs of one seed."""

    def __init__(self, work: SeedWork, bench: Workbench, training_seconds: float) -> None:
        self._experiment, self._seed, self._bench = work.experiment, work.seed, bench
        self._training_seconds = training_seconds
        self._records = {record_key(record): record for record in work.known}
        self._tailored: dict[tuple[str, str], tuple[Model, dict[str, Any]]] = {}

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
        report = bench.bench.report(MergeSpec("magmax", 1.0))
        samples = sum(len(task.train) for task in bench.benchmark.tasks) * config.train.epochs
        return {
            "tasks": bench.tasks,
            "task_names": [task.name for task in bench.benchmark.tasks],
            "in_task": bench.in_task(),
            "lengths": bench.lengths(),
            "elements": report.elements,
            "magmax_counts": list(report.counts or ()),
            "seconds": round(self._training_seconds, 2),
            "samples_per_second": round(samples / self._training_seconds, 1) if self._training_seconds else None,
            "config": _portable(config.record(), self._experiment.root),
            "kept": _kept(bench),
            "environments": [_described(environment) for environment in bench.environments],
            "versions": {
                "tunable_magmax": tunable_magmax.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "device": torch.cuda.get_device_name() if bench.bench.encoder.device.type == "cuda" else "cpu",
        }

    def _scale(self, job: Job) -> dict[str, Any]:
        grid = {}
        for scale in self._experiment.grid:
            grid[f"{scale:g}"] = self._bench.held_accuracy(MergeSpec(MERGED[job.name], scale))
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
        """Measures a row in an environment. Rows that differ in head and prior alone share the model's features."""
        bench = self._bench
        if row.base == "logistic":
            assert row.prior is not None
            known = with_prior(bench, bench.preference(row.prior, environment), row.eps)
            assert known.prior is not None
            logits = bench.logistic_logits(environment) + known.prior.bias(bench.bench.classes)
            return {**_measured(environment, bench.count(bench.main, logits, environment), None), **_prior_facts(known)}
        model, facts = self._model(row, environment)
        head = None
        site: Preference | None = None
        if row.prior is not None and not (row.base == "tailor" and row.fit):
            preference = bench.preference(row.prior, environment, self._experiment.search.trials)
            site = with_prior(bench, preference, row.eps)
            if row.fit:
                head = bench.fitted(model, site, row.prior, environment)
        logits = bench.logits(model, environment, head)
        if site is not None and site.prior is not None and head is None:
            logits = logits + site.prior.bias(model.side.bench.classes)
        count = bench.count(model.side, logits, environment)
        return {**_measured(environment, count, model, row.scale), **facts, **_prior_facts(site)}

    def _model(self, row: Row, environment: Environment) -> tuple[Model, dict[str, Any]]:
        """Returns the model of a row in an environment, and facts for the record."""
        bench = self._bench
        if row.base == "joint":
            return bench.joint, {}
        if row.base == "single-best":  # by labelled meta samples; of equal ones the last
            scores = bench.task_correct(environment)
            best = int(np.flatnonzero(scores == scores.max())[-1])
            return bench.model(MergeSpec(checkpoint=best + 1)), {"chosen": f"task {best + 1}"}
        if row.preference is None:
            return bench.model(self._spec(row, None)), {}
        if row.base == "tailor" and row.fit:
            key = (row.preference, environment.name)
            if key not in self._tailored:
                model, preference = bench.tailored(row.preference, environment)
                self._tailored[key] = model, {**_preferred(preference, bench.truth(environment)), **_planned(model)}
            return self._tailored[key]
        preference = bench.preference(row.preference, environment, self._experiment.search.trials)
        return bench.model(self._spec(row, preference)), _preferred(preference, bench.truth(environment))

    def _spec(self, row: Row, preference: Preference | None) -> MergeSpec:
        """Returns the model that a row makes with a preference, or without one."""
        last = self._bench.tasks
        if row.base == "zero-shot":
            return BASE
        if preference is None:
            scale = self._lambda(row)
            return (
                MergeSpec(checkpoint=last) if (row.base, scale) == ("sequential", 1) else MergeSpec(row.method, scale)
            )
        weights = preference.weights
        if row.base == "likeliest":
            return MergeSpec(checkpoint=int(np.argmax(weights)) + 1)
        if row.base == "tailor":
            method = default_method(weights)
            return MergeSpec(method, default_scale(method, prior=True), weights)
        return MergeSpec(row.method, row.scale, weights, options=tuple(sorted(row.options.items())))

    def _lambda(self, row: Row) -> float | str:
        """Returns the scale of a row; `best` is what was chosen on held-out training data."""
        if row.scale != "best":
            assert row.scale is not None
            return row.scale
        return float(self._records[self._experiment.setting, "scale", self._seed, row.base]["best"])

    def _alpha(self, job: Job) -> dict[str, Any]:
        method, _, text = job.name.partition("@")
        scale: float | str = text if text == "matched" else float(text)
        tasks = self._bench.tasks
        points = []
        for alpha in [None] if method == "magmax" else self._experiment.alphas:
            spec = MergeSpec("magmax", scale)
            if alpha is not None:
                spec = MergeSpec("tunable_magmax", scale, Preference.from_alpha(alpha, tasks).weights)
            accuracies, report = self._bench.task_accuracies(spec), self._bench.bench.report(spec)
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
                logits = bench.logits(bench.model(self._spec(row, preference)), environment)
                if row.prior is not None:
                    site = with_prior(bench, preference)
                    assert site.prior is not None
                    logits = logits + site.prior.bias(bench.bench.classes)
                count = bench.count(bench.main, logits, environment)
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


def _measured(environment: Environment, count: Count, model: Model | None, scale: Any = None) -> dict[str, Any]:
    report = None if model is None else model.report
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
        "lambda": (scale if isinstance(scale, float) else None) if report is None else report.scale,
        "leftovers": leftovers,
        "error": None,
        "weights": None,
        "chosen": None,
    }


def _planned(model: Model) -> dict[str, Any]:
    """Returns what a tailored model is, and what was told of its accuracy: value, low and high."""
    plan = model.plan
    assert plan is not None
    assert plan.head is not None
    bench, evidence = model.side.bench, plan.evidence
    return {
        "chosen": title_of(bench, plan.spec),
        "method": plan.spec.method,
        "tried": len(plan.choice.tried) if plan.choice is not None else 0,
        "head": plan.head.kind,
        "view": plan.head.view,
        "rows": plan.head.rows,
        "expected": {}
        if evidence is None
        else {name: [round(v, 6) for v in (e.value, e.low, e.high)] for name, e in evidence.expected.items()},
        "simpler": None if evidence is None else evidence.simpler,
    }


def _kept(bench: Workbench) -> dict[str, Any] | None:
    entries = [entry for entry in bench.run.kept if entry is not None]
    if not entries:
        return None
    sources = sorted({entry.source for entry in entries})
    return {"samples": sum(entry.samples for entry in entries), "source": " and ".join(sources)}


def _prior_facts(site: Preference | None) -> dict[str, Any]:
    return {} if site is None or site.prior is None else {"eps": site.prior.eps}


def _preferred(preference: Preference, truth: Any) -> dict[str, Any]:
    return {
        "error": float(half_l1(np.array(preference.weights), truth)),
        "weights": weights_of(preference),
        "chosen": preference.method,
        "expected_error": None if preference.expected_error is None else round(preference.expected_error, 6),
    }
