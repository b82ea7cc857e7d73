"""Tasks by name on the command line and in Python."""

import json

import pytest
import torch

import tunable_magmax
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import read_tasks


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
