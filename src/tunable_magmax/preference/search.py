"""Searches for weights (and a scale) that score best on a labelled sample, with Optuna; can be stopped and resumed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.errors import InputError
from tunable_magmax.files import parse_json
from tunable_magmax.preference.estimate import JSON, normalised, task_count

Objective: TypeAlias = Callable[[tuple[float, ...], float | None], float | tuple[float, str]]
STUDY = "tunable-magmax-search"


@dataclass(frozen=True)
class Search:
    """How far to search.

    Each weight is searched in [0, 1] and the weights normalised; the scale is searched in the interval `scale`, if
    there is one. The search ends after `trials` trials in all, or `patience` of them (after the first ones) without a
    better value. With `study_file` every trial is kept there, and a later call with the same settings continues.
    """

    scale: tuple[float, float] | None = None
    trials: int = 500
    patience: int | None = 10
    seed: int = 0
    study_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.trials < 1 or (self.patience is not None and self.patience < 1):
            raise InputError(f"trials and patience must be >= 1, not {self.trials} and {self.patience}")
        if self.seed < 0:
            raise InputError(f"seed must be >= 0, not {self.seed}")
        if self.scale is not None and not (0 < self.scale[0] < self.scale[1] < math.inf):
            raise InputError(f"scale must be an interval (low, high) with 0 < low < high, not {self.scale}")


@dataclass(frozen=True)
class Trial:
    """One point that was tried; `detail` is the text that the objective returned beside its value."""

    weights: tuple[float, ...]
    scale: float | None
    value: float
    detail: str | None = None


SearchWatch: TypeAlias = Callable[[Sequence[Trial]], None]


@dataclass(frozen=True)
class SearchResult:
    """The best trial (of equal ones the first), all trials in order, why the search ended ("trials" or "patience")."""

    best: Trial
    history: tuple[Trial, ...]
    stopped: str


def search(
    objective: Objective,
    tasks: int,
    settings: Search,
    *,
    starts: Sequence[Sequence[float]] = (),
    start_scale: Callable[[tuple[float, ...]], float] | None = None,
    problem: Mapping[str, JSON] | None = None,
    watch: SearchWatch | None = None,
) -> SearchResult:
    """Maximises `objective(weights, scale)` over the simplex of `tasks` weights and, where searched, the scale.

    Equal weights and `starts` are tried first, with the scale that `start_scale(weights)` returns, by default 1, moved
    into the interval. Without a scale to search it is None. `problem` says what the objective stands for: a study file
    of another problem is refused. The objective may return a text beside its value, which is kept with the trial.
    `watch` is shown all trials so far: at first those kept, then after each one.

    >>> result = search(lambda weights, scale: weights[0], 2, Search(trials=5), starts=[(1, 0)])
    >>> result.best.weights, len(result.history)
    ((1.0, 0.0), 5)
    """
    optuna = require_optuna()
    tasks = task_count(tasks)
    check_study_file(settings.study_file)
    first = [(1.0,) * tasks, *map(normalised, starts)]
    for position, start in enumerate(first[1:], 1):
        if len(start) != tasks:
            raise InputError(f"start {position} has {len(start)} weights for {tasks} tasks")
    scale = settings.scale
    with _quiet(optuna):
        about = {"tasks": tasks, "scale": list(scale) if scale else None, "seed": settings.seed, **(problem or {})}
        study = _study(optuna, settings.study_file, settings.seed, about)
        _enqueue(optuna, study, first, scale, start_scale)
        while True:
            history = _history(optuna, study)
            if watch is not None and history:
                watch(history)
            stopped = _stopped(history, settings, len(first))
            if stopped is not None:
                break
            trial = study.ask()
            raw = [trial.suggest_float(f"weight_{t}", 0.0, 1.0) for t in range(1, tasks + 1)]
            size = trial.suggest_float("scale", *scale) if scale else None
            weights = normalised(raw if any(raw) else [1.0] * tasks)
            scored = objective(weights, size)
            score, detail = scored if isinstance(scored, tuple) else (scored, None)
            value = float(score)
            if math.isnan(value):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                raise InputError(f"the objective is NaN at weights {weights} and scale {size}; it must be a number")
            trial.set_user_attr("weights", list(weights))
            if detail is not None:
                trial.set_user_attr("detail", detail)
            study.tell(trial, value)
    best = max(history, key=lambda trial: trial.value)
    return SearchResult(best, tuple(history), stopped)


def _stopped(history: Sequence[Trial], settings: Search, first: int) -> str | None:
    if len(history) >= settings.trials:
        return "trials"
    patience = settings.patience
    if patience is None or len(history) < first + patience:
        return None
    best = max(range(len(history)), key=lambda k: history[k].value)
    return "patience" if len(history) - max(best + 1, first) >= patience else None


def _history(optuna: Any, study: Any) -> list[Trial]:
    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    return [
        Trial(tuple(t.user_attrs["weights"]), t.params.get("scale"), t.value, t.user_attrs.get("detail")) for t in done
    ]


def _enqueue(
    optuna: Any,
    study: Any,
    first: Sequence[tuple[float, ...]],
    scale: tuple[float, float] | None,
    start_scale: Callable[[tuple[float, ...]], float] | None,
) -> None:
    """Queues the starts that no earlier run has finished or left in the queue."""
    alive = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.WAITING)
    known = {t.user_attrs.get("start") for t in study.get_trials(deepcopy=False, states=alive)}
    for position, weights in enumerate(first):
        if position not in known:
            params = {f"weight_{t}": weight / max(weights) for t, weight in enumerate(weights, 1)}
            if scale:
                wanted = 1.0 if start_scale is None else start_scale(normalised(weights))
                params["scale"] = min(max(wanted, scale[0]), scale[1])
            study.enqueue_trial(params, user_attrs={"start": position})


def _study(optuna: Any, study_file: str | os.PathLike[str] | None, seed: int, settings: dict[str, JSON]) -> Any:
    storage = None
    if study_file is not None:
        path = Path(study_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = optuna.storages.journal
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, study_name=STUDY, direction="maximize", load_if_exists=True)
    before = study.user_attrs.get("settings")
    if before is None:
        study.set_user_attr("settings", settings)
    elif before != settings:
        other = ", ".join(key for key in settings if before.get(key) != settings[key]) or "settings"
        raise InputError(
            f"{study_file}: holds a search with {before}, not {settings} (other: {other}); name another study file"
        )
    # A resumed sampler must not replay the draws of the run before it.
    study.sampler = optuna.samplers.TPESampler(seed=(seed + len(study.get_trials(deepcopy=False))) % 2**32)
    return study


def check_study_file(name: str | os.PathLike[str] | None) -> None:
    """Refuses a file that is no study: Optuna appends to whatever file it is given."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir():
        raise InputError(f"{path} is a directory: give the name of a study file, such as {path / 'site.journal'}")
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with path.open(encoding="utf-8") as file:
            own = "op_code" in parse_json(file.readline(1 << 20))
    except (ValueError, TypeError):
        own = False
    if not own:
        raise InputError(f"{path} exists and is no study file: choose another name")


def require_optuna() -> Any:
    """Imports Optuna, or says how to install it."""
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
