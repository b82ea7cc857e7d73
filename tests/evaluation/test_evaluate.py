"""Checkpoints, merges and runs on labelled data give what a plain loop over files gives; `tmx eval` shows it."""

import json
import shutil
from dataclasses import replace

import labelled_run
import numpy as np
import pytest

import tunable_magmax as tmx
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Accuracy, known_labels, label_samples
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import evaluate, find_head
from tunable_magmax.workflows.options import Reading

CPU = Reading(device="cpu")
COUNTS = {"red": 5, "blue": 3, "green": 4, "grey": 2}


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", COUNTS)


def plain(run, checkpoint, data):
    """The accuracy by the parts that others test: classifier, samples, counting."""
    encoder, head = load_encoder(checkpoint, "cpu", assets=run / "base"), load_head(run / "head.safetensors")
    samples = open_samples(data)
    labels = [head.classes.index(samples.classes[label]) for label in samples.labels]
    scores = head.probabilities(embed_inputs(encoder, list(samples.load(range(len(samples))))))
    tasks = {name: [head.classes.index(c) for c in names] for name, names in labelled_run.TASKS.items()}
    owners = [next(t for t, group in enumerate(tasks.values()) if label in group) for label in labels]
    return Accuracy.of(scores, np.array(labels), head.classes, tasks, np.array(owners))


def test_a_checkpoint(any_run, tmp_path):
    data = any_run.pairs(tmp_path / "site", COUNTS)
    for name in ("base", "first", "second"):
        found = evaluate(any_run.path / name, data, head=any_run.path / "head.safetensors", reading=CPU)
        assert found.accuracy == plain(any_run.path, any_run.path / name, data)
        assert found.accuracy.overall.samples == 14
        assert found.unreadable == 0
    # The head was made under this task.
    assert found.accuracy.known_by_task["second"].value > 0.8


def test_a_run_gives_its_matrix(any_run, tmp_path):
    data = any_run.pairs(tmp_path / "site", COUNTS)
    steps = []
    found = evaluate(any_run.path, data, reading=CPU, progress=lambda *step: steps.append(step))
    rows = {name: plain(any_run.path, any_run.path / name, data) for name in ("base", "first", "second")}
    assert found.accuracies == rows
    assert found.matrix.tasks == ("first", "second")
    for i, name in enumerate(found.matrix.tasks):
        assert found.matrix.rows[i] == tuple(rows[name].by_task[task].value for task in found.matrix.tasks)
    assert found.matrix.base == tuple(share.value for share in rows["base"].by_task.values())
    assert found.matrix.samples == (8, 6)
    assert list(found.matrix.metrics())[-1] == "forward transfer"
    assert [step for step in steps if step[0] == "embedding"][-1] == ("embedding", 42, 42)


def test_labels_by_name_or_by_index(tmp_path):
    (tmp_path / "names.csv").write_text("text,label\na,dog\nb,cat\n")
    (tmp_path / "indices.csv").write_text("text,label\na,1\nb,0\n")
    for file in ("names.csv", "indices.csv"):
        assert known_labels(open_samples(tmp_path / file), ["cat", "dog"]) == ({0: 1, 1: 0}, [])


def test_samples_with_unknown_labels_are_left_out_if_they_are_few(tmp_path):
    (tmp_path / "site.csv").write_text("text,label\na,cat\nb,zebra\nc,dog\nd,dgo\n")
    samples = open_samples(tmp_path / "site.csv")
    message = r"2 of 4 labels are no class of the head, and these samples are left out: 'zebra', 'dgo' \(did you mean"
    with pytest.warns(UserWarning, match=message):
        found = label_samples(samples, ["cat", "dog"], {"pets": ("cat", "dog")})
    assert (found.positions, found.targets.tolist(), found.unknown) == ((0, 2), [0, 1], 2)
    assert found.sample_tasks.tolist() == [0, 0]
    with pytest.raises(InputError, match="1 of 2 labels are no class of the head: 'zebra'"):
        label_samples(samples, ["cat", "dog"], None, [0, 1])


def test_tasks_that_share_classes_are_left_out(tmp_path):
    (tmp_path / "site.csv").write_text("text,label\na,cat\nb,dog\nc,dog\n")
    samples, tasks = open_samples(tmp_path / "site.csv"), {"photo": ("cat", "dog"), "sketch": ("dog", "cat")}
    assert label_samples(samples, ["cat", "dog"], tasks).tasks == {}
    with pytest.raises(InputError, match="'cow'"):
        label_samples(samples, ["cat", "dog"], {"farm": ["cow"]})


def test_a_merged_directory_finds_its_run_by_its_log(image_run, site, tmp_path):
    run, folder = Run.open(image_run.path), tmp_path / "site-model"
    tmx.merge_checkpoints(run.base, run.tasks, folder)
    found = evaluate(folder, site, reading=CPU)
    assert found.head == str(image_run.path / "head.safetensors")
    assert [*found.accuracy.by_task] == ["first", "second"]
    # What was given goes first, then what lies beside it.
    shutil.copy(image_run.path / "head.safetensors", folder / "classifier-head.safetensors")
    assert find_head(folder).source == str(folder / "classifier-head.safetensors")
    assert find_head(folder, run=run).source == str(image_run.path / "head.safetensors")
    other = shutil.copy(image_run.path / "head.safetensors", tmp_path / "other.safetensors")
    assert find_head(folder, head=other, run=run).source == str(other)


def test_a_run_is_found_though_its_base_lies_elsewhere(image_run, site, tmp_path):
    run = shutil.copytree(image_run.path, tmp_path / "run")
    (run / "base").rename(tmp_path / "base")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "base": str(tmp_path / "base")}))
    tmx.merge_checkpoints(tmp_path / "base", [run / "first", run / "second"], tmp_path / "merged")
    assert evaluate(tmp_path / "merged", site, reading=CPU).accuracy.by_task.keys() == {"first", "second"}


def test_unreadable_images(image_run, tmp_path):
    site = image_run.pairs(tmp_path / "site", COUNTS)
    (site / "red" / "0.png").write_text("?")
    with pytest.warns(UserWarning, match="1 of 14 samples could not be read"):
        found = evaluate(image_run.path / "first", site, reading=CPU)
    assert found.unreadable == 1
    assert found.accuracy.by_class["red"].samples == 4


# -- the command ------------------------------------------------------------------------------------------------------

ON_CPU = ("--device", "cpu")


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
    result = tmx("eval", *arguments, *ON_CPU, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    return {**record, "accuracy": list(record["accuracies"].values())[-1]}


def test_a_checkpoint_with_its_head(tmx, image_run, site):
    head = image_run.path / "head.safetensors"
    result = tmx("eval", image_run.path / "first", "--data", site, "--head", head, *ON_CPU)
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
    text = tmx("eval", image_run.path, "--weights", "3,1", "--data", site, *ON_CPU).out
    assert text.startswith(f"merge of 2 tasks by tunable_magmax on {site}")
    assert "merged in memory by tunable_magmax, scale " in text


def test_classes(tmx, image_run, site):
    options = ("--data", site, "--per-class")
    result = tmx("eval", image_run.path / "first", *options, *ON_CPU)
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
    assert "task known" not in tmx("eval", model, "--data", site, *ON_CPU).out
    assert "first" in tmx("eval", model, "--data", site, "--run", image_run.path, *ON_CPU).out


def test_all_checkpoints_of_a_run(tmx, image_run, site):
    result = tmx("eval", image_run.path, "--checkpoint", "all", "--data", site, *ON_CPU)
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
    result = tmx("eval", benched.path, "--method", "average", "--split", "tset", *ON_CPU)
    assert result.code == 2
    assert "a benchmark has the splits train and test, not 'tset'" in result.err


def test_a_benchmark_in_a_file(tmx, benched, tmp_path):
    section = {"name": "texts", "data": "data", "tasks": labelled_run.TASKS}
    expected = told(tmx, benched.path / "first")["accuracy"]
    for content in (section, {"benchmark": section, "model": "base"}):
        (tmp_path / "run.yaml").write_text(json.dumps(content))
        assert told(tmx, benched.path / "first", "--data", tmp_path / "run.yaml")["accuracy"] == expected
    (tmp_path / "run.yaml").write_text("- texts")
    result = tmx("eval", benched.path / "first", "--data", tmp_path / "run.yaml", *ON_CPU)
    assert "run.yaml: expected a mapping with the section 'benchmark'" in result.err
