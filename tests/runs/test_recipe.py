"""Run directories and YAML configurations: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import Recipe, read_recipe

GOOD = {"base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}


def read(tmp_path, config, name="merge.yml"):
    path = tmp_path / name
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return read_recipe(path)


def refused(tmp_path, config):
    with pytest.raises(InputError) as error:
        read(tmp_path, config)
    return str(error.value)


def test_the_least_that_is_needed(tmp_path):
    recipe = read(tmp_path, GOOD)
    assert recipe == Recipe(tmp_path / "base", (tmp_path / "one", tmp_path / "two"), {"method": "tunable_magmax"})


def test_everything(tmp_path):
    text = """
merge_method: ties
base_model: /models/base
models:
  - model: /models/base
  - model: one
    parameters: {weight: 0.3}
  - model: ../two
    parameters: {weight: 1}
parameters: {lambda: 0.5, density: 0.4, seed: 3, exclude: ["head.*"]}
dtype: bfloat16
"""
    recipe = read(tmp_path, text)
    assert recipe.base == Path("/models/base")
    assert recipe.tasks == (tmp_path / "one", tmp_path / "../two")
    assert recipe.options == {
        "method": "ties",
        "scale": 0.5,
        "density": 0.4,
        "seed": 3,
        "exclude": ["head.*"],
        "weights": [0.3, 1],
        "out_dtype": "bfloat16",
    }


@pytest.mark.parametrize("listed", ["base", "./base", "x/../base"])
def test_the_base_among_the_models_is_skipped_with_its_weight(tmp_path, listed):
    models = [{"model": listed, "parameters": {"weight": 9}}, {"model": "one", "parameters": {"weight": 1}}]
    recipe = read(tmp_path, {"base_model": "base", "models": models})
    assert recipe.tasks == (tmp_path / "one",)
    assert recipe.options["weights"] == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modles": []}, "unknown key 'modles' (did you mean 'models'?)"),
        ({"parameters": {"sede": 1}}, "unknown key 'sede' in parameters (did you mean 'seed'?)"),
        ({"parameters": {"weight": 1}}, "unknown key 'weight' in parameters (did you mean 'weights'?)"),
        ({"parameters": {"scale": 1, "lambda": 1}}, "both 'scale' and 'lambda'"),
        ({"parameters": [1]}, "parameters is [1]: must be a mapping with the keys"),
        ({"slices": []}, "key 'slices' is not supported: merging by layer slices"),
        ({"tokenizer_source": "union"}, "key 'tokenizer_source' is not supported"),
        ({"out_dtype": "float16"}, "key 'out_dtype' is not supported: out_dtype (use dtype)"),
        ({"parameters": {"int8_mask": True}}, "key 'int8_mask' in parameters is not supported"),
        ({"parameters": {"normalize": True}}, "key 'normalize' in parameters is not supported"),
        ({"base_model": None}, "base_model is None: must be a text"),
        ({"models": []}, "models is []: must have at least 1 item"),
        ({"models": "one"}, "models is 'one': must be a list"),
        ({"models": [{"path": "one"}]}, "'models.0.model' is missing"),
        ({"models": [3]}, "models.0 is 3: must be a mapping with the keys model, name, parameters"),
        ({"models": [{"model": "one", "weight": 1}]}, "unknown key 'weight' in models.0"),
        (
            {"models": [{"model": "one", "parameters": {"density": 0.5}}]},
            "key 'density' in models.0.parameters is not supported: density by model",
        ),
        (
            {"models": [{"model": "one", "parameters": {"weight": [0, 1]}}]},
            "models.0.parameters.weight is [0, 1]: must be one number; weights by layer or by name are not supported",
        ),
        (
            {"models": [{"model": "one", "parameters": {"weight": 1}}, {"model": "two"}]},
            "some models have a weight and some have none",
        ),
        (
            {"models": [{"model": "one", "parameters": {"weight": 1}}], "parameters": {"weights": [1]}},
            "weights are given both in parameters and for the models",
        ),
    ],
)
def test_refused_with_the_reason(tmp_path, changes, words):
    assert words in refused(tmp_path, {**GOOD, **changes})


def test_all_problems_at_once(tmp_path):
    message = refused(tmp_path, {"modles": [], "slices": [], "parameters": {"sede": 1}})
    for word in ("'modles'", "'slices'", "'sede'", "'base_model' is missing", "'models' is missing"):
        assert word in message
    assert str(tmp_path / "merge.yml") in message


def test_values_are_among_all_problems(tmp_path):
    changes = {
        "merge_method": "magmaxx",
        "dtype": "float7",
        "parameters": {"scope": "modle", "seed": -1, "weights": [1]},
    }
    message = refused(tmp_path, {**GOOD, **changes})
    for words in (
        "unknown merge_method 'magmaxx' (did you mean 'magmax'?)",
        "unknown out_dtype 'float7'",
        "unknown scope 'modle' (did you mean 'model'?)",
        "seed is -1",
        "1 weights for 2 tasks",
    ):
        assert f"  - {words}" in message
    assert "at least 1 item" not in refused(tmp_path, {**GOOD, "models": [3]})


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b", "a: [1", "\x00"])
def test_what_is_not_a_configuration(tmp_path, text):
    assert "merge.yml" in refused(tmp_path, text)


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_recipe(tmp_path / "nowhere.yml")


def test_with_options():
    recipe = Recipe(Path("b"), (Path("t"),), {"weights": [1], "seed": 1})
    assert recipe.with_options(seed=None) == recipe
    assert recipe.with_options(seed=0).options == {"weights": [1], "seed": 0}
    assert recipe.with_options(budget=[5]).options == {"budget": [5], "seed": 1}
    assert recipe.with_options(budget=[5], weights=[2]).options == {"budget": [5], "weights": [2], "seed": 1}


# -- run directories --------------------------------------------------------------------------------------------------


def write_run(tmp_path, run):
    (tmp_path / "run.json").write_text(run if isinstance(run, str) else json.dumps(run))
    return tmp_path


def test_a_run(tmp_path):
    tasks = [{"name": "cats", "checkpoint": "task-1"}, {"name": "dogs", "checkpoint": "/elsewhere/task-2"}]
    recipe = read_recipe(write_run(tmp_path, {"version": 1, "base": "base", "tasks": tasks, "more": "is fine"}))
    assert recipe.base == tmp_path / "base"
    assert recipe.tasks == (tmp_path / "task-1", Path("/elsewhere/task-2"))
    assert recipe.names == ("cats", "dogs")


@pytest.mark.parametrize(
    "run",
    [
        "{",
        "[]",
        {"version": 2, "base": "b", "tasks": []},
        {"version": 1, "tasks": []},
        {"version": 1, "base": "b"},
        {"version": 1, "base": "b", "tasks": ["t"]},
        {"version": 1, "base": "b", "tasks": [{"name": "t"}]},
    ],
)
def test_a_broken_run(tmp_path, run):
    with pytest.raises(InputError, match=r"run\.json"):
        read_recipe(write_run(tmp_path, run))


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(InputError, match=r"has no run\.json"):
        read_recipe(tmp_path)
