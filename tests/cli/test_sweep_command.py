"""`tmx sweep`: lines, grids and lists, what they print and draw, and how they refuse."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tunable_magmax import Preference

LINE = ["--from", "1,0,0", "--to", "0,0,1"]


def write_run(sequence, names=("cats", "dogs", "birds")):
    tasks = [{"name": name, "checkpoint": path.name} for name, path in zip(names, sequence.tasks, strict=True)]
    (sequence.folder / "run.json").write_text(json.dumps({"version": 1, "base": "base.safetensors", "tasks": tasks}))
    return sequence.folder


def same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_refused(result, *words):
    assert result.code == 2, result
    assert not result.out
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err, result.err


def test_a_line_is_merges_side_by_side(tmx, sequence, tmp_path):
    options = ["--scale", "0.5", "--seed", 7, "--scope", "tensor", "--exclude", "head.*", "--dtype", "bfloat16"]
    out = tmp_path / "out"
    result = tmx("sweep", *sequence.arguments, *LINE, "--steps", 4, *options, "-o", out)
    assert result.code == 0, result
    assert not result.err
    assert [line.split()[0] for line in result.out.splitlines()[3:7]] == [f"step-0{k}" for k in range(4)]
    assert result.out.splitlines()[2].split() == [
        "point",
        "scale",
        "length",
        "leftovers",
        "task",
        "1",
        "task",
        "2",
        "task",
        "3",
    ]
    for k, weights in enumerate(["1,0,0", "2/3,0,1/3", "1/3,0,2/3", "0,0,1"]):
        single = tmp_path / f"single-{k}"
        assert tmx("merge", *sequence.arguments, "--weights", weights, *options, "-o", single).code == 0
        same_files(out / f"step-0{k}", single)
        assert tmx("inspect", "--verify", out / f"step-0{k}").code == 0


def test_the_names_of_a_run_are_those_of_its_points(tmx, sequence, tmp_path):
    assert tmx("sweep", write_run(sequence), *LINE, "--steps", 2, "-o", tmp_path / "out").code == 0
    assert tmx("merge", sequence.folder, "--weights", "1,0,0", "-o", tmp_path / "single").code == 0
    same_files(tmp_path / "out" / "step-00", tmp_path / "single")
    assert "| task 1: cats | " in (tmp_path / "single" / "README.md").read_text()


def test_ends_with_spaces_between_their_numbers(tmx, sequence, tmp_path):
    line = ["--from", 1, 0, 0, "--to", 0, 0, 1]
    for what in (sequence.arguments, [write_run(sequence)]):
        result = tmx("sweep", *what, *line, "-o", tmp_path / "out")
        assert_refused(result, "numbers of --from and --to have commas between them and no spaces", "as --from 3,1,0")


def test_json_is_the_summary_file(tmx, sequence, tmp_path):
    out = tmp_path / "out"
    result = tmx("sweep", *sequence.arguments, "--grid", 2, "--method", "average", "-o", out, "--json")
    assert result.code == 0, result
    assert result.out == (out / "sweep.json").read_text()
    sweep = json.loads(result.out)
    assert [point["name"] for point in sweep["points"]] == ["0-0-2", "0-1-1", "0-2-0", "1-0-1", "1-1-0", "2-0-0"]
    assert sweep["points"][1]["weights"] == ["0", "0.5", "0.5"]
    assert sweep["points"][1]["counts"] is None
    assert str(tmp_path) not in result.out


def test_a_run_and_preferences(tmx, sequence, tmp_path):
    names = ("cats", "dogs", "birds")
    Preference((0.2, 0.3, 0.5), tasks=names).save(tmp_path / "site a.json")
    Preference((3, 1, 0)).save(tmp_path / "home.json")
    given = ["--preference", tmp_path / "site a.json", "--preference", tmp_path / "home.json"]
    out = tmp_path / "out"
    result = tmx("sweep", write_run(sequence), *given, "-o", out)
    assert result.code == 0, result
    assert "00-site-a" in result.out
    assert tmx("merge", sequence.folder, "--preference", tmp_path / "home.json", "-o", tmp_path / "single").code == 0
    same_files(out / "01-home", tmp_path / "single")
    Preference((1, 1, 1), tasks=("birds", "cats", "dogs")).save(tmp_path / "home.json")
    assert_refused(tmx("sweep", sequence.folder, *given, "-o", out), "about other tasks")


def test_weights_of_a_configuration_give_way_to_the_points(tmx, sequence, tmp_path):
    models = [{"model": path.name, "parameters": {"weight": 2}} for path in sequence.tasks]
    config = {"merge_method": "task_arithmetic", "base_model": "base.safetensors", "models": models}
    (tmp_path / "merge.yml").write_text(json.dumps(config))
    result = tmx(
        "sweep", tmp_path / "merge.yml", "--from", "2,0,0", "--to", "0,0,1", "--steps", 3, "-o", tmp_path / "o"
    )
    assert result.code == 0, result
    found = json.loads((tmp_path / "o" / "sweep.json").read_text())
    assert found["method"] == "task_arithmetic"
    assert [point["weights"] for point in found["points"]] == [["2", "0", "0"], ["1", "0", "0.5"], ["0", "0", "1"]]


def test_a_rerun_skips_and_says_so(tmx, sequence, tmp_path):
    command = ["sweep", *sequence.arguments, *LINE, "-o", tmp_path / "out"]
    first = tmx(*command)
    assert "made before" not in first.out
    again = tmx(*command)
    assert again.code == 0
    assert "5 points, 5 of them made before" in again.out
    assert again.out.splitlines()[1:] == first.out.splitlines()[1:]
    assert tmx(*command, "--quiet").out == ""


def test_a_dry_run_tells_points_sizes_and_memory(tmx, sequence, tmp_path):
    command = ["sweep", *sequence.arguments, "--grid", 1, "-o", tmp_path / "out", "--dry-run"]
    result = tmx(*command)
    assert result.code == 0, result
    for words in ("points       3", "writes ", "memory ", "beyond the interpreter", "0-1-0"):
        assert words in result.out
    plan = json.loads(tmx(*command, "--json").out)
    assert plan["points"][0] == {"name": "0-0-1", "weights": ["0", "0", "1"], "budget": [0, 0, 119]}
    assert plan["bytes_to_write"] == 3 * plan["bytes_each"]
    assert not (tmp_path / "out").exists()
    short = tmx(*command, "--memory", "1MiB")
    assert short.code == 2
    assert "problem: the inputs are held in memory" in short.err
    assert "reports only" in tmx(*command, "--reports-only").out


def test_reports_only(tmx, sequence, tmp_path):
    out = tmp_path / "out"
    assert tmx("sweep", *sequence.arguments, *LINE, "--steps", 2, "-o", out, "--reports-only").code == 0
    names = ["step-00.report.json", "step-01.report.json", "sweep.json", "sweep.log"]
    assert sorted(path.name for path in out.iterdir()) == names


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra 'report'")
@pytest.mark.parametrize("method", ["tunable_magmax", "average"])
def test_pictures(tmx, sequence, tmp_path, method):
    Preference((3, 1, 0)).save(tmp_path / "home.json")
    ways = {"line": LINE, "grid": ["--grid", 3], "list": ["--preference", tmp_path / "home.json"]}
    for name, way in ways.items():
        chart = tmp_path / f"{name}.svg"
        end = ["--method", method, "--reports-only", "--plot", chart]
        result = tmx("sweep", write_run(sequence, ("c$ts", "dogs", "b" * 50)), *way, "-o", tmp_path / name, *end)
        assert result.code == 0, result
        assert f"picture: {chart}" in result.out
        assert "<svg" in chart.read_text()


def test_a_warning_is_said_once(tmx, sequence, tmp_path):
    result = tmx("sweep", *sequence.arguments, *LINE, "--exclude", "nothing*", "-o", tmp_path / "out")
    assert result.code == 0
    assert result.err.count("matches no tensor") == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "which preferences?"),
        ([*LINE, "--steps", "1"], "steps is 1, expected a whole number, 2 or more"),
        (["--from", "1,0,0"], "give --to as well"),
        (["--steps", "3"], "give --from as well"),
        (["--from", "1,0", "--to", "0,0,1"], "the line goes from 2 weights to 3: give one for each task"),
        (["--from", "1,0,0", "--to", "0,0,0"], "the last point of the line: all weights are zero"),
        (["--from", "1,0,0", "--to", "2,0,0"], "the same preference"),
        (["--from", "1,,0", "--to", "0,0,1"], "--from is '1,,0'"),
        (["--from", "1,0,0", "--to", "0,-1,1"], "weight 2 is negative"),
        (["--from", "1,x,0", "--to", "0,0,1"], "--from is '1,x,0', expected numbers with commas"),
        ([*LINE, "--grid", "2"], "Give one of these"),
        (["--preference", "a.json", "--grid", "2"], "Give one of these"),
        (["--grid", "0"], "the grid has 0 parts"),
        (["--preference", "missing.json"], "missing.json: no such file"),
        ([*LINE, "--method", "magmax"], "takes no weights, so there is nothing to sweep"),
        ([*LINE, "--plot", "chart.txt"], "must end in one of .png"),
        ([*LINE, "--memory", "lots"], "memory is 'lots'"),
        ([*LINE, "--memory", "1MiB"], "give a larger --memory"),
        ([*LINE, "--weights", "1,0,0"], "--weights"),
    ],
)
def test_what_is_refused(tmx, sequence, tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(tmx("sweep", *sequence.arguments, *given, "-o", tmp_path / "out"), words)
    assert not (tmp_path / "out").exists()


def test_a_grid_needs_three_tasks_and_an_output(tmx, sequence, tmp_path):
    two = sequence.arguments[:-2]
    assert_refused(tmx("sweep", *two, "--grid", 2, "-o", tmp_path / "out"), "three tasks, and there are 2")
    assert_refused(tmx("sweep", *sequence.arguments, "--grid", 2), "Give -o OUT, a directory")
    assert_refused(tmx("sweep", "--grid", 2, "-o", tmp_path / "out"), "Give --base and one --task")
    result = tmx("sweep", *sequence.arguments, *LINE, "-o", tmp_path / "out.safetensors")
    assert_refused(result, "a sweep's output is a directory")


def test_another_sweep_is_refused(tmx, sequence, tmp_path):
    out = tmp_path / "out"
    assert tmx("sweep", *sequence.arguments, *LINE, "-o", out).code == 0
    assert_refused(tmx("sweep", *sequence.arguments, *LINE, "--steps", 3, "-o", out), "another sweep", "--overwrite")
    assert_refused(tmx("sweep", *sequence.arguments, *LINE, "--seed", 1, "-o", out), "different: seed")
    assert tmx("sweep", *sequence.arguments, "--grid", 1, "--overwrite", "-o", out).code == 0
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["0-0-1", "0-1-0", "1-0-0"]


def test_pictures_need_matplotlib_and_say_so_first(tmx, sequence, tmp_path, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else plain(name, *a))
    result = tmx("sweep", *sequence.arguments, *LINE, "-o", tmp_path / "out", "--plot", tmp_path / "chart.png")
    assert_refused(result, "pip install", "report")
    assert not (tmp_path / "out").exists()
