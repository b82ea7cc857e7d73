"""The search on labelled samples finds merges that score best, reads files once, and can be continued."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")
pytest.importorskip("optuna", reason="optuna is not installed (extra: tune)")

from models import tiny
from safetensors.torch import load_file, save_file

from tunable_magmax import merge_checkpoints
from tunable_magmax.checkpoints.safetensors_file import SafetensorsFile
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import Refill, load_encoder
from tunable_magmax.models.head import Classifier, load_head
from tunable_magmax.models.state import read_state
from tunable_magmax.preference.search import Search, Trial
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows import search as searching
from tunable_magmax.workflows.search import search_preference
from tunable_magmax.workflows.target import TargetReading, TargetSamples


def found_for(run, pairs, **options):
    names = [field.name for field in dataclasses.fields(Search) if field.name in options]
    settings = Search(**{name: options.pop(name) for name in names})
    reading = TargetReading(device="cpu", max_samples=options.pop("max_samples", 500))
    return search_preference(TargetSamples(run, reading=reading), open_samples(pairs), settings, **options)


def changed(run, **changes):
    """The same run with other values for each task."""
    record = json.loads((run.path / "run.json").read_text())
    return Run(run.path, {**record, "tasks": [{**task, **changes} for task in record["tasks"]]})


def without_profiles(run):
    return changed(run, profile=None)


def measured(run, pairs, preference, folder, **options):
    """The accuracy of the merge that a user would make, from its files."""
    options = {"weights": preference.weights, **options}
    merge_checkpoints(run.base, run.tasks, folder / "merged.safetensors", **options)
    encoder = load_encoder(folder / "merged.safetensors", "cpu", assets=run.base)
    classifier = Classifier(encoder, load_head(run.head))
    samples = open_samples(pairs)
    names = [samples.classes[label] for label in samples.labels]
    predicted = classifier.head.probabilities(classifier.encoder.embed(list(samples.load(range(len(samples)))))).argmax(
        axis=1
    )
    return np.mean([classifier.classes[k] == name for k, name in zip(predicted, names, strict=True)])


@pytest.mark.parametrize("classes", [("red", "blue"), ("green", "grey"), ("red", "green")])
def test_no_worse_than_its_starts_and_as_good_as_the_merge_itself(any_run, tmp_path, classes):
    run = Run.open(any_run.path)
    pairs = any_run.pairs(tmp_path / "site", dict.fromkeys(classes, 6))
    found = found_for(run, pairs, trials=12, patience=None)
    facts = found.provenance
    assert (found.method, found.tasks, facts["samples"], facts["trials"]) == ("search", run.names, 12, 12)
    mixed = classes == ("red", "green")  # then the label preference is equal weights
    assert [start["source"] for start in facts["starts"]] == ["equal"] + ["label"] * (not mixed)
    assert all(facts["accuracy"] >= start["accuracy"] for start in facts["starts"])
    assert facts["scale"] == "matched"
    assert facts["accuracy"] == pytest.approx(measured(run, pairs, found, tmp_path))


def test_finds_the_task_that_helps(image_run, tmp_path):
    run = without_profiles(Run.open(image_run.path))
    found = found_for(run, image_run.pairs(tmp_path / "site", {"red": 6, "blue": 6}), trials=60)
    assert [start["source"] for start in found.provenance["starts"]] == ["equal"]
    assert found.provenance["starts"][0]["accuracy"] < 0.5
    assert found.provenance["accuracy"] == 1
    assert found.provenance["stopped"] == "patience"
    assert found.weights[0] > 0.8
    assert found.intervals[0][0] > 0.5


def test_patience_ends_what_cannot_get_better(image_run, tmp_path):
    pairs = image_run.pairs(tmp_path / "site", {"red": 6, "blue": 6})
    found = found_for(Run.open(image_run.path), pairs, trials=50, patience=3)
    # The label preference, which gets everything right.
    assert found.weights == pytest.approx((1, 0), abs=0.02)
    assert (found.provenance["trials"], found.provenance["stopped"]) == (2 + 3, "patience")


def test_the_scale(image_run, tmp_path):
    run = Run.open(image_run.path)
    pairs = image_run.pairs(tmp_path / "site", {"green": 6, "grey": 6})
    found = found_for(run, pairs, scale=(0.25, 2.0), trials=15, patience=None)
    scale = found.provenance["scale"]
    assert 0.25 <= scale <= 2
    # The starts have the scale that a merge has by default, so searching the scale cannot lose to not searching it.
    assert found.provenance["starts"] == found_for(run, pairs, trials=2).provenance["starts"]
    assert found.provenance["accuracy"] == pytest.approx(measured(run, pairs, found, tmp_path, scale=scale))


def test_files_are_read_once_however_many_trials(any_run, tmp_path, monkeypatch):
    reads, opened = [], []
    original = SafetensorsFile.read_into

    def spy(self, name, offset, buffer):
        reads.append(name)
        original(self, name, offset, buffer)

    monkeypatch.setattr(SafetensorsFile, "read_into", spy)
    samples = open_samples(any_run.pairs(tmp_path / "site", {"red": 3, "grey": 3}))

    def load(positions):
        opened.extend(positions)
        return samples.load(positions)

    counted = []
    for trials in (1, 9):
        reads.clear()
        opened.clear()
        target = TargetSamples(Run.open(any_run.path), reading=TargetReading(device="cpu"))
        settings = Search(trials=trials, patience=None)
        search_preference(target, dataclasses.replace(samples, load=load), settings)
        counted.append(len(reads))
        assert opened == list(range(6))
    assert counted[0] == counted[1] > 0


def test_a_study_goes_on(any_run, tmp_path, monkeypatch):
    run = Run.open(any_run.path)
    pairs = any_run.pairs(tmp_path / "site", {"red": 4, "grey": 4})
    scored, seen = [], []
    original = searching._Scorer.score

    def spy(self, weights, scale):
        scored.append(weights)
        return original(self, weights, scale)

    monkeypatch.setattr(searching._Scorer, "score", spy)
    study = tmp_path / "site.journal"
    options = {"study_file": study, "patience": None, "watch": lambda history: seen.append(len(history))}
    assert found_for(run, pairs, trials=4, **options).provenance["trials"] == 4
    found = found_for(run, pairs, trials=9, **options)
    assert found.provenance["trials"] == len(scored) == 9
    assert len(set(scored)) == 9
    assert seen == [1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    assert found_for(run, pairs, trials=9, **options) == found
    assert len(scored) == 9
    other = any_run.pairs(tmp_path / "other", {"red": 4, "grey": 4}, seed=901)
    with pytest.raises(InputError, match=r"holds a search with .* \(other: problem\); name another study file"):
        found_for(run, other, trials=9, **options)


def test_one_seed_one_result(image_run, tmp_path):
    run = without_profiles(Run.open(image_run.path))
    pairs = image_run.pairs(tmp_path / "site", {"red": 3, "green": 3})
    first, again, other = (found_for(run, pairs, trials=6, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.weights != other.weights or first.intervals != other.intervals


def test_what_is_left_out_is_told(image_run, tmp_path):
    pairs = image_run.pairs(tmp_path / "site", {"red": 3, "blue": 3})
    (pairs / "zebra").mkdir()
    (pairs / "red" / "0.png").rename(pairs / "zebra" / "0.png")
    (pairs / "blue" / "0.png").write_text("?")
    with pytest.warns(UserWarning, match="left out") as told:
        found = found_for(Run.open(image_run.path), pairs, trials=1)
    assert [str(warning.message).removeprefix(f"{pairs}: ") for warning in told] == [
        "1 ('zebra') of 6 labels are no class of the classifier; left out",
        "1 of 5 samples could not be read and were left out: blue/0.png (not an image)",
    ]
    assert found.provenance["samples"] == 4
    assert found.provenance["read"] == {"pairs": "site", "given": 6, "unknown_labels": 1, "unreadable": 1}


def test_a_sample_of_many(image_run, tmp_path):
    pairs = image_run.pairs(tmp_path / "site", {"red": 5, "blue": 5})
    assert found_for(Run.open(image_run.path), pairs, trials=1, max_samples=4).provenance["samples"] == 4


@pytest.mark.parametrize("kind", ["vit", "vit-classifier", "clip", "bert", "bert-masked", "bert-old"])
def test_weights_are_replaced_as_if_loaded(tmp_path, kind):
    """Whatever the checkpoint calls its tensors: with a prefix, with a head, or as BERT did at first."""
    model = tiny.build(kind.removesuffix("-old"))
    first = tiny.save(model, tmp_path / "first")
    other = tiny.save(tiny.changed(model), tmp_path / "other")
    if kind == "bert-old":
        for folder in (first, other):
            tensors = load_file(folder / "model.safetensors")
            old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for n, tensor in tensors.items()}
            assert old.keys() != tensors.keys()
            save_file(old, folder / "model.safetensors", {"format": "pt"})
    encoder, expected = load_encoder(first, "cpu"), load_encoder(other, "cpu")
    refill = Refill(encoder, read_state(first)[0])
    refill(read_state(other)[0])
    inputs = [tiny.picture((200, 30, 30))] if encoder.image_processor else ["pay my bill"]
    np.testing.assert_array_equal(encoder.embed(inputs), expected.embed(inputs))


# -- intervals -------------------------------------------------------------------------------------------------------


def trial(weight, right):
    return Trial((weight, 1 - weight), None, float(np.mean(right)), np.packbits(right).tobytes().hex())


def test_intervals_reach_to_the_next_point_that_is_clearly_worse():
    right = {0.1: 4, 0.3: 8, 0.5: 10, 0.6: 9, 0.8: 4, 0.9: 0}
    history = [trial(weight, np.arange(10) < count) for weight, count in right.items()]
    # Six fewer of ten is clear (1 / 64), two fewer is not (1 / 4).
    low, high = searching._intervals(history, history[2], 10, 0.9)[0]
    assert (low, high) == (0.1, 0.8)
    assert searching._intervals(history[2:3], history[2], 10, 0.9) == ((0, 1), (0, 1))
    one = [trial(weight, np.array([weight == 0.5])) for weight in (0.1, 0.5, 0.9)]
    assert searching._intervals(one, one[1], 1, 0.9) == ((0, 1), (0, 1))


# -- bad input -------------------------------------------------------------------------------------------------------


def test_missing_extras(image_run, tmp_path, monkeypatch):
    run, pairs = Run.open(image_run.path), image_run.pairs(tmp_path / "site", {"red": 1})
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"tunable-magmax\[tune\]"):
        found_for(run, pairs)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"tunable-magmax\[train\]"):
        found_for(run, pairs)


def test_a_run_in_which_nothing_changed(image_run, tmp_path):
    run = Run.open(image_run.path)
    run = changed(run, checkpoint="base")
    with pytest.raises(InputError, match="no task changed anything"):
        found_for(run, image_run.pairs(tmp_path / "site", {"red": 1}))


def test_texts_for_an_encoder_of_images(image_run, tmp_path):
    (tmp_path / "site.csv").write_text("text,label\nhello,red\n")
    with pytest.raises(InputError, match="encodes images, not texts"):
        found_for(Run.open(image_run.path), tmp_path / "site.csv")
