"""The search over the simplex: starts first, early stopping, resuming."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.preference.search import Search, SearchResult, search

pytest.importorskip("optuna")


def peak(weights: tuple[float, ...], scale: float | None) -> float:
    """Best at weights (0.7, 0.3, 0) and scale 0.8."""
    distance = sum((w - p) ** 2 for w, p in zip(weights, (0.7, 0.3, 0.0), strict=True))
    return -distance - (0 if scale is None else (scale - 0.8) ** 2)


def test_tries_equal_weights_and_starts_first() -> None:
    found = search(peak, 3, Search(trials=4, seed=1), starts=[(0.7, 0.3, 0), (1, 0, 1)])
    assert [trial.weights for trial in found.history[:3]] == [
        pytest.approx((1 / 3,) * 3),
        pytest.approx((0.7, 0.3, 0)),
        pytest.approx((0.5, 0, 0.5)),
    ]
    assert found.best == found.history[1]
    assert found.best.scale is None


def test_gets_better_and_says_what_it_did() -> None:
    found = search(peak, 3, Search(scale=(0.1, 2.0), trials=120, patience=None))
    assert (len(found.history), found.stopped) == (120, "trials")
    assert found.best.value == max(trial.value for trial in found.history)
    assert found.best.value > found.history[0].value + 0.05
    assert all(sum(trial.weights) == pytest.approx(1) for trial in found.history)


def test_same_seed_same_history() -> None:
    assert search(peak, 3, Search(trials=12, seed=5)) == search(peak, 3, Search(trials=12, seed=5))
    assert search(peak, 3, Search(trials=12, seed=5)) != search(peak, 3, Search(trials=12, seed=6))


def test_stops_when_nothing_gets_better() -> None:
    found = search(lambda weights, scale: 1.0, 2, Search(patience=4), starts=[(1, 0), (0, 1)])
    assert (len(found.history), found.stopped) == (3 + 4, "patience")
    assert found.best == found.history[0]


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "new" / "study.journal"
    calls = []

    def interrupted(weights: tuple[float, ...], scale: float | None) -> float:
        calls.append(weights)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return peak(weights, scale)

    with pytest.raises(KeyboardInterrupt):
        search(interrupted, 3, Search(trials=8, patience=None, study_file=file), starts=[(0.7, 0.3, 0)])
    found = search(peak, 3, Search(trials=8, patience=None, study_file=file), starts=[(0.7, 0.3, 0)])
    assert len(found.history) == 8
    assert len({trial.weights for trial in found.history}) == 8  # nothing is tried twice
    assert found.best.weights == pytest.approx((0.7, 0.3, 0))  # the interrupted start was tried again
    before = len(calls)
    again = search(interrupted, 3, Search(trials=8, patience=None, study_file=file), starts=[(0.7, 0.3, 0)])
    assert again.history == found.history
    assert len(calls) == before
    with pytest.raises(InputError, match=r"holds a search with .*'seed': 0.* name another study file"):
        search(peak, 3, Search(trials=8, seed=1, study_file=file))


def test_one_task() -> None:
    assert search(lambda weights, scale: 0.0, 1, Search(trials=2)).best.weights == (1,)


def test_works_without_optuna_until_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"the search needs Optuna 4 or later: pip install 'tunable-magmax\[tune\]'"):
        search(peak, 3, Search())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials and patience must be >= 1, not 0 and 10"),
        ({"patience": 0}, "trials and patience must be >= 1, not 500 and 0"),
        ({"scale": (1.0, 1.0)}, "scale must be an interval (low, high) with 0 < low < high, not (1.0, 1.0)"),
        ({"starts": [(1, 1)]}, "start 1 has 2 weights for 3 tasks"),
        ({"tasks": 0}, "the number of tasks must be a whole number >= 1, not 0"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    starts, tasks = options.pop("starts", ()), options.pop("tasks", 3)
    with pytest.raises(InputError) as error:
        search(peak, tasks, Search(**options), starts=starts)
    assert message in str(error.value)


def test_nan_objective() -> None:
    with pytest.raises(InputError, match="the objective is NaN at weights"):
        search(lambda weights, scale: math.nan, 2, Search())


def test_result_is_frozen() -> None:
    found = search(peak, 3, Search(trials=1))
    assert isinstance(found, SearchResult)
    with pytest.raises(AttributeError):
        found.stopped = "x"  # type: ignore[misc]
