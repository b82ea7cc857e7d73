"""What would be trained is known without reading weights or inputs."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from training import toy

from tunable_magmax.training.config import TrainConfig, plan_training


@pytest.fixture(autouse=True)
def no_reading(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("read")

    monkeypatch.setattr("tunable_magmax.data.images.read_picture", refuse)
    monkeypatch.setattr("tunable_magmax.checkpoints.checkpoint.Checkpoint.read_into", refuse)
    monkeypatch.setattr("tunable_magmax.models.encoder.read_state", refuse)


def test_tasks_and_steps(tmp_path):
    given = toy.config(tmp_path, "vit", train={"batch": 4, "epochs": 3}, benchmark={"tasks": 3, "order": "natural"})
    plan = plan_training(given)
    assert [(task.name, task.classes, task.samples, task.test) for task in plan.tasks] == [
        ("task-01", 2, 14, 6),
        ("task-02", 1, 7, 3),
        ("task-03", 1, 7, 3),
    ]
    assert [task.steps for task in plan.tasks] == [3 * 4, 3 * 2, 3 * 2]
    assert json.loads(json.dumps(asdict(plan)))["tasks"][0]["steps"] == 12


def test_a_warm_up_that_never_ends_is_said(tmp_path):
    plan = plan_training(toy.config(tmp_path, "vit", train={"warmup": 8}))
    assert plan.notes == (
        "the warm-up of 8 steps is not over at the end of 2 of 2 tasks; train.warmup below 1 is a share of the steps",
    )
    assert plan_training(toy.config(tmp_path, "vit", train={"warmup": 7})).notes == ()


def test_what_would_become_of_a_model_that_is_not_here_is_said(tmp_path):
    def notes(model):
        return plan_training(TrainConfig.read({**toy.settings(tmp_path, "vit"), "model": model}, tmp_path)).notes

    (fetched,) = notes("clpi")
    assert fetched.startswith(f"the model 'clpi' is not here ({tmp_path / 'clpi'} does not exist): it would be fetched")
    (nowhere,) = notes("./clpi")
    assert nowhere.startswith(f"the model {tmp_path / 'clpi'} does not exist: training would stop at once")
    assert notes("vit") == ()
