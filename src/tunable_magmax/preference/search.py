"""The search for weights by trial, the paper's fourth case: Optuna proposes them, the caller says how good they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tunable_magmax.errors import required
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference

PATIENCE = 10
"""Trials without a better one after which a search ends."""
Weights: TypeAlias = tuple[float, ...]


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
    optuna, tasks = require_optuna(), len(starts[0])
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


def require_optuna() -> Any:
    """Returns the library that proposes weights; refuses to go on without it."""
    optuna = required("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
