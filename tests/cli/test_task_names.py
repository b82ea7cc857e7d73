"""Tasks by name on the command line and in Python: weights by name, and saved configurations."""

from __future__ import annotations

import json

import pytest
import torch
from sequences import digests

import tunable_magmax
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import read_tasks


def named(sequence, *names):
    pairs = zip(names, sequence.tasks, strict=True)
    return ["--base", sequence.base, *(part for name, path in pairs for part in ("--task", f"{name}{path}"))]


def test_weights_by_name_are_those_by_position(tmx, sequence, tmp_path):
    by_name = tmx(
        "merge", *named(sequence, "cats=", "dogs=", ""), "--weights", "task3=1/2,cats=3", "-o", tmp_path / "a"
    )
    assert "dogs" in by_name.err
    assert "0" in by_name.err
    assert by_name.out.splitlines()[3].endswith("task3")
    tmx("merge", *sequence.arguments, "--weights", "3,0,0.5", "-o", tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "a/tmx-report.json").read_text())["names"] == ["cats", "dogs", "task3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "cast=1"], "no task is called 'cast' (did you mean 'cats'?)"),
        (["--weights", "cats=1,cats=2"], "names a task twice"),
        (["--weights", "cats=1,2"], "expected numbers with commas"),
        (["--task", "cats=elsewhere"], "several tasks are called 'cats'"),
        (["--task", "=elsewhere"], "expected NAME=PATH"),
    ],
)
def test_what_is_refused(tmx, sequence, tmp_path, words, message):
    result = tmx("merge", *named(sequence, "cats=", "dogs=", ""), *words, "-o", tmp_path / "out")
    assert result.code == 2
    assert message in result.err


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a=b", "kit=chen"):
        (tmp_path / name).mkdir()
    paths, names = read_tasks(["a=b", "kit=chen=kit=chen", "./x=y"])
    assert [path.as_posix() for path in paths] == ["a=b", "kit=chen", "x=y"]
    assert names == ("a=b", "kit=chen", "x=y")


@pytest.mark.parametrize("words", [["--weights", "dogs=2,cats=1/3"], ["--method", "ties"]])
def test_a_saved_configuration_runs_again_as_it_is(tmx, sequence, tmp_path, words):
    first = tmx("merge", *named(sequence, "cats=", "dogs=", "birds="), *words, "--seed", 3, "-o", tmp_path / "first")
    assert first.code == 0, first.err
    again = tmx("merge", tmp_path / "first/tmx-config.yaml", "-o", tmp_path / "again")
    assert again.code == 0, again.err
    assert digests(tmp_path / "first") == digests(tmp_path / "again")
    (tmp_path / "first.log").unlink()
    lost = tmx("merge", tmp_path / "first/tmx-config.yaml", "-o", tmp_path / "third")
    assert "give --base and one --task" in lost.err
    where = named(sequence, "cats=", "dogs=", "birds=")
    tmx("merge", tmp_path / "first/tmx-config.yaml", *where, "-o", tmp_path / "third")
    assert digests(tmp_path / "first") == digests(tmp_path / "third")


def test_a_recipe_may_name_its_models(tmx, sequence, tmp_path):
    models = "".join(
        f"- {{model: {path.name}, name: {name}}}\n" for name, path in zip("xyz", sequence.tasks, strict=True)
    )
    (tmp_path / "merge.yml").write_text(f"base_model: base.safetensors\nmodels:\n{models}")
    assert "budget       x 40, y 40, z 39\n" in tmx("plan", tmp_path / "merge.yml").out
    tmx("merge", tmp_path / "merge.yml", "--weights", "y=1", "-o", tmp_path / "out")
    assert "layer      elements  x" in tmx("inspect", tmp_path / "out").out
    checked = tmx("verify", tmp_path / "out", *reversed_tasks(sequence))
    assert checked.code == 0, checked.err
    assert "x 0, y " in checked.out


def reversed_tasks(sequence):
    pairs = [("--task", f"{name}={path}") for name, path in zip("xyz", sequence.tasks, strict=True)]
    return ["--base", sequence.base, *(word for pair in reversed(pairs) for word in pair)]


def test_a_line_of_a_sweep_goes_from_name_to_name(tmx, sequence, tmp_path):
    words = ["--from", "cats=1", "--to", "birds=1", "--steps", 2, "-o", tmp_path / "out"]
    made = tmx("sweep", *named(sequence, "cats=", "dogs=", "birds="), *words)
    assert made.code == 0, made.err
    header, first, last = (line.split() for line in made.out.splitlines()[2:5])
    assert header[-3:] == ["cats", "dogs", "birds"]
    assert (first[-3:], last[-3:]) == (["100.00%", "0.00%", "0.00%"], ["0.00%", "0.00%", "100.00%"])


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
    with pytest.raises(InputError, match="have no names"):
        tunable_magmax.merge_state_dicts(base, states, weights={"a": 1})
    other = tunable_magmax.Preference.from_weights({"c": 1, "b": 1, "a": 1})
    with pytest.raises(InputError, match="about the tasks c, b, a"):
        tunable_magmax.merge_state_dicts(base, dict(zip("abc", states, strict=True)), weights=other)
