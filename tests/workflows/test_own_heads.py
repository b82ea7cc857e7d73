"""Models with classifiers of their own are evaluated, compared, used and tailored without a head file."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from builtin_run import TASKS, build_builtin

from tunable_magmax import load_classifier, merge_checkpoints, open_run
from tunable_magmax.errors import InputError
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.init import init_run
from tunable_magmax.workflows.options import InitOptions, SiteSources, TailorOptions
from tunable_magmax.workflows.tailor import tailor

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return build_builtin(tmp_path_factory.mktemp("run"))


def test_a_checkpoint_is_evaluated_by_its_own_classifier(run):
    found = evaluate(run / "pets", run / "pets.csv")
    assert found.accuracy.overall.value == 1.0
    assert found.head == "the model's own classifier"
    with pytest.raises(InputError, match="'saw'"):
        evaluate(run / "pets", run / "tools.csv")


@pytest.mark.parametrize("name", ["base", "last", "pets"])
def test_a_named_checkpoint_of_a_run_has_the_rows_of_all_labels(run, name):
    opened, data = open_run(run), run / "all.csv"
    assert opened.evaluate(name, data).head == "the rows of all tasks' classifiers"
    with data.open(newline="") as rows:
        pairs = [(row["text"], row["label"]) for row in csv.DictReader(rows)]
    (expected,) = evaluate(run, data, checkpoint=[name]).accuracies.values()
    for given in (data, pairs):
        found = opened.evaluate(name, given).accuracy
        assert (found.by_class, found.task_classes) == (expected.by_class, expected.task_classes)


def test_merges_in_memory_and_on_disk_are_one_and_a_run_has_a_matrix(run, tmp_path):
    options = {"weights": [3, 1], "scale": 1}
    in_memory = evaluate(Recipe(run / "base", (run / "pets", run / "tools"), options), run / "all.csv")
    merge_checkpoints(run / "base", [run / "pets", run / "tools"], tmp_path / "out", **options)
    assert evaluate(tmp_path / "out", run / "all.csv").accuracy.by_class == in_memory.accuracy.by_class
    measured = evaluate(run, run / "all.csv")
    assert measured.matrix is not None
    assert measured.accuracies["pets"].known_by_task["pets"].value == 1.0


def numbered(source: Path, labels: tuple[str, ...], file: Path) -> Path:
    """The same data with the row of each label in the model's classifier."""
    with source.open(newline="") as rows, file.open("w", newline="") as out:
        pairs = [(row["text"], labels.index(row["label"])) for row in csv.DictReader(rows)]
        csv.writer(out).writerows([("text", "label"), *pairs])
    return file


@pytest.mark.parametrize("generic", [False, True])
def test_numbers_in_a_tasks_data_are_rows_of_its_own_classifier(run, tmp_path, generic):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    record = json.loads((folder / "run.json").read_text())
    for task in record["tasks"]:
        del task["classes"]
        config = json.loads((folder / task["name"] / "config.json").read_text())
        if generic:
            config["id2label"] = {k: f"LABEL_{k}" for k in config["id2label"]}
            (folder / task["name"] / "config.json").write_text(json.dumps(config))
    (folder / "run.json").write_text(json.dumps(record))
    for name, labels in TASKS.items():
        data = numbered(run / f"{name}.csv", labels, tmp_path / f"{name}.csv")
        init_run(folder, InitOptions(data=[f"{name}={data}"]))
    names = {n: tuple(f"{n}/LABEL_{k}" for k in range(len(c))) if generic else c for n, c in TASKS.items()}
    assert {name: set(found) for name, found in Run.open(folder).classes.items()} == {
        name: set(labels) for name, labels in names.items()
    }
    made = tailor(Run.open(folder), TailorOptions(tmp_path / "site", SiteSources(weights=(0.8, 0.2))))
    assert set(made.preference.prior.shares) == {label for labels in names.values() for label in labels}
    assert (made.record.head.kind, made.record.head.kept > 0) == ("fitted", True)
    said = {each.label for each in load_classifier(tmp_path / "site").predict(["a cat the", "the saw a"])}
    assert said <= {label for labels in names.values() for label in labels}
