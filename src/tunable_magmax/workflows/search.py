"""Searches for the weights whose merge is best on inputs with labels (the paper's fourth case)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.labelled import label_samples
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.site import Site

EPS = 0.02
"""What a class without a pair counts among the shares."""


@dataclass(frozen=True)
class Search:
    """How far to search: at most `trials` merges, or until `patience` of them after the first were no better.

    `scale`: an interval that is searched, too; by default every merge has the scale `matched`.
    """

    trials: int = 500
    patience: int = 10
    scale: tuple[float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1 or self.patience < 1 or self.seed < 0:
            raise InputError(
                f"trials and patience must be >= 1 and seed >= 0, not {self.trials}, {self.patience} and {self.seed}"
            )
        if self.scale is not None and not 0 < self.scale[0] < self.scale[1] < math.inf:
            raise InputError(f"scale must be an interval (low, high) with 0 < low < high, not {self.scale}")


@dataclass(frozen=True)
class Trial:
    """One point that was tried, and how good it is."""

    weights: tuple[float, ...]
    scale: float | None
    value: float


def search(
    objective: Callable[[tuple[float, ...], float | None], float],
    tasks: int,
    settings: Search,
    starts: Sequence[Sequence[float]] = (),
    progress: Progress | None = None,
) -> tuple[Trial, ...]:
    """Maximises `objective(weights, scale)` over the simplex, and returns all trials: equal weights, `starts`, others.

    >>> max(trial.value for trial in search(lambda weights, scale: weights[0], 2, Search(trials=5), [(1, 0)]))
    1.0
    """
    optuna = _optuna()
    first = [Preference.from_weights(weights).weights for weights in ((1.0,) * tasks, *starts)]
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=settings.seed))
    for weights in first:
        point = {f"weight_{t}": weight / max(weights) for t, weight in enumerate(weights, 1)}
        study.enqueue_trial(point if settings.scale is None else point | {"scale": float(np.clip(1, *settings.scale))})
    trials: list[Trial] = []
    best = 0
    while len(trials) < settings.trials and len(trials) - max(best + 1, len(first)) < settings.patience:
        trial = study.ask()
        raw = [trial.suggest_float(f"weight_{t}", 0.0, 1.0) for t in range(1, tasks + 1)]
        weights = Preference.from_weights(raw if any(raw) else [1.0] * tasks).weights
        scale = None if settings.scale is None else trial.suggest_float("scale", *settings.scale)
        value = objective(weights, scale)
        study.tell(trial, value)
        trials.append(Trial(weights, scale, value))
        best = max(range(len(trials)), key=lambda k: trials[k].value)
        if progress is not None:
            progress("searching", len(trials), settings.trials)
    return tuple(trials)


def search_preference(target: Site, samples: Samples, settings: Search) -> Preference:
    """Returns the weights, and the scale if that is searched, whose merge of the site's run is best for `samples`.

    A trial merges the tasks in memory and fits a head to them; the cross-validated log loss judges. Equal weights
    and those that the labels mean are tried first: on these samples the result is no worse.
    """
    _optuna()  # which lacks before anything is read
    run = target.run
    with Bench(run, device=target.reading.device, progress=target.progress) as bench:
        if not bench.models.elements:
            raise InputError(f"{run.path}: no task changed anything, so all merges are the base; check the run")
        labelled = label_samples(samples, bench.classes).draw(target.reading.max_samples, settings.seed)
        data = bench.open_labelled("labelled", labelled)
        counts = np.bincount(data.labels, minlength=len(bench.classes)) + EPS
        starts = _starts(run, [bench.classes[label] for label in data.labels])
        site = SiteFacts(starts["equal"], counts / counts.sum(), labelled=data, moved=False)
        accuracies: list[float] = []

        def score(weights: tuple[float, ...], scale: float | None) -> float:
            loss, accuracy = _score(bench, MergeSpec("tunable_magmax", scale or "matched", weights), site, data)
            accuracies.append(accuracy)
            return -loss

        trials = search(score, len(run.tasks), settings, list(starts.values())[1:], target.progress)
    place = max(range(len(trials)), key=lambda k: trials[k].value)
    best = trials[place]
    facts: dict[str, Any] = {"samples": len(data), "accuracy": accuracies[place], "log_loss": -best.value}
    facts |= {"trials": len(trials), "seed": settings.seed}
    facts["starts"] = [{"source": n, "accuracy": a} for n, a in zip(starts, accuracies, strict=False)]
    return Preference(best.weights, "search", facts, tasks=run.names, scale=best.scale)


def _score(bench: Bench, spec: MergeSpec, site: SiteFacts, data: BenchData) -> tuple[float, float]:
    """Returns log loss and accuracy by cross-validation; of too few samples for that, the old head's errors."""
    head = bench.fit(spec, site)
    if head.loss is not None and head.accuracy is not None:
        return head.loss, head.accuracy
    right = float((bench.logits(spec, data).argmax(axis=1) == data.labels).mean())
    return 1 - right, right


def _starts(run: Run, labels: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Returns what is tried first: equal weights, and those that the labels mean where their tasks are known."""
    starts = {"equal": Preference.equal(len(run.tasks)).weights}
    tables = run.label_tables
    if tables is not None and any(label in table for table in tables for label in labels):
        starts["label"] = Preference.from_labels(tables, labels).weights
    return starts


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("the search needs Optuna 4 or later: pip install 'tunable-magmax[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
