"""Search for weights (and a scale) that score best on a labelled sample, with Optuna; can be stopped and resumed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.errors import InputError
from tunable_magmax.preference.preference import JSON, Preference, normalised
from tunable_magmax.preference.schedule import task_count

Objective: TypeAlias = Callable[[tuple[float, ...], float | None], float]
STUDY = "tunable-magmax-search"


@dataclass(frozen=True)
class Trial:
    """One point that was tried."""

    weights: tuple[float, ...]
    scale: float | None
    value: float


@dataclass(frozen=True)
class SearchResult:
    """The best trial (of equal ones the first), all trials in order, why the search ended ("trials" or "patience")."""

    best: Trial
    history: tuple[Trial, ...]
    stopped: str

    def preference(self, provenance: dict[str, JSON] | None = None) -> Preference:
        """The best weights as a preference; the scale, if searched, is in its provenance."""
        record: dict[str, JSON] = {
            **(provenance or {}),
            "value": self.best.value,
            "scale": self.best.scale,
            "trials": len(self.history),
            "stopped": self.stopped,
        }
        return Preference(self.best.weights, "search", record)


def search(
    objective: Objective,
    tasks: int,
    *,
    scale: tuple[float, float] | None = None,
    starts: Sequence[Preference | Sequence[float]] = (),
    trials: int = 500,
    patience: int | None = 10,
    seed: int = 0,
    study_file: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """Maximise `objective(weights, scale)` over the simplex of `tasks` weights and, where given, an interval of scales.

    Each weight is searched in [0, 1] and the weights normalised. Equal weights and `starts` are tried first. Ends after
    `trials` trials in all, or `patience` of them (after the first ones) without a better value. With `study_file` every
    trial is kept there and a later call with the same settings continues. Without a scale to search, scale is None.

    >>> found = search(lambda weights, scale: weights[0], 2, starts=[(1, 0)], trials=5)
    >>> found.best.weights, len(found.history)
    ((1.0, 0.0), 5)
    """
    optuna = _optuna()
    tasks = task_count(tasks)
    if trials < 1 or (patience is not None and patience < 1):
        raise InputError(f"trials and patience must be >= 1, not {trials} and {patience}")
    if scale is not None and not (0 < scale[0] < scale[1] < math.inf):
        raise InputError(f"scale must be an interval (low, high) with 0 < low < high, not {scale}")
    first = [(1.0,) * tasks] + [
        start.weights if isinstance(start, Preference) else normalised(start) for start in starts
    ]
    for position, start in enumerate(first[1:], 1):
        if len(start) != tasks:
            raise InputError(f"start {position} has {len(start)} weights for {tasks} tasks")
    with _quiet(optuna):
        study = _study(
            optuna, study_file, seed, {"tasks": tasks, "scale": list(scale) if scale else None, "seed": seed}
        )
        _enqueue(optuna, study, first, scale)
        history = _history(optuna, study)
        while (stopped := _stopped(history, trials, patience, len(first))) is None:
            trial = study.ask()
            raw = [trial.suggest_float(f"weight_{t}", 0.0, 1.0) for t in range(1, tasks + 1)]
            size = trial.suggest_float("scale", *scale) if scale else None
            weights = normalised(raw if any(raw) else [1.0] * tasks)
            value = float(objective(weights, size))
            if math.isnan(value):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                raise InputError(f"the objective is NaN at weights {weights} and scale {size}; it must be a number")
            trial.set_user_attr("weights", list(weights))
            study.tell(trial, value)
            history = _history(optuna, study)
    best = max(history, key=lambda trial: trial.value)
    return SearchResult(best, tuple(history), stopped)


def _stopped(history: Sequence[Trial], trials: int, patience: int | None, first: int) -> str | None:
    if len(history) >= trials:
        return "trials"
    if patience is None or len(history) < first + patience:
        return None
    best = max(range(len(history)), key=lambda k: history[k].value)
    return "patience" if len(history) - max(best + 1, first) >= patience else None


def _history(optuna: Any, study: Any) -> list[Trial]:
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    return [Trial(tuple(t.user_attrs["weights"]), t.params.get("scale"), t.value) for t in done]


def _enqueue(optuna: Any, study: Any, first: Sequence[tuple[float, ...]], scale: tuple[float, float] | None) -> None:
    """Queue the given starts that no earlier run has finished or left in the queue."""
    alive = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.WAITING)
    known = {t.user_attrs.get("start") for t in study.get_trials(deepcopy=False, states=alive)}
    for position, weights in enumerate(first):
        if position not in known:
            params = {f"weight_{t}": weight / max(weights) for t, weight in enumerate(weights, 1)}
            if scale:
                params["scale"] = min(max(1.0, scale[0]), scale[1])
            study.enqueue_trial(params, user_attrs={"start": position})


def _study(optuna: Any, study_file: str | os.PathLike[str] | None, seed: int, settings: dict[str, JSON]) -> Any:
    storage = None
    if study_file is not None:
        path = Path(study_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = optuna.storages.journal
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, study_name=STUDY, direction="maximize", load_if_exists=True)
    found = study.user_attrs.get("settings")
    if found is None:
        study.set_user_attr("settings", settings)
    elif found != settings:
        raise InputError(f"{study_file}: holds a search with {found}, not {settings}; name another study file")
    # A resumed sampler must not replay the draws of the run before it.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.get_trials(deepcopy=False)))
    return study


def _optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError:
        raise InputError("the search needs Optuna 4 or later: pip install 'tunable-magmax[tune]'") from None
    return optuna


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
