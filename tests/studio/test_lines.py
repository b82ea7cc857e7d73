"""What a point is compared with: the best single task was chosen on the samples that it is compared on."""

from __future__ import annotations

import numpy as np
import pytest

from tunable_magmax.studio.scores import compared

SAMPLES = 40


@pytest.mark.parametrize(("tasks", "verdict"), [(2, "clearly worse"), (20, "cannot tell")])
def test_the_best_of_many_tasks_must_be_further_ahead(tasks, verdict):
    point = np.arange(SAMPLES) < SAMPLES // 2
    best, worst = np.arange(SAMPLES) < SAMPLES // 2 + 8, np.zeros(SAMPLES, bool)
    found = compared(point, {"best": best, "base": worst}, np.full(SAMPLES, 1 / SAMPLES), tasks)
    assert {name: told for name, (_, told) in found.items()} == {"best": verdict, "base": "clearly better"}
