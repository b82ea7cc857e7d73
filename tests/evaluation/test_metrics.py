"""Average accuracy, forgetting and transfer, by their definitions."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.evaluation.metrics import AccuracyMatrix


@st.composite
def matrices(draw):
    tasks = draw(st.integers(2, 6))
    row = st.lists(st.floats(0, 1), min_size=tasks, max_size=tasks).map(tuple)
    return draw(st.lists(row, min_size=tasks, max_size=tasks)), draw(row)


@given(matrices())
def test_as_the_definitions_say(data):
    rows, base = data
    last = len(rows) - 1
    found = AccuracyMatrix(tuple(f"t{k}" for k in range(last + 1)), tuple(rows), base).metrics()
    assert found["average accuracy"] == pytest.approx(sum(rows[last]) / (last + 1))
    drops = [max(rows[i][j] for i in range(last)) - rows[last][j] for j in range(last)]
    assert found["forgetting"] == pytest.approx(sum(drops) / last)
    back = [rows[last][j] - rows[j][j] for j in range(last)]
    assert found["backward transfer"] == pytest.approx(sum(back) / last)
    ahead = [rows[j - 1][j] - base[j] for j in range(1, last + 1)]
    assert found["forward transfer"] == pytest.approx(sum(ahead) / last)


def test_a_run_that_is_not_finished():
    matrix = AccuracyMatrix(tuple("abcd"), ((0.9, 0.1, 0.2, 0.3), (0.6, 0.8, 0.1, 0.1)))
    assert matrix.metrics() == pytest.approx({"average accuracy": 0.7, "forgetting": 0.3, "backward transfer": -0.3})
    first = AccuracyMatrix(("a", "b"), ((0.9, 0.3),), base=(0.1, 0.2))
    assert first.metrics() == {
        "average accuracy": 0.9,
        "forgetting": None,
        "backward transfer": None,
        "forward transfer": None,
    }


def test_a_task_without_samples_is_null_in_json():
    matrix = AccuracyMatrix(("a", "b"), ((0.5, math.nan), (0.25, math.nan)), samples=(3, 0))
    told = json.loads(json.dumps(matrix.to_dict(), allow_nan=False))
    assert told["matrix"] == [[0.5, None], [0.25, None]]
    assert told["metrics"] == {"average accuracy": None, "forgetting": 0.25, "backward transfer": -0.25}
