"""`tmx merge`: what it takes to be merged, tasks by name, its options, JSON and exit codes."""

import json

import pytest
import torch
import yaml
from adapters import factors, save_adapter
from safetensors.torch import load_file, save_file

import tunable_magmax
from tunable_magmax import MergeReport, Preference
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import read_tasks


def merged(sequence, **options):
    base, *tasks = sequence.state_dicts
    return tunable_magmax.merge_state_dicts(base, tasks, **options)


def assert_equal(path, expected):
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def write_yaml(sequence, **changes):
    pairs = zip(sequence.tasks, (3, 1, 0.5), strict=True)
    config = {
        "merge_method": "tunable_magmax",
        "base_model": "base.safetensors",
        "models": [{"model": path.name, "parameters": {"weight": weight}} for path, weight in pairs],
        "parameters": {"scale": 0.5, "seed": 7},
        **changes,
    }
    path = sequence.folder / "merge.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_run(sequence, names=("cats", "dogs", "birds")):
    tasks = [{"name": name, "checkpoint": path.name} for name, path in zip(names, sequence.tasks, strict=True)]
    (sequence.folder / "run.json").write_text(json.dumps({"version": 1, "base": "base.safetensors", "tasks": tasks}))
    return sequence.folder


# -- what is merged ---------------------------------------------------------------------------------------------------


def test_checkpoints_by_option(tmx, sequence, tmp_path):
    weights = ["--weights", "3,1,0", "--scale", "-0.5", "--seed", 7]
    result = tmx("merge", *sequence.arguments, *weights, "-o", tmp_path / "out")
    assert result.code == 0
    expected = merged(sequence, weights=[3, 1, 0], scale=-0.5, seed=7)
    assert_equal(tmp_path / "out/model.safetensors", expected.state_dict)
    assert expected.report.counts is not None
    for count in expected.report.counts:
        assert f" {count} elements" in result.out


def test_a_preference_carries_its_scale_unless_another_is_given(tmx, sequence, tmp_path):
    Preference((1, 1, 2), scale=0.25).save(tmp_path / "site.json")
    command = ["merge", *sequence.arguments, "--preference", tmp_path / "site.json", "--json", "--overwrite"]
    assert json.loads(tmx(*command, "-o", tmp_path / "out").out)["scale"] == 0.25
    assert json.loads(tmx(*command, "-o", tmp_path / "out", "--scale", "2").out)["scale"] == 2


def test_a_yaml_and_options_that_win_over_it(tmx, sequence, tmp_path):
    config = write_yaml(sequence)
    assert tmx("merge", config, "-o", tmp_path / "a.safetensors").code == 0
    assert_equal(tmp_path / "a.safetensors", merged(sequence, weights=[3, 1, 0.5], scale=0.5, seed=7).state_dict)
    assert tmx("merge", config, "--seed", 8, "--weights", "1,1,1", "-o", tmp_path / "b.safetensors").code == 0
    assert_equal(tmp_path / "b.safetensors", merged(sequence, weights=[1, 1, 1], scale=0.5, seed=8).state_dict)


def test_the_saved_configuration_gives_the_same_merge_again(tmx, sequence, tmp_path):
    options = ["--weights", "3,1,0.5", "--scope", "tensor", "--exclude", "head.*", "--dtype", "bfloat16"]
    assert tmx("merge", *sequence.arguments, *options, "-o", tmp_path / "out").code == 0
    config = tmp_path / "out/tmx-config.yaml"
    assert tmx("merge", config, "-o", tmp_path / "logged").code == 0  # the log beside it says where the inputs are
    (tmp_path / "out.log").unlink()
    assert tmx("merge", config, "-o", tmp_path / "unknown").code == 2
    assert tmx("merge", config, *sequence.arguments, "-o", tmp_path / "given").code == 0
    assert tmx("merge", config, *sequence.arguments[:-2], "-o", tmp_path / "fewer").code == 2
    first = (tmp_path / "out/model.safetensors").read_bytes()
    assert [(tmp_path / name / "model.safetensors").read_bytes() for name in ("logged", "given")] == [first] * 2


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        (None, []),
        (None, ["--base", "base.safetensors"]),
        ("", ["--base", "base.safetensors"]),
        ("nowhere", []),
        ("task1.safetensors", []),
    ],
)
def test_sources_that_say_too_little_or_too_much_are_refused(tmx, sequence, tmp_path, source, arguments):
    places = [] if source is None else [write_run(sequence) / source if source == "" else tmp_path / source]
    assert tmx("merge", *places, *arguments, "-o", tmp_path / "out").code == 2
    assert not (tmp_path / "out").exists()


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (["--weights", "1,2"], "2 weights"),
        (["--weights", "1,,2"], "'1,,2'"),
        (["--weights", "a=1,a=2"], "'a=1,a=2'"),
        (["--method", "magmx"], "'magmax'"),
        (["--method", "magmax", "--weights", "1,1,1"], "magmax"),
        (["--scope", "modle"], "modle"),
        (["--scale", "matchd"], "matchd"),
        (["--seed", "-1"], "-1"),
        (["--dtype", "float8"], "float8"),
        (["--memory", "lots"], "'lots'"),
        (["--shard-size", "0"], "shard size"),
        (["--threads", "0"], "threads"),
        (["--wieghts", "1,1,1"], "--weights"),
        (["--preference", "nowhere.json"], "nowhere.json"),
        (["--include", "layer.*"], "'layers.*'"),
        (["--workers", 2], "2"),
        (["--device", "tpu"], "'tpu'"),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(tmx, sequence, tmp_path, given, value):
    before = sorted(tmp_path.iterdir())
    for dry_run in ([], ["--dry-run"]):
        result = tmx("merge", *sequence.arguments, *given, "-o", tmp_path / "out", *dry_run)
        assert (result.code, result.out) == (2, "")
        assert value in result.err
    assert sorted(tmp_path.iterdir()) == before


# -- what it prints ---------------------------------------------------------------------------------------------------


def test_json_is_the_report_and_nothing_else(tmx, sequence, tmp_path):
    result = tmx("merge", *sequence.arguments, "--json", "-o", tmp_path / "out.safetensors")
    assert not result.err
    assert MergeReport.from_json(result.out) == MergeReport.from_json((tmp_path / "out.report.json").read_text())


def test_warnings_and_notes_are_given_once_in_each_command(tmx, sequence, tmp_path):
    torch.save(sequence.state_dicts[1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    arguments = ["--base", sequence.base, "--task", tmp_path / "old.pt", "--task", sequence.tasks[1]]
    command = ["merge", *arguments, *["--exclude", "nothing.*"] * 2, "--overwrite", "-o", tmp_path / "out.safetensors"]
    facts = json.loads(tmx(*command, "--dry-run", "--json").out)
    assert (len(facts["warnings"]), len(facts["notes"])) == (1, 1)
    for _ in range(2):
        assert tmx(*command).err == f"note: {facts['notes'][0]}\nwarning: {facts['warnings'][0]}\n"
    assert json.loads(tmx(*command, "--json").out)["warnings"] == [*facts["warnings"], *facts["notes"]]
    # The report beside the weights has no path in it: it is the same wherever the merge is made.
    assert MergeReport.from_json((tmp_path / "out.report.json").read_text()).warnings == tuple(facts["warnings"])


def test_a_dry_run_says_what_the_merge_does_and_reads_no_values(tmx, sequence, tmp_path):
    command = ["merge", *sequence.arguments, "--weights", "3,1,0", "--json", "-o", tmp_path / "out"]
    before = sorted(tmp_path.iterdir())
    facts = json.loads(tmx(*command, "--dry-run").out)
    assert sorted(tmp_path.iterdir()) == before
    report = json.loads(tmx(*command).out)
    assert [facts["elements"], facts["budget"], facts["merged"], facts["copied"]] == [
        *(report["elements"], report["counts"], list(report["tensors"]), report["copied"])
    ]
    assert (facts["bytes"], facts["files"]) == ((tmp_path / "out/model.safetensors").stat().st_size, 1)
    bad = {
        name: tensor * torch.nan if tensor.is_floating_point() else tensor
        for name, tensor in sequence.state_dicts[2].items()
    }
    save_file(bad, sequence.tasks[1])
    assert tmx(*command, "--overwrite", "--dry-run").code == 0
    assert tmx(*command, "--overwrite").code == 2


def test_a_merge_says_that_transformers_will_miss_a_configuration(tmx, sequence, tmp_path):
    assert "config.json" in tmx("merge", *sequence.arguments, "-o", tmp_path / "a").err
    assert "config.json" not in tmx("merge", *sequence.arguments, "-o", tmp_path / "b.safetensors").err


# -- the process ------------------------------------------------------------------------------------------------------


def test_adapters_become_an_adapter(tmx, tmp_path):
    save_file({"q.weight": torch.zeros(6, 4)}, tmp_path / "base.safetensors")
    tasks = [
        save_adapter(tmp_path / str(k), {"q": factors(6, 4, 2, k)}, base_model_name_or_path="org/base") for k in (1, 2)
    ]
    arguments = ["--base", tmp_path / "base.safetensors", "--task", tasks[0], "--task", tasks[1], "--adapter", 3]
    planned = tmx("merge", *arguments, "-o", tmp_path / "out", "--dry-run", "--json")
    assert json.loads(planned.out)["bytes"] == 4 * 3 * (6 + 4)
    refused = tmx("merge", *arguments[:-1], "2.5", "-o", tmp_path / "out")
    assert (refused.code, "--adapter: 2.5 is not a whole number" in refused.err) == (2, True)
    result = tmx("merge", *arguments, "-o", tmp_path / "out")
    assert result.code == 0
    reduced = MergeReport.from_json((tmp_path / "out/tmx-report.json").read_text()).reduced
    assert f"rank 3; it lacks {reduced['error']:.2%}" in " ".join(result.out.split())
    assert "library_name: peft" in (tmp_path / "out/README.md").read_text()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    before = (tmp_path / "out/adapter_model.safetensors").read_bytes()
    config = [tmp_path / "out/tmx-config.yaml", *arguments[:-2]]
    assert tmx("merge", *config, "-o", tmp_path / "again").code == 0
    assert (tmp_path / "again/adapter_model.safetensors").read_bytes() == before


def named(sequence, *names):
    pairs = zip(names, sequence.tasks, strict=True)
    return ["--base", sequence.base, *(part for name, path in pairs for part in ("--task", f"{name}{path}"))]


def test_weights_by_name_are_those_by_position(tmx, sequence, tmp_path):
    tasks = named(sequence, "cats=", "dogs=", "")
    assert tmx("merge", *tasks, "--weights", "task3=1/2,cats=3", "-o", tmp_path / "a").code == 0
    tmx("merge", *sequence.arguments, "--weights", "3,0,0.5", "-o", tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "a/tmx-report.json").read_text())["names"] == ["cats", "dogs", "task3"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--weights", "cast=1"], "'cats'"),
        (["--weights", "cats=1,2"], "'cats=1,2'"),
        (["--task", "cats=elsewhere"], "'cats'"),
        (["--task", "=elsewhere"], "'=elsewhere'"),
    ],
)
def test_what_is_refused(tmx, sequence, tmp_path, words, value):
    result = tmx("merge", *named(sequence, "cats=", "dogs=", ""), *words, "-o", tmp_path / "out")
    assert result.code == 2
    assert value in result.err


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a=b", "kit=chen"):
        (tmp_path / name).mkdir()
    paths, names = read_tasks(["a=b", "kitchen=kit=chen", "./x=y"])
    assert [path.as_posix() for path in paths] == ["a=b", "kit=chen", "x=y"]
    assert names == ("a=b", "kitchen", "x=y")


def test_dicts_of_tasks_in_python(sequence, tmp_path):
    base, *states = sequence.state_dicts
    plain = tunable_magmax.merge_state_dicts(base, states, weights=[1, 0, 2])
    by_name = tunable_magmax.merge_state_dicts(base, dict(zip("abc", states, strict=True)), weights={"c": 2, "a": 1})
    assert by_name.report.names == ("a", "b", "c")
    assert all(torch.equal(by_name.state_dict[name], tensor) for name, tensor in plain.state_dict.items())
    report = merge_checkpoints(
        sequence.base, dict(zip("abc", sequence.tasks, strict=True)), tmp_path / "out", weights={"c": 2, "a": 1}
    )
    assert (report.names, report.counts) == (("a", "b", "c"), plain.report.counts)
    with tunable_magmax.MergeSession(base, dict(zip("abc", states, strict=True))) as session:
        assert session.merge(weights={"c": 2, "a": 1}).report == by_name.report
    with pytest.raises(InputError):
        tunable_magmax.merge_state_dicts(base, states, weights={"a": 1})
    other = tunable_magmax.Preference.from_weights({"c": 1, "b": 1, "a": 1})
    with pytest.raises(InputError):
        tunable_magmax.merge_state_dicts(base, dict(zip("abc", states, strict=True)), weights=other)
