"""The benchmark section of run.yaml: all problems at once, and a record that can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunable_magmax.data.benchmark import BenchmarkOptions
from tunable_magmax.errors import InputError

ROOT = Path("/runs")


@pytest.mark.parametrize(
    "given",
    [
        {"name": "cifar100", "data": "cifar", "tasks": 20, "order": {"file": "class_orders.json", "name": "A"}},
        {
            "name": "imagenet-r",
            "data": "/data/r",
            "tasks": 10,
            "split_seed": 4,
            "test_share": 0.25,
            "class_names": "n.txt",
        },
        {
            "name": "clinc150",
            "data": "clinc",
            "tasks": {"money": ["pay", 3], "travel": ["book"]},
            "per_class": {"train": 9},
        },
        {"name": "images", "data": "office", "scenario": "domain", "order": ["art", "photo"]},
        {"name": "texts", "data": "t", "tasks": 2, "order": {"seed": 5}, "text_column": "a", "label_column": "b"},
    ],
)
def test_the_record_is_complete_and_can_be_read(given):
    options = BenchmarkOptions.read(given, ROOT)
    record = json.loads(json.dumps(options.record()))
    assert BenchmarkOptions.read(record, Path("/elsewhere")) == options
    assert set(given) <= set(record)
    assert Path(record["data"]).is_absolute()
    assert "split_seed" in record


def test_relative_paths_count_from_the_root():
    given = {"name": "images", "data": "a", "tasks": 1, "class_names": "/b/names.txt", "order": {"file": "c.json"}}
    record = BenchmarkOptions.read(given, ROOT).record()
    assert (record["data"], record["class_names"], record["order"]) == (
        "/runs/a",
        "/b/names.txt",
        {"file": "/runs/c.json"},
    )


def test_all_problems_at_once():
    given = {
        "name": "cifar100",
        "tasks": 0,
        "order": "random",
        "scenario": "domain",
        "split_seed": -1,
        "per_class": {"train": 0},
        "domain_column": "x",
        "test_share": 2,
        "taks": 5,
    }
    with pytest.raises(InputError) as caught:
        BenchmarkOptions.read(given, ROOT)
    said = str(caught.value)
    for part in (
        "domain_column does not apply to cifar100, which takes name, tasks, order",
        "test_share does not apply to cifar100",
        "unknown key 'taks' (did you mean 'tasks'?)",
        "scenario is 'domain', but cifar100 has no domains; images and texts may have",
        "data is missing: where is cifar100?",
        "split_seed is -1: must be greater than or equal to 0",
        "per_class.train is 0: must be greater than or equal to 1",
        "test_share is 2: must be less than 1",
        "order is 'random': must be natural",
    ):
        assert part in said
    assert said.startswith("benchmark:\n  - ")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "cifar"}, r"name is 'cifar': must be 'cifar100', 'imagenet-r', .* \(did you mean 'cifar100'\?\)"),
        ({}, "'name' is missing"),
        ({"name": "images", "data": "x"}, "tasks is missing: give a number of tasks, or named groups"),
        (
            {"name": "images", "data": "x", "tasks": True},
            "tasks is True: must be a number of tasks, or",
        ),
        ({"name": "images", "data": 3, "tasks": 1}, "data is 3: must be a text"),
        (
            {"name": "images", "data": "x", "tasks": {}},
            "tasks is {}: must be a number of tasks, or",
        ),
        (
            {"name": "images", "data": "x", "tasks": {"a": []}},
            r"tasks is {'a': \[\]}: must be .* to lists of class",
        ),
        (
            {"name": "images", "data": "x", "tasks": {"a": "ant"}},
            r"tasks is {'a': 'ant'}: must be .* to lists of class",
        ),
        (
            {"name": "images", "data": "x", "tasks": 1, "scenario": "task"},
            "scenario is 'task': must be 'class' or 'domain'",
        ),
        (
            {"name": "images", "data": "x", "tasks": {"a": ["b"]}, "order": {"seed": 1}},
            "tasks are named groups, which come as they are listed; leave order out",
        ),
        (
            {"name": "images", "data": "x", "tasks": {"a": ["b"]}, "scenario": "domain"},
            "with scenario domain every domain is a task; leave tasks out",
        ),
        ({"name": "texts", "data": "x", "scenario": "domain"}, "domain_column is missing"),
        (
            {"name": "texts", "data": "x", "tasks": 1, "text_column": 3},
            "text_column is 3: must be a text",
        ),
    ],
)
def test_each_problem(given, says):
    with pytest.raises(InputError, match=says):
        BenchmarkOptions.read(given, ROOT)
