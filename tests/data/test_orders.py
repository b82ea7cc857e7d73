"""Class orders and tasks: permutations or errors that name the fault; sizes that differ by at most one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax.data.benchmark import BenchmarkOptions
from tunable_magmax.data.class_names import read_class_names
from tunable_magmax.data.orders import equal_parts, named_groups, order_indices, permutation, sizes_sentence
from tunable_magmax.data.splits import limited, shuffled, split_all, split_groups
from tunable_magmax.errors import InputError

ANIMALS = ("ant", "bee", "cat", "dog_fish")
SHARED = Path(__file__).resolve().parents[3] / "shared"


def order(given, root=Path()):
    section = {"name": "images", "data": "x", "tasks": 2, "order": given}
    return BenchmarkOptions.read(section, root).order


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
    assert sum(sizes) == classes
    assert sizes_sentence(sizes).startswith(f"{classes} classes in {tasks} task")


@given(st.integers(0, 200), st.integers(0, 2**70))
def test_a_seed_gives_a_permutation(count, seed):
    assert sorted(shuffled(count, seed)) == list(range(count))


def test_a_seed_means_the_same_order_for_ever():
    # Written down once; results of a run depend on it.
    assert shuffled(10, 3) == [2, 6, 4, 8, 3, 1, 7, 5, 9, 0]
    assert order_indices(order({"seed": 3}), tuple("abcdefghij"), "texts") == shuffled(10, 3)
    assert shuffled(10, 4) != shuffled(10, 3)


def test_orders_by_name_and_index():
    assert (
        order_indices(order(None), ANIMALS, "images")
        == order_indices(order("natural"), ANIMALS, "images")
        == [0, 1, 2, 3]
    )
    assert order_indices(order(["dog fish", 0, "Cat", "bee"]), ANIMALS, "images") == [3, 0, 2, 1]


def test_names_that_differ_only_in_case_stay_apart():
    assert permutation(["Crane", "crane"], ("crane", "Crane"), "order") == [1, 0]
    with pytest.raises(InputError, match="no class is 'CRANE'"):
        permutation(["CRANE", "crane"], ("crane", "Crane"), "order")


def test_what_is_no_order():
    with pytest.raises(
        InputError,
        match=r"not an order of the 4 classes \(no class is 'beee' \(did you mean 'bee'\?\), index 7 \(there are 4, 0 "
        r"to 3\); named twice: 'ant'; missing: 'bee', 'cat', 'dog_fish'\); name each exactly once",
    ):
        permutation(["ant", "ant", "beee", 7], ANIMALS, "order")


@pytest.mark.parametrize("given", ["alphabetical", {"seed": -1}, {"seed": True}, {"name": "A"}, 3, {"file": 3}])
def test_forms_that_are_not_known(given):
    with pytest.raises(InputError) as caught:
        order(given)
    assert len(str(caught.value).splitlines()) == 2
    assert f"order is {given!r}: must be natural, {{seed: 3}}, {{file: class_orders.json, name: A}}" in str(
        caught.value
    )


def test_yaml_takes_some_names_for_truth_values():
    with pytest.raises(InputError, match="quote names like yes and no"):
        order(["ant", True])


@pytest.mark.parametrize("given", ["natural", {"seed": 3}, ["ant", 2], {"file": "/a/b.json", "name": "A"}])
def test_what_is_recorded_can_be_read(given):
    section = {"name": "images", "data": "x", "tasks": 2, "order": given}
    recorded = BenchmarkOptions.read(section, Path()).record()["order"]
    assert recorded == given
    assert order(recorded) == order(given)


def test_files_of_orders(tmp_path):
    content = {
        "about": "text",
        "images": {"A": [3, 2, 1, 0], "B": ["bee", "ant", "cat", "dog_fish"]},
        "imagenet_r": {"A": [1, 0]},
        "imagenet_r_classes": ["bee", "ant"],
    }
    (tmp_path / "orders.json").write_text(json.dumps(content))
    (tmp_path / "list.json").write_text("[1, 0, 2, 3]")

    def read(benchmark, classes=ANIMALS, **given):
        return order_indices(order(given, tmp_path), classes, benchmark)

    assert read("images", file="orders.json", name="B") == [1, 0, 2, 3]
    assert read("images", file="orders.json") == [3, 2, 1, 0]
    # The indices count in the file's own list, whatever else the data's list is.
    assert read("imagenet-r", ("ant", "bee"), file="orders.json", name="A") == [0, 1]
    assert read("images", file="list.json") == [1, 0, 2, 3]
    with pytest.raises(InputError, match=r"no order 'D' \(for images it holds A, B\)"):
        read("images", file="orders.json", name="D")
    with pytest.raises(InputError, match="for texts it holds none"):
        read("texts", file="orders.json", name="A")
    with pytest.raises(InputError, match="order A: not an order of the 3 classes"):
        read("images", ("ant", "bee", "cat"), file="orders.json", name="A")
    (tmp_path / "text.json").write_text("A: 1, 2")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        read("images", file="text.json")
    with pytest.raises(
        InputError, match=r"none\.json does not exist: a file of class orders is a JSON list of all"
    ) as no:
        read("images", file="none.json")
    assert str(no.value).endswith("or order the classes by a seed: order: {seed: 3}")
    with pytest.raises(InputError, match="holds one order without a name"):
        read("images", file="list.json", name="A")


def test_the_documented_file_of_orders_is_read_as_the_page_says(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "orders.json").write_text(shown)
    assert order_indices(order({"file": "orders.json"}, tmp_path), ("ant", "bee", "cat"), "images") == [2, 0, 1]
    named = order({"file": "orders.json", "name": "B"}, tmp_path)
    assert order_indices(named, ("ant", "bee", "cat"), "images") == [1, 2, 0]
    birds = order({"file": "orders.json", "name": "A"}, tmp_path)
    assert order_indices(birds, ("jay", "owl"), "imagenet-r") == [1, 0]  # indices count in the file's own list


def test_groups():
    assert named_groups({"sea": ["dog fish"], "land": [2, "ant"]}, ANIMALS) == {"sea": (3,), "land": (2, 0)}
    with pytest.raises(
        InputError,
        match=r"'land' names 'anti' \(did you mean 'ant'\?\), which is no class; 'air' holds 'bee' and so does 'land'; "
        "'air' holds 'cat' twice",
    ):
        named_groups({"land": ["anti", "bee"], "air": ["bee", "cat", "cat"]}, ANIMALS)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=80), st.floats(0.01, 0.99), st.integers(0, 9))
def test_splits_are_disjoint_and_complete(groups, share, seed):
    for train, test in (split_groups(groups, share, seed), split_all(len(groups), share, seed)):
        assert sorted(train + test) == list(range(len(groups)))
        assert train == sorted(train)
        assert test == sorted(test)
    train, test = split_groups(groups, share, seed)
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


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", '["x y", "z"]', ("x y", "z")),
        ("a.json", '{"0": "x", "1": "z"}', {"0": "x", "1": "z"}),
        ("a.txt", "x y\n\nz\n", ("x y", "z")),
        (
            "a.txt",
            "n01443537 goldfish\nn01484850 great white shark\n",
            {"n01443537": "goldfish", "n01484850": "great_white_shark"},
        ),
        ("a.txt", "0\tx y\n1\tz\n", {"0": "x y", "1": "z"}),
    ],
)
def test_class_names(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    assert read_class_names(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "[1]", "expected a JSON list"),
        ("a.json", "[", "not JSON"),
        ("a.txt", "", "expected a JSON list"),
        ("a.txt", "x\nx\n", "'x' named more than once"),
    ],
)
def test_bad_class_names(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=says):
        read_class_names(tmp_path / name)


@pytest.mark.skipif(
    not (SHARED / "data/class_orders.json").exists(), reason="shared/data/class_orders.json is not here"
)
def test_the_paper_s_order_of_imagenet_r():
    path = SHARED / "data" / "class_orders.json"
    content = json.loads(path.read_text())
    names = tuple(content["imagenet_r_classes"])
    assert order_indices(order({"file": str(path), "name": "A"}), names, "imagenet-r") == content["imagenet_r"]["A"]
    backwards = order_indices(order({"file": str(path), "name": "A"}), names[::-1], "imagenet-r")
    assert [names[::-1][k] for k in backwards] == [names[k] for k in content["imagenet_r"]["A"]]
