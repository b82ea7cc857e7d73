"""What version 0.1.0 wrote is still read: a run, profiles, a preference, a merge with its report, a sweep.

tests/golden/v0.1.0 was made with 0.1.0 by `tmx train run.yaml`, `tmx prefer --labels`, `tmx merge --preference` and
`tmx sweep --reports-only`, of a tiny BERT on a few texts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tunable_magmax.data.benchmark import BenchmarkOptions
from tunable_magmax.evaluation.metrics import AccuracyMatrix
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import read_recipe
from tunable_magmax.runs.run import Run

OLD = Path(__file__).parent / "golden" / "v0.1.0"


@pytest.fixture
def old(tmp_path):
    return shutil.copytree(OLD, tmp_path / "old")


def test_the_run(old):
    run = Run.open(old / "run")
    assert run.names == ("task-01", "task-02")
    assert run.classes == {"task-01": ("card", "hello"), "task-02": ("pay", "bill")}
    assert all(path.is_file() for path in (run.head, *(path / "model.safetensors" for path in (run.base, *run.tasks))))
    first, second = run.require_profiles("a test")
    assert first.label_table == {"bill": 0, "card": 7, "hello": 7, "pay": 0}
    assert (first.samples, first.features.shape, second.base_features.shape) == (14, (5, 8), (5, 8))
    assert BenchmarkOptions.read(run.benchmark, run.path).record() == run.benchmark
    matrix = AccuracyMatrix.from_dict(run.read_metrics())
    assert (matrix.tasks, matrix.after) == (run.names, 2)


def test_the_preference_and_its_merge_give_the_same_bytes(tmx, old, tmp_path):
    preference = Preference.load(old / "preference.json")
    assert (preference.method, preference.weights, preference.tasks) == (
        "label",
        (2 / 3, 1 / 3),
        ("task-01", "task-02"),
    )
    result = tmx("merge", old / "run", "--preference", old / "preference.json", "-o", tmp_path / "merged")
    assert result.code == 0, result.err
    again, before = ((folder / "model.safetensors").read_bytes() for folder in (tmp_path / "merged", old / "merged"))
    assert again == before
    assert (
        tmx("prefer", old / "run", "--labels", old / "run.yaml", "--json").code == 2
    )  # no labels, but the run is read


def test_the_merge(tmx, old):
    report = MergeReport.from_json((old / "merged" / "tmx-report.json").read_text())
    assert (report.method, report.elements, sum(report.counts)) == ("tunable_magmax", 720, 720)
    run = Run.open(old / "run")
    tasks = [word for task in run.tasks for word in ("--task", task)]
    result = tmx("verify", old / "merged", "--base", run.base, *tasks)
    assert result.code == 0, result.out + result.err
    assert tmx("inspect", old / "merged").code == 0
    recipe = read_recipe(old / "merged" / "tmx-config.yaml")
    assert (recipe.options["scale"], recipe.options["weights"]) == (
        "matched",
        list(Preference.load(old / "preference.json").weights),
    )


def test_evaluation(tmx, old):
    pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
    shown = tmx("eval", old / "run", "--json")
    assert json.loads(shown.out)["matrix"] == json.loads((old / "run" / "metrics.json").read_text())["matrix"]
    result = tmx("eval", old / "merged", "--run", old / "run", "--data", old / "texts" / "test.csv", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["accuracy"]["samples"] == 12


def test_the_sweep(old):
    record = json.loads((old / "sweep" / "sweep.json").read_text())
    for point in record["points"]:
        report = MergeReport.from_json((old / "sweep" / point["report"]).read_text())
        assert list(report.counts) == point["counts"]
