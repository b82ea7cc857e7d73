"""Sequences of ordinary classifiers: the encoder of the task before, and a new classifier for each task."""

import json

import pytest
import torch
import transformers
from models import tiny
from safetensors.torch import load_file
from training import toy

import tunable_magmax as tmx
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.runs.run import Run
from tunable_magmax.training import sequence
from tunable_magmax.training.loop import TaskResult

BUILTIN = {"source": "builtin"}
CLASSES = (["card", "hello"], ["pay", "bill"])
TEXTS, IMAGES = transformers.AutoModelForSequenceClassification, transformers.AutoModelForImageClassification


def train(root, kind, **sections):
    config = toy.config(root, kind, head=BUILTIN, **sections)
    return tmx.train_sequence(config, root / "run", device="cpu")


@pytest.fixture(scope="module", params=["bert", "vit"])
def made(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return request.param, root, train(root, request.param, train={"epochs": 6})


def test_each_task_is_a_whole_classifier_that_transformers_uses(made):
    kind, root, trained = made
    tests = open_samples(root / ("texts/test.csv" if kind == "bert" else "images/test"))
    for path, names in zip(Run.open(trained.path).tasks, CLASSES, strict=True):
        model = (TEXTS if kind == "bert" else IMAGES).from_pretrained(path)
        assert [model.config.id2label[k] for k in range(2)] == names
        assert model.config.label2id == {name: k for k, name in enumerate(names)}
        task = "text-classification" if kind == "bert" else "image-classification"
        pipe = transformers.pipeline(task, str(path), device="cpu")  # with its own tokenizer or image processor
        own = [k for k, label in enumerate(tests.labels) if tests.classes[label] in names]
        answers = {pipe(value, top_k=1)[0]["label"] for value in tests.load(own)}
        assert answers <= {*names}


def test_the_run_is_one_of_tasks_with_classifiers_of_their_own(made):
    _, root, trained = made
    run = Run.open(trained.path)
    assert (run.head, run.names, list(run.classes.values())) == (None, ("task-01", "task-02"), [*map(tuple, CLASSES)])
    for path, profile in zip(run.tasks, run.profiles, strict=True):
        assert (profile.encoder, profile.base) == (
            load_encoder(path, "cpu").digest,
            load_encoder(run.base, "cpu").digest,
        )
        assert len(profile.features) == len(profile.base_features) == 14
    tmx.merge_checkpoints(run.base, run.checkpoints, root / "merged")
    labels = json.loads((root / "merged" / "config.json").read_text())["id2label"]
    assert sorted(labels.values()) == sorted(toy.CLASSES)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_the_encoder_goes_on_and_the_classifier_is_new(tmp_path, monkeypatch, kind):
    """Instead of training, everything moves by 1."""

    def move(learner, *_, **__):
        with torch.no_grad():
            for parameter in learner.module.parameters():
                parameter += 1
        return TaskResult(1, 1, 1.0, 1.0)

    monkeypatch.setattr(sequence, "train_task", move)
    frozen = train(tmp_path, kind, train={"epochs": 1})
    base, first, last = (load_file(frozen.path / name / "model.safetensors") for name in ("base", "task-01", "task-02"))
    prefix = {"bert": "bert.", "vit": "vit."}[kind]
    for name in first:
        before = base.get(name.removeprefix(prefix))
        if before is None:
            assert name.startswith("classifier.")
            assert not torch.allclose(last[name], first[name] + 1) or name.endswith("bias")
        else:
            torch.testing.assert_close(first[name], before + 1)
            torch.testing.assert_close(last[name], before + 2)


def test_one_task_of_all_classes_is_joint_training(tmp_path):
    joint = train(tmp_path, "bert", benchmark={"tasks": 1, "order": "natural"}, train={"steps": 3})
    assert [(result.steps, result.samples) for result in joint.results] == [(3, 28)]
    assert set(TEXTS.from_pretrained(joint.path / "task-01").config.label2id) == set(toy.CLASSES)


def test_one_seed_one_result_and_a_missing_pooler_is_made_by_it(tmp_path):
    tiny.save(transformers.BertModel(transformers.BertConfig(**tiny.TEXT), add_pooling_layer=False), tmp_path / "bert")
    config = toy.config(tmp_path, "bert", head=BUILTIN)
    for seed, name in ((1, "one"), (2, "two")):
        torch.manual_seed(seed)  # whatever others did with random numbers
        tmx.train_sequence(config, tmp_path / name, device="cpu")
    assert toy.differing(tmp_path / "one", tmp_path / "two") == []
    assert "bert.pooler.dense.weight" in load_file(tmp_path / "one" / "task-01" / "model.safetensors")


def test_what_cannot_be_trained_so_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="builtin"):
        train(tmp_path, "clip-vision")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    with pytest.raises(InputError, match=r"train\.freeze"):
        train(tmp_path, "bert", train={"freeze": ["*"]})
