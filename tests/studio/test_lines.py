"""What a point is compared with: the best single task was chosen on the samples that it is compared on."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tunable_magmax.preference.preference import Preference
from tunable_magmax.studio.lines import compared, sentence
from tunable_magmax.studio.measuring import Measurement, Setting

SAMPLES = 40


def lines(tasks: int, ahead: int, behind: int):
    """A point that is right on half the samples; the first task is right on `ahead` more and `behind` fewer."""
    point = np.arange(SAMPLES) < SAMPLES // 2
    first = point.copy()
    first[SAMPLES // 2 : SAMPLES // 2 + ahead], first[:behind] = True, False
    names = [f"t{k}" for k in range(tasks)]
    run = SimpleNamespace(labels=names, tasks=names)

    def measure(model, setting, data):
        return first if model.checkpoint == 1 else np.zeros(SAMPLES, bool)

    bench, known = SimpleNamespace(run=run), {"measure_model": measure, "measure_roughly": measure}
    measuring = SimpleNamespace(run=run, bench=bench, knows=lambda model, data: True, **known)
    data = SimpleNamespace(name="site", weights=lambda mix: np.full(SAMPLES, 1 / SAMPLES), sample_tasks=None)
    setting = Setting(Preference.equal(tasks), informed=False)
    return compared(measuring, setting, Measurement("", "site", point, 1.0), data, None)


@pytest.mark.parametrize(("tasks", "verdict"), [(2, "clearly worse"), (20, "cannot tell")])
def test_the_best_of_many_tasks_must_be_further_ahead(tasks, verdict):
    best = {line.name: line for line in lines(tasks, ahead=8, behind=0)}["best"]
    assert (best.title, best.verdict) == ("t0", verdict)


def test_the_sentence_says_where_it_is_the_best():
    assert "not distinguishable from the best single task here with 40" in sentence(lines(3, 1, 0))
