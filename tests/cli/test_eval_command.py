"""`tmx eval`: checkpoints, merges that are not written, runs; tables, JSON and errors."""

import json
import shutil
from dataclasses import replace

import labelled_run
import pytest

from tunable_magmax.preference.preference import Preference
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.options import Reading

CPU = ("--device", "cpu")
COUNTS = {"red": 5, "blue": 3, "green": 4, "grey": 2}


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", COUNTS)


@pytest.fixture
def benched(text_run, tmp_path):
    """A run of texts with a benchmark: three samples a class for training, five for testing."""
    run = replace(text_run, path=shutil.copytree(text_run.path, tmp_path / "texts"))
    (tmp_path / "data").mkdir()
    for name, count in (("train", 3), ("test", 5)):
        run.pairs(tmp_path / "data" / name, dict.fromkeys(COUNTS, count))
    enter(run.path, {"name": "texts", "data": str(tmp_path / "data"), "tasks": labelled_run.TASKS})
    return run


def enter(run, benchmark):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "benchmark": benchmark}))


def told(tmx, *arguments):
    """The record; of one model, with its accuracy."""
    result = tmx("eval", *arguments, *CPU, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    return {**record, "accuracy": list(record["accuracies"].values())[-1]}


def test_a_checkpoint_with_its_head(tmx, image_run, site):
    head = image_run.path / "head.safetensors"
    result = tmx("eval", image_run.path / "first", "--data", site, "--head", head, *CPU)
    assert result.code == 0, result.err
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[:2] == [f"{image_run.path / 'first'} on {site}", f"  head: {head}"]
    assert lines[2].split() == ["samples", "accuracy", "95%", "interval", "task", "known", "95%", "interval"]
    found = told(tmx, image_run.path / "first", "--data", site, "--head", head)["accuracy"]
    for line, share in zip(lines[3:], ({"name": "all", **found}, *found["tasks"]), strict=True):
        low, high = (f"{100 * end:.1f}" for end in share["interval"])
        expected = [share["name"], str(share["samples"]), f"{share['accuracy']:.1%}", low, "to", f"{high}%"]
        assert line.split()[:7] == [*expected, f"{share['known_accuracy']:.1%}"]


def test_a_merge_is_measured_without_being_written(tmx, image_run, site, tmp_path):
    Preference.from_weights([3, 1]).save(tmp_path / "site.json")
    before = sorted(image_run.path.rglob("*"))
    found = told(tmx, image_run.path, "--preference", tmp_path / "site.json", "--data", site)
    assert sorted(image_run.path.rglob("*")) == before
    assert found["accuracy"] == told(tmx, image_run.path, "--weights", "3,1", "--data", site)["accuracy"]
    assert tmx("merge", image_run.path, "--weights", "3,1", "-o", tmp_path / "site-model").code == 0
    written = told(tmx, tmp_path / "site-model", "--data", site)  # finds the run by its log
    assert written["accuracy"] == found["accuracy"]
    assert found["merge"]["budget"] == found["merge"]["counts"]
    assert written["head"] == found["head"] == str(image_run.path / "head.safetensors")
    text = tmx("eval", image_run.path, "--weights", "3,1", "--data", site, *CPU).out
    assert text.startswith(f"merge of 2 tasks by tunable_magmax on {site}")
    assert "merged in memory by tunable_magmax, scale " in text


def test_classes(tmx, image_run, site):
    options = ("--data", site, "--per-class")
    result = tmx("eval", image_run.path / "first", *options, *CPU)
    lines = result.out.splitlines()
    start = lines.index("by class")
    assert lines[start + 1].split()[:4] == ["class", "task", "samples", "accuracy"]
    assert [line.split()[:3] for line in lines[start + 2 : start + 6]] == [
        [name, next(t for t, names in labelled_run.TASKS.items() if name in names), str(count)]
        for name, count in COUNTS.items()
    ]


def test_without_tasks_nothing_is_known_of_them(tmx, image_run, site, tmp_path):
    model = shutil.copytree(image_run.path / "base", tmp_path / "model")
    shutil.copy(image_run.path / "head.safetensors", model)
    assert "task known" not in tmx("eval", model, "--data", site, *CPU).out
    assert "first" in tmx("eval", model, "--data", site, "--run", image_run.path, *CPU).out


def test_all_checkpoints_of_a_run(tmx, image_run, site):
    result = tmx("eval", image_run.path, "--checkpoint", "all", "--data", site, *CPU)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    expected = evaluate(image_run.path, site, reading=Reading(device="cpu"))
    assert lines[2] == "accuracy after each task (rows) on each task (columns), the task unknown"
    assert lines[3].split() == ["all", "samples", "first", "second"]
    rows = [("base", expected.matrix.base), *zip(("after first", "after second"), expected.matrix.rows, strict=True)]
    for line, (name, row), accuracy in zip(lines[4:7], rows, expected.accuracies.values(), strict=True):
        assert line.split() == [*name.split(), *(f"{value:.1%}" for value in (accuracy.overall.value, *row))]
    for name, value in expected.matrix.metrics().items():
        assert f"{name} {value:.1%}" in " ".join(result.out.split())
    found = told(tmx, image_run.path, "--checkpoint", "all", "--data", site)
    assert found["matrix"] == expected.matrix.to_dict()
    assert list(found["accuracies"]) == ["base", "first", "second"]


def test_the_benchmark_of_a_run(tmx, benched):
    found = told(tmx, benched.path, "--checkpoint", "all")
    assert found["data"] == "texts (test)"
    assert [task["samples"] for task in found["accuracies"]["base"]["tasks"]] == [10, 10]
    assert found["matrix"]["samples"] == [10, 10]
    merged = told(tmx, benched.path, "--method", "average")
    assert merged["accuracy"]["samples"] == 20
    assert told(tmx, benched.path, "--method", "average", "--split", "train")["accuracy"]["samples"] == 12
    assert told(tmx, benched.path / "first", "--max-samples", "7")["accuracy"]["samples"] == 7
    result = tmx("eval", benched.path, "--method", "average", "--split", "tset", *CPU)
    assert result.code == 2
    assert "a benchmark has the splits train and test, not 'tset'" in result.err


def test_a_benchmark_in_a_file(tmx, benched, tmp_path):
    section = {"name": "texts", "data": "data", "tasks": labelled_run.TASKS}
    expected = told(tmx, benched.path / "first")["accuracy"]
    for content in (section, {"benchmark": section, "model": "base"}):
        (tmp_path / "run.yaml").write_text(json.dumps(content))
        assert told(tmx, benched.path / "first", "--data", tmp_path / "run.yaml")["accuracy"] == expected
    (tmp_path / "run.yaml").write_text("- texts")
    result = tmx("eval", benched.path / "first", "--data", tmp_path / "run.yaml", *CPU)
    assert "run.yaml: expected a mapping with the section 'benchmark'" in result.err
