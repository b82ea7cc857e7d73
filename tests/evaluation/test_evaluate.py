"""Checkpoints, merges and runs on labelled data give what a plain loop over files gives."""

import json
import shutil

import labelled_run
import numpy as np
import pytest

import tunable_magmax as tmx
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Accuracy
from tunable_magmax.evaluation.labelled import known_labels, label_samples
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import evaluate, find_head
from tunable_magmax.workflows.options import Reading

CPU = Reading(device="cpu")
COUNTS = {"red": 5, "blue": 3, "green": 4, "grey": 2}


@pytest.fixture
def site(image_run, tmp_path):
    return image_run.pairs(tmp_path / "site", COUNTS)


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


def test_unreadable_images(image_run, site):
    (site / "red" / "0.png").write_text("?")
    with pytest.warns(UserWarning, match="1 of 14 samples could not be read"):
        found = evaluate(image_run.path / "first", site, reading=CPU)
    assert found.unreadable == 1
    assert found.accuracy.by_class["red"].samples == 4
