"""Runs: reproducible, complete, readable by the rest of the package, and refused where they do not fit."""

import json
import shutil

import numpy as np
import pytest
import torch
from models import tiny
from safetensors.torch import load_file
from training import toy

import tunable_magmax as tmx
from tunable_magmax.errors import InputError, TmxError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Head, load_head, save_head
from tunable_magmax.models.pretrained import read_state
from tunable_magmax.runs.run import Run
from tunable_magmax.training.config import read_config


class Stopped(Exception):
    pass


def train(config, out, **options):
    return tmx.train_sequence(config, out, device="cpu", **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of a tiny ViT, with its configuration."""
    root = tmp_path_factory.mktemp("made")
    config = toy.config(root)
    return config, train(config, root / "run")


# -- what a run is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "augment"), [("vit", "crop+flip"), ("bert", "none"), ("clip", "resized-crop")])
def test_one_seed_one_result_and_another_seed_another(tmp_path, kind, augment):
    sections = {"train": {"augment": augment}}
    torch.manual_seed(1)
    train(toy.config(tmp_path, kind, **sections), tmp_path / "one")
    torch.manual_seed(2)  # whatever others did with random numbers
    np.random.seed(2)
    train(toy.config(tmp_path, kind, **sections), tmp_path / "two")
    assert toy.differing(tmp_path / "one", tmp_path / "two") == []
    train(toy.config(tmp_path, kind, **sections, seed=1), tmp_path / "three")
    different = toy.differing(tmp_path / "one", tmp_path / "three")
    assert {"task-01/model.safetensors", "task-02/model.safetensors"} <= set(different)
    assert not any(name.startswith("base/") for name in different)


def test_a_run_is_complete(made):
    config, run = made
    record = json.loads((run.path / "run.json").read_text())
    assert record["version"] == 1
    trained = [entry.pop("training") for entry in record["tasks"]]
    assert [(one["steps"], one["samples"]) for one in trained] == [(8, 14), (8, 14)]
    assert all(one["loss"] > 0 and one["seconds"] > 0 for one in trained)
    kept = [entry.pop("kept") for entry in record["tasks"]]
    assert [(one["source"], one["samples"], one["per_class"]) for one in kept] == [("training", 14, 20)] * 2
    assert all(len(entry.pop("profiled")) == 64 for entry in record["tasks"])
    assert record["tasks"] == [
        {"name": name, "checkpoint": name, "profile": f"profiles/{name}.safetensors", "classes": classes}
        for name, classes in (("task-01", ["card", "hello"]), ("task-02", ["pay", "bill"]))
    ]
    assert record["benchmark"] == config.record()["benchmark"]
    assert record["classifier"] == {"head": "classifier-head.safetensors"}
    names = "base classifier-head.safetensors config.yaml kept profiles run.json task-01 task-02 training.json"
    assert sorted(item.name for item in run.path.iterdir()) == names.split()
    assert read_config(run.path / "config.yaml").record() == config.record()
    setup = json.loads((run.path / "training.json").read_text())
    assert setup["digests"]["base"] == read_state(run.path / "base")[1]
    assert setup["digests"]["head"] == read_state(run.path / "classifier-head.safetensors")[1]
    assert set(setup["versions"]) == {"tunable_magmax", "torch", "transformers", "python"}
    assert setup["benchmark"]["classes"] == {"task-01": ["card", "hello"], "task-02": ["pay", "bill"]}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_text_tower_makes_the_head_and_is_dropped(tmp_path, kind):
    run = train(toy.config(tmp_path, kind, train={"epochs": 1}), tmp_path / "run")
    original = load_file(tmp_path / kind / "model.safetensors")
    cosines = np.corrcoef(load_head(run.path / "classifier-head.safetensors").weight)
    assert (cosines[~np.eye(4, dtype=bool)] < 1 - 1e-4).all()  # the tiny text tower tells the classes apart
    last = load_file(run.path / "task-02" / "model.safetensors")
    assert any(name.startswith("text_model.") for name in original)
    assert set(last) == {name for name in original if name.startswith(("vision_model.", "visual_projection."))}
    assert not load_encoder(run.path / "task-02", "cpu").is_whole


@pytest.mark.parametrize(("keep", "counts"), [(2, [4, 4]), (0, [None, None])])
def test_samples_are_kept_of_what_is_held_out(tmp_path, keep, counts):
    config = toy.config(tmp_path, keep=keep, benchmark={"holdout": 0.3})
    run = Run.open(train(config, tmp_path / "run").path)
    assert [entry and entry.samples for entry in run.kept] == counts
    assert {entry.source for entry in run.kept if entry} <= {"evaluation"}
    assert [profile.samples for profile in run.profiles] == [10, 10]  # of 14, 4 are held out


# -- going on --------------------------------------------------------------------------------------------------------


def test_changed_data_or_another_base_is_refused(tmp_path):
    def stop(phase, done, total):
        if phase == "train" and done > total // 2:
            raise Stopped

    config, out = toy.config(tmp_path), tmp_path / "run"
    with pytest.raises(Stopped):
        train(config, out, progress=stop)
    new = tmp_path / "images" / "train" / "pay" / "new.png"
    tiny.picture((1, 2, 3)).save(new)
    with pytest.raises(InputError, match=r"training\.json: .* other values of benchmark:"):
        train(config, out)
    new.unlink()
    (out / "base").rename(tmp_path / "base")
    tiny.save(tiny.changed(tiny.build("vit")), out / "base")
    with pytest.raises(InputError, match="other values of digests:"):
        train(config, out)
    shutil.rmtree(out / "base")
    (tmp_path / "base").rename(out / "base")
    train(config, out)


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_mended_configuration_may_use_the_directory_where_nothing_was_made(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match=r"is called 'embedings\.\*'.*must match a parameter"):
        train(toy.config(tmp_path, train={"freeze": ["embedings.*"]}), out)
    assert [path.name for path in out.iterdir()] == ["config.yaml"]
    config = toy.config(tmp_path, train={"freeze": ["embeddings.*"]})
    train(config, out)
    assert "embeddings.*" in (out / "config.yaml").read_text()
    base, last = (load_file(out / name / "model.safetensors") for name in ("base", "task-02"))
    changed = {name for name in base if not torch.equal(base[name], last[name])}
    assert changed
    assert not any(name.startswith("embeddings.") for name in changed)
    assert train(config, out).trained == 0


def bad(root, **sections):
    with pytest.raises(TmxError) as caught:
        train(toy.config(root, **sections), root / "run")
    return str(caught.value)


def test_heads_that_do_not_fit(tmp_path):
    classes = sorted(toy.CLASSES)
    save_head(Head.of(np.eye(4, 8), classes, 10.0), tmp_path / "narrow.safetensors")
    save_head(Head.of(np.eye(3, 16), classes[:3], 10.0), tmp_path / "short.safetensors")
    said = bad(tmp_path, head={"file": "narrow.safetensors"})
    assert "width 8" in said
    assert "16" in said
    assert "'pay'" in bad(tmp_path, head={"file": "short.safetensors"})
    assert "none.safetensors" in bad(tmp_path, head={"file": "none.safetensors"})
    assert "text tower" in bad(tmp_path, head={"source": "names"})
    good = Head.of(np.eye(4, 16)[::-1], classes[::-1], 10.0)  # rows go by name
    save_head(good, tmp_path / "good.safetensors")
    config = toy.config(tmp_path, head={"file": "good.safetensors", "logit_scale": 7})
    head = load_head(train(config, tmp_path / "run").path / "classifier-head.safetensors")
    assert head.classes == tuple(classes)
    assert np.array_equal(head.weight, 7 * np.eye(4, 16))


@pytest.mark.parametrize(("kind", "other"), [("vit", "texts"), ("bert", "images")])
def test_data_of_the_other_kind(tmp_path, kind, other):
    data = {"texts": toy.texts, "images": toy.images}[other](tmp_path / "other")
    said = bad(tmp_path, kind=kind, benchmark={"name": other, "data": str(data)})
    assert str(tmp_path / kind) in said


def test_several_processes_read_a_finished_run_at_a_time(made):
    config, finished = made
    with Run.training(finished.path, config.record(), len(finished.tasks)):
        assert train(config, finished.path).trained == 0


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    arguments = (tmp_path / "run", {"benchmark": {}}, 2)
    with (
        Run.training(*arguments),
        pytest.raises(InputError, match="another process trains in"),
        Run.training(*arguments),
    ):
        pass
    with Run.training(*arguments):
        pass
