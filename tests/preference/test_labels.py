"""Preferences from labels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunable_magmax.errors import InputError
from tunable_magmax.preference.preference import Preference

TASKS = [{"cat": 30, "dog": 10}, {"car": 5, "bus": 5, "cat": 10}, {"rose": 7}]
LABELS = ["cat", "cat", "dog", "bus"]


def test_inner_product_by_hand() -> None:
    # r(task 1) = cat 3/4, dog 1/4; r(task 2) = car 1/4, bus 1/4, cat 1/2; r(meta) = cat 1/2, dog 1/4, bus 1/4.
    # sim: 3/8 + 1/16 = 7/16; 1/4 + 1/16 = 5/16; 0.
    found = Preference.from_labels(TASKS, LABELS, similarity="inner")
    assert found.provenance["similarities"] == [7 / 16, 5 / 16, 0]
    assert found.weights == pytest.approx((7 / 12, 5 / 12, 0), abs=1e-15)
    assert (found.method, found.provenance["samples"], found.intervals) == ("label-inner", 4, None)


def test_the_product_favours_tasks_of_few_classes_and_counting_does_not() -> None:
    tasks = [{f"s{k}": 10 for k in range(2)}, {f"l{k}": 10 for k in range(30)}]
    labels = ["s0", "s1"] * 10 + [f"l{k}" for k in range(20)]
    assert Preference.from_labels(tasks, labels, similarity="inner").weights[0] > 0.9
    counted = Preference.from_labels(tasks, labels)
    assert counted.weights[0] == pytest.approx(0.5, abs=0.03)
    assert counted.prior is not None
    assert counted.prior.shares["s0"] == pytest.approx(0.25, abs=0.05)


def test_indices_names_and_arrays_are_the_same() -> None:
    by_name = Preference.from_labels([{"a": 1, "b": 3}, {"c": 2}], ["a", "c", "b"])
    for tasks in ([{0: 1, 1: 3}, {2: 2}], [[1, 3, 0], [0, 0, 2]], torch.tensor([[1, 3, 0], [0, 0, 2]])):
        for labels in ([0, 2, 1], np.array([0, 2, 1]), torch.tensor([0, 2, 1])):
            found = Preference.from_labels(tasks, labels)  # type: ignore[arg-type]
            assert (found.weights, found.intervals) == (by_name.weights, by_name.intervals)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(["cat", "dog", "car", "bus", "rose"]), min_size=2, max_size=30), st.randoms())
def test_invariances(labels: list[str], random: Any) -> None:
    for similarity in ("inner", "count"):
        found = Preference.from_labels(TASKS, labels, similarity=similarity)
        shuffled = random.sample(labels, len(labels))
        again = Preference.from_labels(TASKS, shuffled, similarity=similarity)
        assert (again.weights, again.intervals) == (found.weights, found.intervals)
        order = random.sample(range(3), 3)
        moved = Preference.from_labels([TASKS[t] for t in order], labels, similarity=similarity)
        # Another order of the tasks draws other random numbers.
        assert moved.weights == pytest.approx([found.weights[t] for t in order], abs=0.08)
        renamed = {name: name[::-1] for name in ("cat", "dog", "car", "bus", "rose")}
        tasks = [{renamed[name]: count for name, count in task.items()} for task in TASKS]
        other = Preference.from_labels(tasks, [renamed[name] for name in labels], similarity=similarity)
        assert other.weights == found.weights


def test_labels_of_no_task_are_counted_named_and_left_out() -> None:
    with pytest.warns(UserWarning, match=r"3 \('bird', 'fish'\) of 7 labels belong to no task and were left out"):
        found = Preference.from_labels(TASKS, [*LABELS, "fish", "bird", "fish"])
    assert found.weights == Preference.from_labels(TASKS, LABELS).weights
    assert found.provenance["unknown"] == 3


def test_nothing_left() -> None:
    message = "all 2 labels belong to no task: they are 'bird', 'fish', and the tasks' classes are 'cat', 'dog', "
    with pytest.raises(InputError) as error:
        Preference.from_labels(TASKS, ["bird", "fish"])
    assert message in str(error.value)
    with pytest.raises(InputError, match="they are 0, 1, and the tasks' classes are 'cat', 'dog'"):
        Preference.from_labels(TASKS, [0, 1])
    with pytest.raises(InputError, match="they are 'cat', and the tasks' classes are 0, 1"):
        Preference.from_labels([[1, 2]], ["cat"])


def test_a_class_without_samples_is_not_a_class_of_the_task() -> None:
    with pytest.raises(InputError, match="belong to no task"):
        Preference.from_labels([{"a": 0, "b": 1}], ["a"])


def test_one_label_and_one_task() -> None:
    one = Preference.from_labels(TASKS, ["rose"])
    assert np.argmax(one.weights) == 2
    assert one.intervals is not None
    assert one.intervals[2][1] - one.intervals[2][0] > 0.5
    assert Preference.from_labels(TASKS[:1], LABELS[:2]).weights == (1,)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    tasks, truth, hits = [{0: 1}, {1: 1}, {2: 1}], np.array([0.5, 0.3, 0.2]), []
    for _ in range(200):
        found = Preference.from_labels(tasks, rng.choice(3, size=80, p=truth))
        assert found.intervals is not None
        hits.append([low <= p <= high for (low, high), p in zip(found.intervals, truth, strict=True)])
    assert 0.82 < np.mean(hits) < 0.96


@pytest.mark.parametrize(
    ("tasks", "labels", "options", "message"),
    [
        (TASKS, [], {}, "no labels: give at least one label of the site"),
        ([], ["cat"], {}, "must be a list with one class-to-count mapping per task"),
        (TASKS[0], ["cat"], {}, "must be a list with one class-to-count mapping per task"),
        ([{"a": -1}], ["a"], {}, "task 1: the count of class 'a' must be a number >= 0, not -1"),
        ([{"a": math.nan}], ["a"], {}, "task 1: the count of class 'a' must be a number >= 0, not nan"),
        ([{"a": "x"}], ["a"], {}, "task 1: the count of class 'a' must be a number >= 0, not 'x'"),
        ([{"a": 0}], ["a"], {}, "no task has a class with samples; the tasks' class counts are all 0"),
        (TASKS, [0.5], {}, "a label must be a class name or a class index, not 0.5"),
        (TASKS, "cat", {}, "labels: expected a list, not 'cat'"),
        (TASKS, LABELS, {"similarity": "cosine"}, "similarity must be 'inner' or 'count', not 'cosine'"),
        (
            [{torch.tensor(1): 2, torch.tensor(1): 3}],
            [1],
            {},
            "task 1: class 1 is named twice; class names must differ",
        ),
    ],
)
def test_bad_input(tasks: Any, labels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.from_labels(tasks, labels, **options)
    assert message in str(error.value)
