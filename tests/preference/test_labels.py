"""Preferences from labels."""

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


@pytest.mark.parametrize(
    ("tasks", "labels", "options", "message"),
    [
        (TASKS, [], {}, "no labels: give at least one label of the site"),
        ([], ["cat"], {}, "must be a list with one class-to-count mapping per task"),
        ([{"a": math.nan}], ["a"], {}, "task 1: the count of class 'a' must be a number >= 0, not nan"),
        ([{"a": 0}], ["a"], {}, "no task has a class with samples; the tasks' class counts are all 0"),
        (TASKS, [0.5], {}, "a label must be a class name or a class index, not 0.5"),
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
