"""`tmx merge` and `tmx plan`: the three forms, what they print, and how they refuse."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import warnings

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tunable_magmax
from tunable_magmax import MergeReport, Preference
from tunable_magmax.checkpoints.positioned_file import PositionedFile
from tunable_magmax.cli.terminal import each_warning_once, plain_warnings, warn
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size


def merged(sequence, **options):
    base, *tasks = sequence.state_dicts
    return tunable_magmax.merge_state_dicts(base, tasks, **options)


def assert_equal(path, expected):
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def write_yaml(sequence, **changes):
    config = {
        "merge_method": "tunable_magmax",
        "base_model": "base.safetensors",
        "models": [
            {"model": path.name, "parameters": {"weight": w}}
            for path, w in zip(sequence.tasks, (3, 1, 0.5), strict=True)
        ],
        "parameters": {"scale": 0.5, "seed": 7},
        **changes,
    }
    path = sequence.folder / "merge.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path


def write_run(sequence, names=("cats", "dogs", "birds")):
    tasks = [{"name": name, "checkpoint": path.name} for name, path in zip(names, sequence.tasks, strict=True)]
    (sequence.folder / "run.json").write_text(json.dumps({"version": 1, "base": "base.safetensors", "tasks": tasks}))
    return sequence.folder


def assert_refused(result, *words):
    assert result.code == 2, result
    assert not result.out
    assert "Traceback" not in result.err
    assert "\n\n" not in result.err.strip()
    for word in words:
        assert word in result.err, result.err


# -- the three forms --------------------------------------------------------------------------------------------------


def test_form_1_checkpoints_by_option(tmx, sequence, tmp_path):
    result = tmx(
        "merge", *sequence.arguments, "--weights", "3,1,0", "--scale", "0.5", "--seed", 7, "-o", tmp_path / "out"
    )
    assert result.code == 0
    expected = merged(sequence, weights=[3, 1, 0], scale=0.5, seed=7)
    assert_equal(tmp_path / "out" / "model.safetensors", expected.state_dict)
    counts = expected.report.counts
    assert f"task 1   {counts[0]} elements" in result.out
    assert "scale 0.5 (given), seed 7" in result.out
    assert not result.err


def test_form_2_a_run_directory_and_a_preference(tmx, sequence, tmp_path):
    Preference((0.2, 0.3, 0.5)).save(tmp_path / "site.json")
    result = tmx(
        "merge", write_run(sequence), "--preference", tmp_path / "site.json", "-o", tmp_path / "out.safetensors"
    )
    assert result.code == 0, result
    assert_equal(tmp_path / "out.safetensors", merged(sequence, weights=[0.2, 0.3, 0.5]).state_dict)


def test_form_2_without_a_preference_weighs_tasks_equally(tmx, sequence, tmp_path):
    assert tmx("merge", write_run(sequence), "-o", tmp_path / "out.safetensors").code == 0
    assert_equal(tmp_path / "out.safetensors", merged(sequence).state_dict)


def test_the_names_of_a_run_are_in_report_and_card(tmx, sequence, tmp_path):
    result = tmx("merge", write_run(sequence), "--weights", "3,1,0", "--json", "-o", tmp_path / "out")
    assert json.loads(result.out)["names"] == ["cats", "dogs", "birds"]
    assert MergeReport.from_json((tmp_path / "out" / "tmx-report.json").read_text()).names == ("cats", "dogs", "birds")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| task 2: dogs | " in card
    assert tmx("merge", *sequence.arguments, "--weights", "3,1,0", "-o", tmp_path / "unnamed").code == 0
    assert "| task 2 | " in (tmp_path / "unnamed" / "README.md").read_text()


def test_a_preference_about_other_tasks_is_refused(tmx, sequence, tmp_path):
    Preference((1, 1, 2), tasks=("dogs", "cats", "birds")).save(tmp_path / "site.json")
    out = tmp_path / "out.safetensors"
    result = tmx("merge", write_run(sequence), "--preference", tmp_path / "site.json", "-o", out)
    assert_refused(result, "about other tasks", "dogs, cats, birds", "cats, dogs, birds")
    names = ("dogs", "cats", "birds")
    assert tmx("merge", write_run(sequence, names), "--preference", tmp_path / "site.json", "-o", out).code == 0


def test_form_3_a_yaml(tmx, sequence, tmp_path):
    result = tmx("merge", write_yaml(sequence), "-o", tmp_path / "out.safetensors")
    assert result.code == 0, result
    assert_equal(tmp_path / "out.safetensors", merged(sequence, weights=[3, 1, 0.5], scale=0.5, seed=7).state_dict)


def test_options_win_over_the_yaml(tmx, sequence, tmp_path):
    out = tmp_path / "out.safetensors"
    assert tmx("merge", write_yaml(sequence), "--seed", 8, "--weights", "1,1,1", "-o", out).code == 0
    assert_equal(out, merged(sequence, weights=[1, 1, 1], scale=0.5, seed=8).state_dict)


def test_lambda_is_scale_and_a_listed_base_is_skipped(tmx, sequence, tmp_path):
    models = ["./base.safetensors", *({"model": path.name} for path in sequence.tasks)]
    config = write_yaml(sequence, merge_method="task_arithmetic", models=models, parameters={"lambda": 0.25})
    assert tmx("merge", config, "-o", tmp_path / "out.safetensors").code == 0
    assert_equal(tmp_path / "out.safetensors", merged(sequence, method="task_arithmetic", scale=0.25).state_dict)


def test_the_saved_configuration_gives_the_same_merge_again(tmx, sequence, tmp_path):
    options = [
        "--weights",
        "3,1,0.5",
        "--keep",
        "magnitude",
        "--scope",
        "tensor",
        "--exclude",
        "head.*",
        "--dtype",
        "bfloat16",
    ]
    assert tmx("merge", *sequence.arguments, *options, "-o", tmp_path / "out").code == 0
    config = yaml.safe_load((tmp_path / "out" / "tmx-config.yaml").read_text())
    config["base_model"] = "base.safetensors"
    for model, path in zip(config["models"], sequence.tasks, strict=True):
        model["model"] = path.name
    (tmp_path / "again.yml").write_text(yaml.safe_dump(config))
    assert tmx("merge", tmp_path / "again.yml", "-o", tmp_path / "again").code == 0
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


# -- options ----------------------------------------------------------------------------------------------------------


def test_budget(tmx, sequence, tmp_path):
    elements = merged(sequence).report.elements
    budget = [10, elements - 15, 5]
    result = tmx("merge", *sequence.arguments, "--budget", ",".join(map(str, budget)), "--json", "-o", tmp_path / "out")
    assert json.loads(result.out)["counts"] == budget
    assert_refused(tmx("merge", *sequence.arguments, "--budget", "1,2,3", "-o", tmp_path / "no"), "6", str(elements))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--weights", "1,2"], ["2 weights for 3 tasks"]),
        (["--weights", "1,,2"], ["--weights", "'1,,2'"]),
        (["--weights", "3 1 1"], ["--weights is '3 1 1', expected numbers with commas between them"]),
        (["--weights", "3,1;1"], ["--weights is '3,1;1', expected numbers"]),
        (["--budget", "40 60 3"], ["--budget is '40 60 3', expected numbers"]),
        (["--weights", "-1,1,1"], ["weight 1 is negative"]),
        (["--weights", "nan,1,1"], ["weight 1", "'nan'"]),
        (["--weights", "0,0,0"], ["all weights are zero"]),
        (["--weights", "1,1,1", "--budget", "1,1,1"], ["weights and a budget"]),
        (["--method", "magmx"], ["'magmx'", "did you mean 'magmax'?"]),
        (["--method", "magmax", "--weights", "1,1,1"], ["magmax", "no weights"]),
        (["--scope", "modle"], ["--scope", "model", "tensor", "tmx merge --help"]),
        (["--scale", "matchd"], ["matchd", "did you mean 'matched'?"]),
        (["--seed", "-1"], ["seed"]),
        (["--density", "2"], ["density"]),
        (["--dtype", "float8"], ["float8"]),
        (["--memory", "lots"], ["memory", "'lots'"]),
        (["--wieghts", "1,1,1"], ["--wieghts", "--weights"]),
        (["--preference", "nowhere.json"], ["nowhere.json"]),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(tmx, sequence, tmp_path, given, words):
    before = sorted(tmp_path.iterdir())
    assert_refused(tmx("merge", *sequence.arguments, *given, "-o", tmp_path / "out"), *words)
    assert sorted(tmp_path.iterdir()) == before


def test_negative_numbers_are_values_not_options(tmx, sequence, tmp_path):
    assert tmx("merge", *sequence.arguments, "--scale", "-0.5", "-o", tmp_path / "out.safetensors").code == 0
    assert_equal(tmp_path / "out.safetensors", merged(sequence, scale=-0.5).state_dict)


def test_patterns(tmx, sequence, tmp_path):
    patterns = ["--include", "layers.*", "--include", "head.*", "--exclude", "*.bias"]
    assert tmx("merge", *sequence.arguments, *patterns, "-o", tmp_path / "out.safetensors").code == 0
    expected = merged(sequence, include=["layers.*", "head.*"], exclude=["*.bias"])
    assert set(expected.report.tensors) == {"head.weight", *(f"layers.{k}.weight" for k in (0, 1, 10))}
    assert_equal(tmp_path / "out.safetensors", expected.state_dict)


def test_a_pattern_to_include_that_matches_nothing_is_refused_before_anything_is_written(tmx, sequence, tmp_path):
    before = sorted(tmp_path.iterdir())
    given = [*sequence.arguments, "--include", "layer.*", "--include", "head.*", "-o", tmp_path / "out"]
    words = "include pattern 'layer.*' matches no tensor (did you mean 'layers.*'?)"
    assert_refused(tmx("merge", *given), words)
    planned = tmx("plan", *given)
    assert (planned.code, planned.err) == (2, f"problem: {words}\n")
    assert sorted(tmp_path.iterdir()) == before


def test_an_option_without_effect_is_a_warning(tmx, sequence, tmp_path):
    given = [
        *sequence.arguments,
        "--method",
        "magmax",
        "--keep",
        "magnitude",
        "--density",
        "0.3",
        "-o",
        tmp_path / "out",
    ]
    words = [
        "keep has no effect with magmax; it is for tunable_magmax",
        "density has no effect with magmax; it is for ties",
    ]
    assert json.loads(tmx("plan", *given, "--json").out)["warnings"] == words
    result = tmx("merge", *given)
    assert (result.code, result.err) == (0, "".join(f"warning: {word}\n" for word in words))
    assert MergeReport.from_json((tmp_path / "out" / "tmx-report.json").read_text()).warnings == tuple(words)


def test_a_pattern_to_exclude_that_matches_nothing_is_a_warning(tmx, sequence, tmp_path):
    result = tmx("merge", *sequence.arguments, "--exclude", "heads.*", "-o", tmp_path / "out")
    assert result.code == 0
    assert result.err.startswith("warning: exclude pattern 'heads.*' matches no tensor")


def test_shards(tmx, sequence, tmp_path):
    assert tmx("merge", *sequence.arguments, "--shard-size", "200B", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


# -- output -----------------------------------------------------------------------------------------------------------


def test_json_is_the_report_and_nothing_else(tmx, sequence, tmp_path):
    result = tmx("merge", *sequence.arguments, "--json", "-o", tmp_path / "out.safetensors")
    assert not result.err
    assert MergeReport.from_json(result.out) == MergeReport.from_json((tmp_path / "out.report.json").read_text())


def test_quiet_prints_nothing(tmx, sequence, tmp_path):
    result = tmx("merge", *sequence.arguments, "-q", "-o", tmp_path / "out")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_nothing_to_merge_is_a_copy_with_a_warning(tmx, sequence, tmp_path):
    result = tmx("merge", "--base", sequence.base, "--task", sequence.base, "-o", tmp_path / "out.safetensors")
    assert result.code == 0
    assert "warning: task 1 is the base checkpoint itself" in result.err
    assert "copy of the base" in result.err
    assert "UserWarning" not in result.err
    assert_equal(tmp_path / "out.safetensors", sequence.state_dicts[0])


def test_an_existing_output_is_kept_unless_asked(tmx, sequence, tmp_path):
    out = tmp_path / "out"
    assert tmx("merge", *sequence.arguments, "-o", out).code == 0
    first = (out / "model.safetensors").read_bytes()
    assert_refused(tmx("merge", *sequence.arguments, "--seed", 1, "-o", out), "already exists", "--overwrite")
    assert (out / "model.safetensors").read_bytes() == first
    assert tmx("merge", *sequence.arguments, "--seed", 1, "--overwrite", "-o", out).code == 0
    assert (out / "model.safetensors").read_bytes() != first


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_finished_merge_is_not_made_again(tmx, sequence, tmp_path, name):
    out, command = tmp_path / name, ("merge", *sequence.arguments, "-o", tmp_path / name)
    first, written = tmx(*command), out.stat().st_mtime_ns
    again = tmx(*command)
    assert (again.code, again.out) == (0, first.out)
    complete = f"{out} is complete, made from the same inputs with the same options; overwrite (--overwrite) makes it"
    assert again.err.startswith(f"note: {complete} again\n")
    assert out.stat().st_mtime_ns == written
    if name == "out":
        (out / "README.md").unlink()
        assert_refused(tmx(*command), "already exists")
        assert tmx(*command, "--overwrite").code == 0
    os.utime(sequence.tasks[0])
    assert_refused(tmx(*command), "already exists")


def test_a_tailored_model_stands_for_its_preference(tmx, sequence, tmp_path):
    (tmp_path / "model").mkdir()
    command = ("merge", *sequence.arguments, "--preference", tmp_path / "model", "-o", tmp_path / "out")
    assert_refused(tmx(*command), "model is a directory without preference.json: give the file that `tmx prefer`")
    Preference.from_weights([1, 0, 0]).save(tmp_path / "model" / "preference.json")
    assert tmx(*command).code == 0
    assert MergeReport.from_json((tmp_path / "out" / "tmx-report.json").read_text()).counts[1:] == (0, 0)


def test_an_input_is_never_replaced(tmx, sequence):
    before = sequence.tasks[1].read_bytes()
    assert_refused(tmx("merge", *sequence.arguments, "--overwrite", "-o", sequence.tasks[1]), "would replace task 2")
    assert sequence.tasks[1].read_bytes() == before


@pytest.mark.parametrize("command", [["merge"], ["plan"], ["merge", "--dry-run"]])
@pytest.mark.parametrize("name", ["m.bin", "m.pt", "m.pth", "last.CKPT"])
def test_a_name_of_a_torch_file_is_no_output(tmx, sequence, tmp_path, command, name):
    before = sorted(tmp_path.iterdir())
    result = tmx(*command, *sequence.arguments, "-o", tmp_path / name)
    assert result.code == 2
    assert f"{name} looks like a torch file, but an output is a directory" in result.err
    assert f"-o {(tmp_path / name).with_suffix('.safetensors')}" in result.err
    assert sorted(tmp_path.iterdir()) == before


def test_dots_in_the_name_of_a_directory_are_fine(tmx, sequence, tmp_path):
    assert tmx("merge", *sequence.arguments, "-o", tmp_path / "scale-0.5").code == 0
    assert (tmp_path / "scale-0.5" / "model.safetensors").is_file()


# -- usage ------------------------------------------------------------------------------------------------------------


def test_nothing_said(tmx):
    assert_refused(tmx("merge"), "what should be merged?", "--base")


def test_a_base_without_tasks(tmx, sequence):
    assert_refused(tmx("merge", "--base", sequence.base, "-o", "out"), "what should be merged?", "--task")


def test_no_output_named(tmx, sequence):
    assert_refused(tmx("merge", *sequence.arguments), "-o OUT")


def test_two_forms_at_once(tmx, sequence, tmp_path):
    assert_refused(tmx("merge", write_yaml(sequence), *sequence.arguments, "-o", tmp_path / "out"), "--base")


def test_a_task_without_its_option(tmx, sequence, tmp_path):
    one, two, _ = sequence.tasks
    result = tmx("merge", "--base", sequence.base, "--task", one, two, "-o", tmp_path / "out")
    assert_refused(result, two.name, "put --task before it")


@pytest.mark.parametrize("command", ["merge", "plan"])
def test_weights_with_spaces_between_them(tmx, sequence, tmp_path, command):
    run = write_run(sequence)
    for given, meant in (
        (["--weights", 3, 1, 1], "as --weights 3,1,0"),
        (["--weights", "3,", "1,", 1], "as --weights 3,1,0"),
        (["--weights", "1/2", "1/4", "1/4"], "as --weights 3,1,0"),
        (["--budget", 10, 5], "as --budget 3,1,0"),
        (["--weights", "3", "1", "--budget", "5", "6"], "as --weights 3,1,0"),
    ):
        for what in (sequence.arguments, [run]):
            assert_refused(tmx(command, *what, *given, "-o", tmp_path / "out"), "no spaces", meant)
        assert_refused(tmx(command, *given, run, "-o", tmp_path / "out"), "no spaces", meant)


def test_a_run_whose_name_is_a_number(tmx, sequence, tmp_path, monkeypatch):
    (tmp_path / "7").symlink_to(write_run(sequence), target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    assert tmx("merge", "7", "--weights", "3,1,1", "-o", tmp_path / "out").code == 0
    assert_refused(tmx("merge", "7", "--weights", "3", "1", "1", "-o", tmp_path / "no"), "as --weights 3,1,0")


def test_words_that_belong_to_nothing(tmx, sequence, tmp_path):
    result = tmx("merge", *sequence.arguments, *sequence.tasks[:2], "-o", tmp_path / "out")
    assert_refused(result, sequence.tasks[1].name, "belongs to no option", "put --task before", "tmx merge --help")
    assert_refused(tmx("merge", write_run(sequence), "x", "-o", tmp_path / "out"), "'x' belongs to no option")
    assert_refused(tmx("merge", write_run(sequence), "4", "-o", tmp_path / "out"), "'4' belongs to no option")


def test_a_preference_and_weights(tmx, sequence, tmp_path):
    Preference((1, 1, 1)).save(tmp_path / "site.json")
    given = ["--preference", tmp_path / "site.json", "--weights", "1,1,1"]
    assert_refused(tmx("merge", *sequence.arguments, *given, "-o", tmp_path / "out"), "a preference holds weights")


def test_a_checkpoint_directory_is_not_a_run(tmx, sequence, tmp_path):
    assert_refused(tmx("merge", sequence.folder, "-o", tmp_path / "out"), "run.json", "--base")


def test_every_unusable_checkpoint_is_named(tmx, sequence, tmp_path):
    sequence.tasks[1].write_bytes(sequence.tasks[1].read_bytes()[:-3])
    sequence.tasks[2].unlink()
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / "out")
    assert_refused(result, "task 2", "cut short", "task 3", "does not exist")


def test_every_mismatch_is_named_with_the_closest_name(tmx, sequence, tmp_path):
    changed = dict(sequence.state_dicts[1])
    changed["layers.0.wieght"] = changed.pop("layers.0.weight")
    changed["head.bias"] = torch.zeros(5)
    save_file(changed, sequence.tasks[0])
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / "out")
    assert_refused(result, "lacks 'layers.0.weight' (did you mean 'layers.0.wieght'?)", "[5]", "[3]")


def test_json_lists_every_problem_where_the_message_shows_some(tmx, sequence, tmp_path):
    lacking = {name: tensor for name, tensor in sequence.state_dicts[1].items() if not name.startswith("layers")}
    save_file(lacking, sequence.tasks[0])
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / "out", "--json")
    error = json.loads(result.out)["error"]
    assert "6 problems" in error["message"]
    assert " and 1 more" in error["message"]
    missing = sequence.state_dicts[1].keys() - lacking.keys()
    assert sorted(error["problems"]) == sorted(f"task 1 ({sequence.tasks[0]}) lacks {name!r}" for name in missing)
    planned = json.loads(tmx("plan", *sequence.arguments, "--json").out)
    assert (planned["problems"], planned["mismatches"]) == ([error["message"]], error["problems"])
    other = tmx("merge", tmp_path / "no-run", "-o", tmp_path / "out", "--json")
    assert "problems" not in json.loads(other.out)["error"]


def test_unknown_and_foreign_keys_of_a_yaml_are_all_named(tmx, sequence, tmp_path):
    config = write_yaml(
        sequence, parameters={"sede": 1, "epsilon": 0.1}, tokenizer_source="union", slices=[], merge_metod="ties"
    )
    result = tmx("merge", config, "-o", tmp_path / "out")
    assert_refused(
        result,
        "unknown key 'sede' in parameters (did you mean 'seed'?)",
        "unknown key 'epsilon' in parameters",
        "tokenizer_source is 'union'",
        "unknown key 'slices'",
        "'merge_metod' (did you mean 'merge_method'?)",
    )


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["plan"], ["merge", "--dry-run"]])
def test_a_plan_reads_headers_only_and_writes_nothing(tmx, sequence, tmp_path, monkeypatch, command):
    """Values that no merge could use go unnoticed, and no byte behind the headers is asked for."""
    save_file(
        {
            name: tensor * torch.nan if tensor.is_floating_point() else tensor
            for name, tensor in sequence.state_dicts[2].items()
        },
        sequence.tasks[1],
    )
    reads = []
    original = PositionedFile.read_into

    def spy(self, offset, buffer):
        reads.append((self.path, offset + buffer.nbytes))
        original(self, offset, buffer)

    monkeypatch.setattr(PositionedFile, "read_into", spy)
    before = sorted(tmp_path.iterdir())
    result = tmx(*command, *sequence.arguments, "--weights", "3,1,0", "-o", tmp_path / "out")
    assert result.code == 0, result
    assert sorted(tmp_path.iterdir()) == before
    assert {path for path, _ in reads} == {sequence.base, *sequence.tasks}
    for path, end in reads:
        with open(path, "rb") as file:
            assert end <= max(64, 8 + int.from_bytes(file.read(8), "little"))
    assert_refused(tmx("merge", *sequence.arguments, "-o", tmp_path / "out"), "NaN")


def test_a_plan_says_what_will_be_done(tmx, sequence, tmp_path):
    planned = json.loads(tmx("plan", *sequence.arguments, "--weights", "3,1,0", "--json", "-o", tmp_path / "out").out)
    report = json.loads(tmx("merge", *sequence.arguments, "--weights", "3,1,0", "--json", "-o", tmp_path / "out").out)
    assert planned["problems"] == []
    assert planned["elements"] == report["elements"]
    assert planned["budget"] == report["counts"]
    assert planned["mergeable"] == list(report["tensors"])
    assert planned["copied"] == report["copied"] == ["steps"]
    assert planned["bytes_to_write"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_a_plan_names_problems_of_inputs_and_output_at_once(tmx, sequence, tmp_path):
    (tmp_path / "out").mkdir()
    result = tmx("plan", *sequence.arguments, "--task", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert result.code == 2
    assert "already exists" in result.err
    assert "nowhere does not exist" in result.err


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (["--workers", 2], "workers is 2, but the engine is 'local', which has none"),
        (["--ray-address", "head:6379"], "ray_address is 'head:6379', but the engine is 'local'"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--engine", "ray", "--device", "cuda"], "whose workers merge on CPUs"),
        (["--engine", "ray", "--workers", 0], "workers is 0, expected at least 1"),
        (["--engine", "ray", "--ray-address", "head"], "the Ray address is 'head', expected HOST:PORT"),
    ],
)
def test_a_dry_run_refuses_a_place_as_the_merge_does(tmx, sequence, tmp_path, place, told):
    if "ray" in place:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'tunable-magmax[cluster]'")
    results = [tmx("merge", *sequence.arguments, *place, "-o", tmp_path / "out", *dry) for dry in ([], ["--dry-run"])]
    for result in results:
        assert result.code == 2
        assert told in result.err
    assert "elements in" in results[1].out  # the rest of the plan is there


def test_a_dry_run_for_a_gpu_says_whose_numbers_it_tells(tmx, sequence, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    command = ["merge", "--dry-run", *sequence.arguments, "-o", tmp_path / "out"]
    assert "note: " not in tmx(*command, "--device", "cpu").out
    result = tmx(*command, "--device", "cuda:1")
    assert result.code == 0
    assert "note: bytes to read and memory are those of a merge on this machine's CPU; device 'cuda:1'" in result.out


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_plan_says_that_old_torch_files_are_loaded_whole(tmx, sequence, tmp_path, in_folder):
    path = tmp_path / ("old" if in_folder else "old model.pt")
    if in_folder:
        path.mkdir()
    file = path / "pytorch_model.bin" if in_folder else path
    torch.save(sequence.state_dicts[1], file, _use_new_zipfile_serialization=False)
    arguments = ["--base", sequence.base, "--task", path, "--task", sequence.tasks[1], "-o", tmp_path / "out"]
    result = tmx("plan", *arguments)
    assert result.code == 0
    [note] = [line for line in result.out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: task 1 is a torch file")
    assert "tmx convert" in note
    assert json.loads(tmx("merge", "--dry-run", "--json", *arguments).out)["notes"] == [note.removeprefix("note: ")]
    convert = shlex.split(note.partition("convert it first: ")[2])
    assert tmx(*convert[1:]).code == 0
    torch.save(sequence.state_dicts[1], file)
    assert "note: " not in tmx("plan", *arguments).out
    arguments[3] = convert[-1]
    assert "note: " not in tmx("plan", *arguments).out


def test_a_merge_prints_the_notes_of_its_plan(tmx, sequence, tmp_path):
    torch.save(sequence.state_dicts[1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    arguments = ["--base", sequence.base, "--task", tmp_path / "old.pt", "--task", sequence.tasks[1]]
    [note] = json.loads(tmx("plan", *arguments, "--json").out)["notes"]
    assert show_size((tmp_path / "old.pt").stat().st_size) in note
    result = tmx("merge", *arguments, "-o", tmp_path / "a.safetensors")
    assert (result.code, result.err) == (0, f"note: {note}\n")
    as_json = tmx("merge", *arguments, "-o", tmp_path / "b.safetensors", "--json")
    assert json.loads(as_json.out)["warnings"] == [note]
    # The report beside the weights has no path in it: it is the same wherever the merge is made.
    assert MergeReport.from_json((tmp_path / "b.report.json").read_text()).warnings == ()
    quiet = tmx("merge", *arguments, "-o", tmp_path / "c.safetensors", "-q")
    assert (quiet.out, quiet.err) == ("", "")


def test_a_merge_says_that_transformers_will_miss_a_configuration(tmx, sequence, tmp_path):
    words = "has no config.json, which it needs to be loaded by transformers"
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / "a")
    assert f"note: {tmp_path / 'a'} {words}: there was none beside the weights" in result.out
    assert "library_name" not in (tmp_path / "a" / "README.md").read_text()
    [warning] = json.loads(tmx("merge", *sequence.arguments, "-o", tmp_path / "b", "--json").out)["warnings"]
    assert words in warning
    assert words not in tmx("merge", *sequence.arguments, "-o", tmp_path / "c.safetensors").out
    (tmp_path / "config.json").write_text("{}")
    beside = tmx("merge", *sequence.arguments, "-o", tmp_path / "d").out
    assert f"give --base {tmp_path}, or copy them from there" in beside
    (tmp_path / "whole").mkdir()
    for name in ("config.json", "base.safetensors"):
        (tmp_path / name).rename(tmp_path / "whole" / name.replace("base", "model"))
    whole = ["--base", tmp_path / "whole", "--task", sequence.tasks[0]]
    assert words not in tmx("merge", *whole, "-o", tmp_path / "e").out
    assert "---\nlibrary_name: transformers\n" in (tmp_path / "e" / "README.md").read_text()


# -- the process ------------------------------------------------------------------------------------------------------


def run_process(*arguments):
    command = [sys.executable, "-m", "tunable_magmax", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_exit_codes_and_streams_of_the_process(sequence, tmp_path):
    good = run_process("merge", *sequence.arguments, "-o", tmp_path / "out", "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["tasks"] == 3
    bad = run_process("merge", *sequence.arguments, "--seed", 1, "-o", tmp_path / "out")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: ")


def test_errors_of_ours_are_exit_code_1_and_debug_shows_where(tmx, sequence, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("a bolt came loose")

    monkeypatch.setattr("tunable_magmax.engines.local.merge_checkpoints", broken)
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / "out")
    assert result.code == 1
    assert "RuntimeError: a bolt came loose" in result.err
    assert "Traceback" not in result.err
    debugged = tmx("merge", *sequence.arguments, "-o", tmp_path / "out", "--debug")
    assert debugged.code == 1
    assert debugged.err.startswith("Traceback")
    assert debugged.err.endswith(result.err)


def test_debug_changes_no_exit_code(sequence, tmp_path):
    bad = ["merge", *sequence.arguments, "--task", tmp_path / "nowhere", "-o", tmp_path / "out"]
    plain, debug = run_process(*bad), run_process(*bad, "--debug")
    assert plain.returncode == debug.returncode == 2
    assert debug.stderr.startswith("Traceback")
    assert debug.stderr.endswith(plain.stderr)  # what is wrong comes last, as ever


def test_an_existing_output_names_option_and_keyword(tmx, sequence, tmp_path):
    (tmp_path / "out").mkdir()
    base, *tasks = (sequence.base, *sequence.tasks)
    with pytest.raises(InputError, match=r"pass overwrite \(--overwrite\) to replace it") as error:
        merge_checkpoints(base, tasks, tmp_path / "out")
    assert tmx("merge", *sequence.arguments, "-o", tmp_path / "out").err == f"error: {error.value}\n"


def test_interrupts_are_exit_code_130(tmx, sequence, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("tunable_magmax.engines.local.merge_checkpoints", interrupted)
    result = tmx("merge", *sequence.arguments, "-o", tmp_path / "out")
    assert result.code == 130
    assert "same command again" in result.err


def test_a_warning_is_given_once_in_a_command(tmx, sequence, tmp_path):
    twice = ("--exclude", "nothing.*", "--exclude", "nothing.*")
    told = "exclude pattern 'nothing.*' matches no tensor"
    for _ in range(2):  # the next command gives it again
        result = tmx("merge", *sequence.arguments, *twice, "-o", tmp_path / "out", "--overwrite", "--json")
        assert result.err.count(f"warning: {told}") == 1
        assert len([text for text in json.loads(result.out)["warnings"] if told in text]) == 1
    assert tmx("plan", *sequence.arguments, *twice).out.count(f"warning: {told}") == 1


def test_one_text_from_two_places_is_one_warning(capsys):
    with each_warning_once(), plain_warnings():
        warn("twice")
        warnings.warn("twice", stacklevel=1)
        warn("another")
    assert capsys.readouterr().err == "warning: twice\nwarning: another\n"
