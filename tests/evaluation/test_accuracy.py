"""Accuracies against plain counting, and Wilson's interval against its definition."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Accuracy, AccuracyMatrix, Share

CLASSES = ("ant", "bee", "cat", "dog", "elk")
TASKS = {"insects": (1, 0), "pets": (2, 3)}  # nobody's: elk


@st.composite
def scored(draw):
    count = draw(st.integers(1, 12))
    # Whole numbers, so that there are ties.
    scores = draw(st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=count, max_size=count))
    labels = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    return np.array(scores, dtype=np.float32), labels


def counted(scores, labels, tasks=None, classes=CLASSES, sample_tasks=None):
    """The accuracy of scores [n, classes]; the label tells the task unless it is given."""
    home = {k: t for t, group in enumerate((tasks or {}).values()) for k in group}
    owner = [home.get(int(label), -1) for label in labels] if sample_tasks is None else sample_tasks
    return Accuracy.of(np.asarray(scores, dtype=np.float64), np.array(labels), classes, tasks, np.array(owner))


def best(row, among):
    return max(among, key=lambda k: (row[k], -k))


@given(scored())
def test_every_count_is_what_counting_gives(data):
    scores, labels = data
    found = counted(scores, labels, TASKS)
    home = {k: name for name, members in TASKS.items() for k in members}
    guesses = [best(row, range(5)) for row in scores]
    pairs = list(zip(guesses, labels, strict=True))
    assert found.overall == Share(sum(a == b for a, b in pairs), len(labels))
    for k, name in enumerate(CLASSES):
        assert found.by_class[name] == Share(sum(a == b == k for a, b in pairs), labels.count(k))
    for name, members in TASKS.items():
        own = [(row, label) for row, label in zip(scores, labels, strict=True) if home.get(label) == name]
        assert found.by_task[name] == Share(sum(best(row, range(5)) == label for row, label in own), len(own))
        assert found.known_by_task[name] == Share(sum(best(row, members) == label for row, label in own), len(own))


def test_tasks_that_share_classes_go_by_the_sample():
    """Domains: every task has all classes, so the label does not tell the task."""
    tasks = {"photo": (0, 1), "sketch": (0, 1)}
    scores = [[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]]
    found = counted(scores, [0, 1, 1], tasks, ("ant", "bee"), sample_tasks=[0, 1, 1])
    assert found.by_task == {"photo": Share(1, 1), "sketch": Share(1, 2)}
    assert found.known_by_task == found.by_task


def test_samples_of_no_task_count_overall_only():
    found = counted([[0, 0, 0, 0, 1.0], [1.0, 0, 0, 0, 0]], [4, 0], TASKS)
    assert found.overall == Share(2, 2)
    assert found.known == Share(1, 1)
    assert [share.samples for share in found.by_task.values()] == [1, 0]
    assert math.isnan(found.by_task["pets"].value)
    told = found.to_dict()
    assert told["tasks"][1]["accuracy"] is None
    assert told["tasks"][1]["interval"] == [0, 1]


@given(st.integers(1, 300), st.data())
def test_wilson_solves_its_equation(samples, data):
    """The ends are the p whose normal test just does not reject the share that was found."""
    right = data.draw(st.integers(0, samples))
    low, high = Share(right, samples).interval()
    share = right / samples
    assert 0 <= low <= share <= high <= 1
    z = 1.959963984540054
    for end in (low, high):
        assert end == share in (0, 1) or abs(share - end) == pytest.approx(
            z * math.sqrt(end * (1 - end) / samples), abs=1e-9
        )


def test_scores_that_are_no_numbers():
    with pytest.raises(InputError, match="the scores of 1 of 2 samples hold NaN or infinity"):
        counted([[0.0, 1.0], [math.nan, 1.0]], [0, 0], classes=("ant", "bee"))


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
