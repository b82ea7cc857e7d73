"""Preferences for an environment, from its meta samples: what each row of a table knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from tunable_magmax.errors import InputError, closest
from tunable_magmax.experiments.environments import Environment
from tunable_magmax.experiments.workbench import Workbench
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.search import search
from tunable_magmax.preference.uncertainty import Resampling

Measure: TypeAlias = Literal["ot", "cosine", "mmd"]
Source: TypeAlias = Callable[[Workbench, Sequence[int]], Preference]
# Intervals are not needed, only weights.
PLAIN = Resampling(replicates=0)


def tailored(
    bench: Workbench, name: str, environment: Environment, meta: Sequence[int] | None = None, trials: int = 0
) -> Preference:
    """The preference by a source, from the environment's meta samples or some of them."""
    positions = environment.meta if meta is None else tuple(meta)
    if name == "search":
        return _searched(bench, environment, trials)
    if name not in _SOURCES:
        raise InputError(f"no preference is called {name!r}{closest(name, [*_SOURCES, 'search'])}")
    with bench.timed("prefer"):
        return _SOURCES[name](bench, positions)


def _searched(bench: Workbench, environment: Environment, trials: int) -> Preference:
    """The weights whose merge classifies the meta samples best, starting from the label preference."""
    start = tailored(bench, "label", environment)

    def score(weights: tuple[float, ...], scale: float | None) -> float:
        state, _ = bench.merge(weights=weights)
        return bench.meta_accuracy(state, environment)

    found = search(score, len(bench.states), starts=[start], trials=trials, patience=None, seed=bench.seed)
    return found.preference()


def _label(bench: Workbench, positions: Sequence[int]) -> Preference:
    return Preference.from_labels(_label_counts(bench), bench.labels(positions), resampling=PLAIN)


def _compared(method: Measure) -> Source:
    def source(bench: Workbench, positions: Sequence[int]) -> Preference:
        return Preference.from_features(**_features(bench, positions), method=method, resampling=PLAIN)

    return source


def _shift(bench: Workbench, positions: Sequence[int]) -> Preference:
    return Preference.from_predictions(**_predictions(bench, positions), resampling=PLAIN)


def _pseudo(bench: Workbench, positions: Sequence[int]) -> Preference:
    evidence = {**_predictions(bench, positions), "task_label_counts": _label_counts(bench)}
    return Preference.from_predictions(**evidence, method="pseudo", resampling=PLAIN)


def _probe(bench: Workbench, positions: Sequence[int]) -> Preference:
    return Preference.from_base_features(
        [profile.base_features for profile in bench.profiles],
        [profile.row_labels for profile in bench.profiles],
        bench.base_features(positions),
        fitted=bench.probe,
        resampling=PLAIN,
    )


def _auto(bench: Workbench, positions: Sequence[int]) -> Preference:
    return Preference.auto(
        **_features(bench, positions),
        **_predictions(bench, positions),
        task_base_features=[profile.base_features for profile in bench.profiles],
        task_base_labels=[profile.row_labels for profile in bench.profiles],
        target_base_features=bench.base_features(positions),
        fitted=bench.probe,
        resampling=PLAIN,
    )


def _label_counts(bench: Workbench) -> list[dict[str, int]]:
    return [profile.label_table for profile in bench.profiles]


def _features(bench: Workbench, positions: Sequence[int]) -> dict[str, Any]:
    return {
        "task_features": [profile.features for profile in bench.profiles],
        "target_features": bench.target_features(positions),
    }


def _predictions(bench: Workbench, positions: Sequence[int]) -> dict[str, Any]:
    shares = bench.head.probabilities(bench.base_features(positions))
    return {
        "task_predictions": [profile.predicted_table for profile in bench.profiles],
        "predictions": [bench.head.classes[index] for index in shares.argmax(axis=1).tolist()],
    }


_SOURCES: dict[str, Source] = {
    "label": _label,
    "ot": _compared("ot"),
    "cosine": _compared("cosine"),
    "mmd": _compared("mmd"),
    "shift": _shift,
    "pseudo": _pseudo,
    "probe": _probe,
    "auto": _auto,
}
