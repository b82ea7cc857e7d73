"""Class orders and tasks: permutations or errors that name the fault; sizes that differ by at most one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.data.arrays import held_out, limited, shuffled
from tunable_magmax.data.benchmark import equal_parts, order_indices
from tunable_magmax.data.data_sets import read_section
from tunable_magmax.errors import InputError

ANIMALS = ("ant", "bee", "cat", "dog_fish")


def order(value, root=Path()):
    return read_section({"name": "images", "data": "x", "tasks": 2, "order": value}, root).order


@given(st.integers(1, 60), st.integers(1, 60))
def test_parts_are_a_partition_with_the_larger_first(classes, tasks):
    if tasks > classes:
        with pytest.raises(InputError, match=f"tasks is {tasks}, but there are only {classes} classes"):
            equal_parts(range(classes), tasks)
        return
    parts = equal_parts(range(classes), tasks)
    assert [index for part in parts for index in part] == list(range(classes))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_a_seed_means_the_same_order_for_ever():
    # Written down once; results of a run depend on it.
    assert shuffled(10, 3) == [2, 6, 4, 8, 3, 1, 7, 5, 9, 0]
    assert order_indices(order({"seed": 3}), tuple("abcdefghij"), "texts") == shuffled(10, 3)
    assert shuffled(10, 4) != shuffled(10, 3)


def test_orders_by_name_and_index():
    assert order_indices(order("natural"), ANIMALS, "images") == [0, 1, 2, 3]
    assert order_indices(order(["dog_fish", 0, "cat", "bee"]), ANIMALS, "images") == [3, 0, 2, 1]
    with pytest.raises(InputError, match="none is: 3"):  # a number counts from 0, whatever the classes are called
        order_indices((0, 1, 3), ("1", "2", "3"), "images")


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (["ant", "beee", "cat", "dog_fish"], r"'beee' \(did you mean 'bee'\?\)"),
        ([0, 1, 2, 7], "7"),
        (["ant", "ant", "bee", "cat", "dog_fish"], "missing or named twice: 'ant'$"),
        (["ant", "cat"], "missing or named twice: 'bee', 'dog_fish'"),
    ],
)
def test_what_is_no_order(items, says):
    with pytest.raises(InputError, match=says):
        order_indices(tuple(items), ANIMALS, "images")


def test_files_of_orders(tmp_path):
    content = {
        "about": "text",
        "images": {"A": [3, 2, 1, 0], "B": ["bee", "ant", "cat", "dog_fish"]},
        "imagenet_r": {"A": [1, 0]},
    }
    (tmp_path / "orders.json").write_text(json.dumps(content))
    (tmp_path / "text.json").write_text("A: 1, 2")

    def read(benchmark, classes=ANIMALS, file="orders.json", name="A"):
        return order_indices(order({"file": file, "name": name}, tmp_path), classes, benchmark)

    assert read("images", name="B") == [1, 0, 2, 3]
    assert read("imagenet-r", ("ant", "bee")) == [1, 0]
    for says, benchmark, value in [
        ("'D' of images, but images has A, B", "images", {"name": "D"}),
        ("'A' of texts", "texts", {}),
        ("none is: 3$", "images", {"classes": ("ant", "bee", "cat")}),
        (r"text\.json", "images", {"file": "text.json"}),
        (r"none\.json does not exist", "images", {"file": "none.json"}),
    ]:
        with pytest.raises(InputError, match=says):
            read(benchmark, **value)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=80), st.floats(0.01, 0.99), st.integers(0, 9))
def test_splits_are_disjoint_and_complete(groups, share, seed):
    train, test = held_out(range(len(groups)), groups, share, seed, least=1)
    assert sorted(train + test) == list(range(len(groups)))
    assert (train, test) == (sorted(train), sorted(test))
    for name in set(groups):
        here = sum(groups[position] == name for position in test)
        assert abs(here - groups.count(name) * share) <= 1
        assert here < groups.count(name)
        assert here > 0 or groups.count(name) == 1


def test_the_limit_is_a_seeded_draw_of_each_group():
    groups = ["a", "b"] * 50
    drawn = limited(range(100), groups, 5, seed=1)
    assert [sum(groups[p] == name for p in drawn) for name in "ab"] == [5, 5]
    assert drawn == limited(range(100), groups, 5, seed=1)
    assert drawn != limited(range(100), groups, 5, seed=2)
    # Of a larger limit the smaller one is a part.
    assert set(drawn) < set(limited(range(100), groups, 9, seed=1))
    assert limited([3, 5], groups, 9, seed=1) == [3, 5]
