"""Searches for the weights whose merge is best on labelled samples of a site (the paper's fourth case)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.labelled import label_samples
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.site import Site

Weights: TypeAlias = tuple[float, ...]
PATIENCE = 10
"""Trials without a better one after which a search ends."""
LEAST_COUNT = 0.02
"""What a class without a sample counts among the shares."""


def search(
    objective: Callable[[Weights], float],
    starts: Sequence[Sequence[float]],
    trials: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[tuple[float, Weights]]:
    """Maximises `objective(weights)` over the simplex; returns all trials with their values, `starts` first.

    >>> max(search(lambda weights: weights[0], [(0.5, 0.5), (1, 0)], trials=5))
    (1.0, (1.0, 0.0))
    """
    optuna, tasks = _optuna(), len(starts[0])
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    for start in starts:
        study.enqueue_trial({f"weight_{t}": weight / max(start) for t, weight in enumerate(start, 1)})
    made: list[tuple[float, Weights]] = []
    best = 0
    while len(made) < trials and len(made) - max(best + 1, len(starts)) < PATIENCE:
        trial = study.ask()
        raw = [trial.suggest_float(f"weight_{t}", 0.0, 1.0) for t in range(1, tasks + 1)]
        weights = Preference.from_weights(raw if any(raw) else [1.0] * tasks).weights
        value = objective(weights)
        study.tell(trial, value)
        made.append((value, weights))
        best = max(range(len(made)), key=lambda k: made[k][0])
        if progress is not None:
            progress("searching", len(made), trials)
    return made


def search_preference(site: Site, trials: int, seed: int = 0, bench: Bench | None = None) -> Preference:
    """Returns the weights whose merge of the site's run is best for its labelled samples.

    A trial merges the tasks in memory and fits a head to them; the cross-validated log loss judges. Equal weights and
    those that the labels mean are tried first: on these samples the result is no worse. `bench`: the run's models, if
    they are in memory already.
    """
    _optuna()  # which lacks before anything is read
    run = site.run
    opened = Bench(run, device=site.reading.device, progress=site.progress) if bench is None else nullcontext(bench)
    with opened as bench:
        if not bench.models.elements:
            raise InputError(f"{run.path}: no task changed anything, so all merges are the base; check the run")
        labelled = label_samples(site.open_samples("labelled"), bench.classes)
        data = bench.open_labelled("labelled", labelled)
        counts = np.bincount(data.labels, minlength=len(bench.classes)) + LEAST_COUNT
        starts = _starts(run, [bench.classes[label] for label in data.labels])
        facts = SiteFacts(starts["equal"], counts / counts.sum(), labelled=data, moved=False)
        accuracies: dict[Weights, float] = {}

        def score(weights: Weights) -> float:
            loss, accuracies[weights] = _score(bench, MergeSpec("tunable_magmax", "matched", weights), facts, data)
            return -loss

        made = search(score, list(starts.values()), trials, seed, site.progress)
    value, weights = max(made, key=lambda trial: trial[0])
    begun: Any = [{"source": name, "accuracy": accuracies[w]} for name, (_, w) in zip(starts, made, strict=False)]
    record: dict[str, Any] = {"samples": len(data), "accuracy": accuracies[weights], "log_loss": -value}
    return Preference(
        weights, "search", {**record, "trials": len(made), "seed": seed, "starts": begun}, tasks=run.names
    )


def _score(bench: Bench, spec: MergeSpec, facts: SiteFacts, data: BenchData) -> tuple[float, float]:
    """Returns log loss and accuracy by cross-validation; of too few samples for that, the old head's errors."""
    head = bench.fit(spec, facts)
    if head.loss is not None and head.accuracy is not None:
        return head.loss, head.accuracy
    right = float((bench.logits(spec, data).argmax(axis=1) == data.labels).mean())
    return 1 - right, right


def _starts(run: Run, labels: Sequence[str]) -> dict[str, Weights]:
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
