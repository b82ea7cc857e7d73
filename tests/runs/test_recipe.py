"""Run directories and YAML configurations: what is read, and what is refused by name."""

from pathlib import Path

import pytest
import yaml

from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import read_options
from tunable_magmax.runs.recipe import read_recipe

GOOD = {"base_model": "base", "models": [{"model": "one"}, {"model": "two"}]}


def read(tmp_path, config, name="merge.yml"):
    path = tmp_path / name
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return read_recipe(path)


def refused(tmp_path, config):
    with pytest.raises(InputError) as error:
        read(tmp_path, config)
    return str(error.value)


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


# -- files of mergekit ------------------------------------------------------------------------------------------------


def test_ties_as_mergekit_means_it(tmp_path):
    models = [
        {"model": "base"},
        {"model": "one", "parameters": {"weight": 0.3, "density": 0.5}},
        {"model": "two", "parameters": {"weight": 1}},
    ]
    config = {"merge_method": "ties", "base_model": "base", "models": models, "dtype": "float32"}
    config |= {"out_dtype": "bfloat16", "tokenizer_source": "base", "parameters": {"density": 0.9, "int8_mask": True}}
    recipe = read(tmp_path, config)
    assert recipe.options == {
        "method": "ties",
        "weights": [0.3, 1],
        "density": [0.5, 0.9],
        "scope": "tensor",
        "normalize": True,
        "scale": 1,
        "out_dtype": "bfloat16",
    }


def test_defaults_are_mergekits_unless_the_file_has_a_parameter_of_ours(tmp_path):
    ties = {**GOOD, "merge_method": "ties"}
    theirs = {"method": "ties", "density": 1, "scope": "tensor", "normalize": True, "scale": 1}
    assert read(tmp_path, ties).options == theirs
    assert read(tmp_path, {**ties, "parameters": {"lambda": 0.5}}).options == {**theirs, "scale": 0.5}
    assert read(tmp_path, {**ties, "parameters": {"normalize": False}}).options == {**theirs, "normalize": False}
    assert read(tmp_path, {**ties, "parameters": {"seed": 1}}).options == {"method": "ties", "seed": 1}
    sums = {**GOOD, "merge_method": "task_arithmetic", "parameters": {"weight": 0.5}}
    assert read(tmp_path, sums).options == {"method": "task_arithmetic", "scale": 1, "weights": [0.5, 0.5]}
    sums["parameters"]["normalize"] = True
    assert read(tmp_path, sums).options == {"method": "average", "scale": 1, "weights": [0.5, 0.5]}
    assert "scale" not in read(tmp_path, {**GOOD, "merge_method": "magmax"}).options


@pytest.mark.parametrize("base", [None, "one", "other"])
def test_linear_is_a_mean_of_whole_models(tmp_path, base):
    models = [{"model": name, "parameters": {"weight": weight}} for name, weight in (("one", 1), ("two", 2))]
    recipe = read(tmp_path, {"merge_method": "linear", "models": models} | ({"base_model": base} if base else {}))
    assert recipe.base == tmp_path / (base or "one")
    assert recipe.tasks == (tmp_path / "one", tmp_path / "two")
    assert recipe.options == {"method": "average", "scale": 1, "weights": [1, 2]}


@pytest.mark.parametrize("listed", ["base", "./base", "x/../base"])
def test_the_base_among_the_models_is_skipped_with_its_weight(tmp_path, listed):
    models = [{"model": listed, "parameters": {"weight": 9}}, {"model": "one", "parameters": {"weight": 1}}]
    recipe = read(tmp_path, {"base_model": "base", "models": models})
    assert recipe.tasks == (tmp_path / "one",)
    assert recipe.options["weights"] == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modles": []}, "'modles'"),
        ({"parameters": {"sede": 1}}, "unknown key 'sede' in parameters (did you mean 'seed'?)"),
        ({"parameters": {"scale": 1, "lambda": 1}}, "'lambda'"),
        ({"parameters": [1]}, "parameters is [1]"),
        ({"slices": []}, "'slices'"),
        ({"tokenizer_source": "union"}, "'union'"),
        ({"parameters": {"rescale": True}}, "'rescale'"),
        ({"parameters": {"normalize": 3}}, "normalize is 3"),
        ({"parameters": {"normalize": False}}, "normalize is False"),
        ({"models": [{"model": "one", "merge_method": "ties"}]}, "'merge_method'"),
        ({"merge_method": "linear", "parameters": {"lambda": 2}}, "linear has no scale"),
        ({"merge_method": "linear", "parameters": {"normalize": False}}, "sum to 1"),
        ({"base_model": None}, "'base_model'"),
        ({"models": []}, "models is []"),
        ({"models": "one"}, "models is 'one'"),
        ({"models": [{"path": "one"}]}, "models.0.model"),
        ({"models": [3]}, "models.0 is 3"),
        ({"models": [{"model": "one", "weight": 1}]}, "'weight'"),
        ({"models": [{"model": "one", "parameters": {"weight": 1}}, {"model": "two"}]}, "some have none"),
        ({"models": [{"model": "one", "parameters": {"weight": 1}}], "parameters": {"weights": [1]}}, "given both"),
    ],
)
def test_refused_with_the_reason(tmp_path, changes, words):
    assert words in refused(tmp_path, {**GOOD, **changes})


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    models = [{"modle": "one"}, {"model": "two", "parameters": {"weight": "x"}}]
    said = refused(tmp_path, {"models": models, "parameters": {"scop": "model", "rescale": True, "weight": [1]}})
    words = ("modle", "weight is 'x'", "base_model", "scop'", "'rescale'", "weight is [1]")
    assert [word for word in words if word not in said] == []
    parameters = {"lambda": "big", "seed": 1.5, "scope": "all", "density": 7}
    options = read(tmp_path, {**GOOD, "dtype": "int3", "parameters": parameters}).options
    with pytest.raises(InputError) as error:
        read_options(2, **options)
    assert [word for word in ("'int3'", "'big'", "1.5", "'all'", "density is 7") if word not in str(error.value)] == []


@pytest.mark.parametrize("key", ["weight", "density"])
@pytest.mark.parametrize("value", [[0, 1], [{"filter": "mlp", "value": 0.5}, {"value": 1}]])
def test_values_by_layer_or_filter_are_refused(tmp_path, key, value):
    one = [{"model": "one", "parameters": {key: value}}, {"model": "two"}]
    for changes in ({"models": one}, {"parameters": {key: value}}):
        assert f"parameters.{key} is {value!r}: must be one number" in refused(tmp_path, {**GOOD, **changes})


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b", "a: [1", "\x00"])
def test_what_is_not_a_configuration(tmp_path, text):
    assert "merge.yml" in refused(tmp_path, text)
