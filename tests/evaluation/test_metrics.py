"""Average accuracy, forgetting and transfer, by hand and by their definitions."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.metrics import METRIC_DEFINITIONS, AccuracyMatrix

NAN = math.nan


def values(matrix):
    return {metric.name: metric.value for metric in matrix.metrics()}


@st.composite
def matrices(draw):
    tasks = draw(st.integers(2, 6))
    row = st.lists(st.floats(0, 1), min_size=tasks, max_size=tasks)
    return draw(st.lists(row, min_size=tasks, max_size=tasks)), draw(row)


@given(matrices())
def test_as_the_definitions_say(data):
    rows, base = data
    last = len(rows) - 1
    found = values(AccuracyMatrix.of([f"t{k}" for k in range(last + 1)], rows, base))
    assert found["average_accuracy"] == pytest.approx(sum(rows[last]) / (last + 1))
    drops = [max(rows[i][j] for i in range(last)) - rows[last][j] for j in range(last)]
    assert found["forgetting"] == pytest.approx(sum(drops) / last)
    back = [rows[last][j] - rows[j][j] for j in range(last)]
    assert found["backward_transfer"] == pytest.approx(sum(back) / last)
    ahead = [rows[j - 1][j] - base[j] for j in range(1, last + 1)]
    assert found["forward_transfer"] == pytest.approx(sum(ahead) / last)


def test_a_run_that_is_not_finished():
    matrix = AccuracyMatrix.of("abcd", [[0.9, NAN, NAN, NAN], [0.6, 0.8, None, None]])
    assert matrix.after == 2
    assert values(matrix) == pytest.approx({"average_accuracy": 0.7, "forgetting": 0.3, "backward_transfer": -0.3})
    first = AccuracyMatrix.of("ab", [[0.9, NAN]], base=[0.1, 0.2])
    assert values(first) == {
        "average_accuracy": 0.9,
        "forgetting": None,
        "backward_transfer": None,
        "forward_transfer": None,
    }
    nothing = AccuracyMatrix.of("ab", [])
    assert nothing.after == 0
    assert set(values(nothing).values()) == {None}


def test_json_both_ways():
    matrix = AccuracyMatrix.of(["a", "b"], np.array([[0.5, np.nan], [0.25, 1]]), base=[0.1, 0.2], samples=[3, 4])
    told = json.loads(json.dumps(matrix.to_dict()))
    assert told["matrix"] == [[0.5, None], [0.25, 1]]
    assert told["metrics"]["forgetting"] == {"value": 0.25, "definition": METRIC_DEFINITIONS["forgetting"]}
    assert "Chaudhry" in METRIC_DEFINITIONS["forgetting"]
    assert "Lopez-Paz" in METRIC_DEFINITIONS["backward_transfer"]
    assert AccuracyMatrix.from_dict({**told, "seconds": 3}) == matrix


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"version": 1, "tasks": ["a"]}', "not an accuracy matrix: KeyError 'matrix'"),
        ('{"version": 1, "tasks": ["a"], "matrix": [[1, 0]]}', "of 1 tasks needs 1 rows of 1 numbers"),
        ('{"version": 1, "tasks": ["a"], "matrix": [[50]]}', "accuracies must be shares from 0 to 1"),
        ('{"version": 1, "tasks": ["a"], "matrix": [[1]], "samples": [1, 2]}', "2 numbers of samples for 1 tasks"),
    ],
)
def test_bad_content(content, says):
    with pytest.raises(InputError, match=says):
        AccuracyMatrix.from_dict(json.loads(content))
