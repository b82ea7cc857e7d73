"""Accuracies against plain counting, and Wilson's interval against its definition."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Accuracy, Share, predict

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
    """The accuracy of scores [n, classes], as the evaluator counts it."""
    members = list((tasks or {}).values())
    home = {k: t for t, group in enumerate(members) for k in group}
    owner = [home.get(int(label), -1) for label in labels] if sample_tasks is None else sample_tasks
    predicted, known = predict(np.asarray(scores, dtype=np.float64), np.asarray(owner), members)
    known = known if tasks else None
    return Accuracy.of(predicted, labels, classes, tasks, sample_tasks=sample_tasks, known=known)


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
    for i, one in enumerate(TASKS):
        for j, other in enumerate(TASKS):
            count = sum(home.get(b) == one and home.get(a) == other for a, b in pairs)
            assert found.confusion[i][j] == count
        assert found.elsewhere[i] == sum(home.get(b) == one and a not in home for a, b in pairs)


@given(scored())
def test_json_holds_every_count(data):
    scores, labels = data
    for found in (
        counted(scores, labels, TASKS),
        counted(scores, labels),
        Accuracy.of(scores.argmax(axis=1), labels, CLASSES, TASKS, level=0.9),
    ):
        told = json.loads(json.dumps(found.to_dict()))
        assert "Wilson" in told["definitions"]["interval"]
        assert (told["right"], told["samples"], told["level"]) == (found.overall.right, len(labels), found.level)
        for name, share in found.by_class.items():
            row = told["classes"][CLASSES.index(name)]
            assert (row["name"], row["right"], row["samples"]) == (name, share.right, share.samples)
            assert row["interval"] == list(share.interval(found.level))
        assert [task["right"] for task in told["tasks"]] == [share.right for share in found.by_task.values()]
        known = found.known_by_task or {}
        assert [task.get("known_right") for task in told["tasks"]] == [
            known[name].right if known else None for name in found.tasks
        ]
        assert told["confusion"] == (found.confusion and [list(row) for row in found.confusion])


def test_tasks_that_share_classes_go_by_the_sample():
    """Domains: every task has all classes, so the label does not tell the task."""
    tasks = {"photo": (0, 1), "sketch": (0, 1)}
    scores = [[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]]
    found = counted(scores, [0, 1, 1], tasks, ("ant", "bee"), sample_tasks=[0, 1, 1])
    assert found.by_task == {"photo": Share(1, 1), "sketch": Share(1, 2)}
    assert found.known_by_task == found.by_task
    assert found.confusion is None
    assert found.elsewhere is None
    with pytest.raises(InputError, match="tasks share classes, so a label does not tell its task"):
        Accuracy.of([0], [0], ("ant", "bee"), tasks)


def test_samples_of_no_task_count_overall_only():
    found = counted([[0, 0, 0, 0, 1.0], [1.0, 0, 0, 0, 0]], [4, 0], TASKS)
    assert found.overall == Share(2, 2)
    assert found.known == Share(1, 1)
    assert found.task_samples == (1, 0)
    assert math.isnan(found.by_task["pets"].value)
    told = found.to_dict()
    assert told["tasks"][1]["accuracy"] is None
    assert told["tasks"][1]["interval"] == [0, 1]


def test_predictions_alone_do_not_tell_the_known_task():
    found = Accuracy.of([0, 2], [0, 0], CLASSES, TASKS)
    assert found.known is None
    assert found.known_by_task is None
    assert found.confusion == ((1, 1), (0, 0))
    assert "known_accuracy" not in found.to_dict()


@given(st.integers(1, 300), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_solves_its_equation(samples, data, level):
    """The ends are the p whose normal test just does not reject the share that was found."""
    right = data.draw(st.integers(0, samples))
    low, high = Share(right, samples).interval(level)
    share = right / samples
    assert 0 <= low <= share <= high <= 1
    z = {0.8: 1.2815515655446004, 0.95: 1.959963984540054, 0.99: 2.5758293035489004}[level]
    for end in (low, high):
        assert end in (0, 1) or abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / samples), abs=1e-9)


def test_wilson_by_the_book():
    """81 of 263: 0.2553 to 0.3662, the example of Newcombe (1998), table I."""
    low, high = Share(81, 263).interval()
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert Share(0, 20).interval()[0] == 0
    assert Share(20, 20).interval()[1] == 1


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (([0], [0, 1], CLASSES), {}, "1 predictions for 2 labels"),
        (([0], [-1], CLASSES), {}, "labels must be from 0 to 4, found -1"),
        (([0], [0], CLASSES, {"a": [0]}), {"sample_tasks": [1]}, "tasks of samples must be from -1 to 0"),
        (([0], [0], CLASSES), {"level": 95}, "the level of intervals is 95"),
    ],
)
def test_bad_input(arguments, options, says):
    with pytest.raises(InputError, match=says):
        Accuracy.of(*arguments, **options)


def test_scores_that_are_no_numbers():
    with pytest.raises(InputError, match="the scores of 1 of 2 samples hold NaN or infinity"):
        predict(np.array([[0.0, 1.0], [math.nan, 1.0]]), np.array([0, 0]), [(0, 1)])
