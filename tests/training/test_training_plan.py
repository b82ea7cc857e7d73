"""What would be trained is known without reading weights or inputs."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny
from training import toy

from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.tower import image_tower
from tunable_magmax.training.config import TrainConfig, plan_training


@pytest.fixture(autouse=True)
def no_reading(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("read")

    monkeypatch.setattr("tunable_magmax.data.images.read_picture", refuse)
    monkeypatch.setattr("tunable_magmax.checkpoints.checkpoint.Checkpoint.read_into", refuse)
    monkeypatch.setattr("tunable_magmax.models.encoder.read_state", refuse)


def test_tasks_steps_and_bytes(tmp_path, monkeypatch):
    given = toy.config(tmp_path, "vit", train={"batch": 4, "epochs": 3}, benchmark={"tasks": 3, "order": "natural"})
    plan = plan_training(given)
    assert [(task.name, task.classes, task.samples, task.test) for task in plan.tasks] == [
        ("task-01", 2, 14, 6),
        ("task-02", 1, 7, 3),
        ("task-03", 1, 7, 3),
    ]
    assert [task.steps for task in plan.tasks] == [3 * 4, 3 * 2, 3 * 2]
    elements = sum(parameter.numel() for parameter in tiny.build("vit").parameters())
    assert plan.bytes == 4 * elements * (1 + 3)
    assert plan.notes == ("tasks differ in their number of classes: 2, 1, 1",)
    assert json.loads(json.dumps(asdict(plan)))["tasks"][0]["steps"] == 12


def test_a_text_tower_counts_only_if_it_is_kept(tmp_path, monkeypatch):
    dropped, kept = (plan_training(toy.config(tmp_path, "clip", text_tower=tower)).bytes for tower in ("drop", "keep"))
    monkeypatch.undo()
    whole = load_encoder(tmp_path / "clip", "cpu")
    assert kept == 4 * 3 * sum(p.numel() for p in whole.module.parameters())
    assert dropped == 4 * 3 * sum(p.numel() for p in image_tower(whole).module.parameters())


def test_a_warm_up_that_never_ends_is_said(tmp_path):
    plan = plan_training(toy.config(tmp_path, "vit", train={"warmup": 8}))
    assert plan.notes == (
        "the warm-up of 8 steps is not over at the end of 2 of 2 tasks; train.warmup below 1 is a share of the steps",
    )
    assert plan_training(toy.config(tmp_path, "vit", train={"warmup": 7})).notes == ()


def test_models_that_are_not_here_yet_have_no_size(tmp_path):
    given = {**toy.settings(tmp_path, "vit"), "model": "some/hub-name"}
    assert plan_training(TrainConfig.read(given, tmp_path)).bytes is None


def test_what_would_become_of_a_model_that_is_not_here_is_said(tmp_path):
    def notes(model):
        return plan_training(TrainConfig.read({**toy.settings(tmp_path, "vit"), "model": model}, tmp_path)).notes

    (fetched,) = notes("clpi")
    assert fetched.startswith(f"the model 'clpi' is not here ({tmp_path / 'clpi'} does not exist): it would be fetched")
    (nowhere,) = notes("./clpi")
    assert nowhere.startswith(f"the model {tmp_path / 'clpi'} does not exist: training would stop at once")
    assert notes("vit") == ()
