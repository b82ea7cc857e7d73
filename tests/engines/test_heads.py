"""A bare base and tasks with classifiers of their own become one classifier that transformers loads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from models import tiny
from safetensors.torch import load_file, save_file

import tunable_magmax
from tunable_magmax import merge_checkpoints
from tunable_magmax.checkpoints.heads import FittedTensors
from tunable_magmax.errors import InputError
from tunable_magmax.workflows.verify import verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend

KINDS = ("bert", "distilbert", "roberta", "vit", "deit")
LABELS = (("cat", "dog"), ("saw", "nail", "file"))


def saved(kind: str, folder: Path, *given: object) -> Path:
    """A random model as transformers saves it: bare without labels."""
    tiny.classifier(kind, *given).save_pretrained(folder)
    return folder


@pytest.fixture
def make(tmp_path):
    def run(kind: str, labels=LABELS, base: str | None = None) -> tuple[Path, list[Path]]:
        start = saved(kind, tmp_path / "base", None, 0, base)
        return start, [saved(kind, tmp_path / f"task{t}", each, t) for t, each in enumerate(labels, 1)]

    return run


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def loaded(out: Path):
    """The model by its own architecture: no tensor is missing, and none too many."""
    model, told = getattr(transformers, config(out)["architectures"][0]).from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_classifiers_of_different_labels_are_stacked(make, tmp_path, kind):
    base, tasks = make(kind)
    out = tmp_path / "out"
    report = merge_checkpoints(base, tasks, out, weights=[3, 1], scale=1)
    model = loaded(out)
    assert config(out)["architectures"] == config(tasks[0])["architectures"]
    assert model.config.id2label == dict(enumerate([*LABELS[0], *LABELS[1]]))
    assert model.config.num_labels == 5
    last = "classifier.out_proj" if kind == "roberta" else "classifier"
    for part in ("weight", "bias"):
        rows = [tensors(task)[f"{last}.{part}"] for task in tasks]
        assert torch.equal(tensors(out)[f"{last}.{part}"], torch.cat(rows))
    assert report.heads["rule"] == "stack"
    assert report.heads["labels"] == [*LABELS[0], *LABELS[1]]
    # The encoder is what a merge of the bare models gives.
    prefix = model.base_model_prefix + "."
    bare = {name: value for name, value in tensors(base).items() if f"{prefix}{name}" in tensors(tasks[0])}
    others = [{name: tensors(task)[f"{prefix}{name}"] for name in bare} for task in tasks]
    expected = tunable_magmax.merge_state_dicts(bare, others, weights=[3, 1], scale=1).state_dict
    for name, value in expected.items():
        assert torch.equal(tensors(out)[f"{prefix}{name}"], value), name
    assert verify_checkpoint(out, base, tasks).ok


def test_heads_of_different_kinds_are_refused(tmp_path):
    base = saved("bert", tmp_path / "base", None, 0)
    tasks = [saved("bert", tmp_path / "one", LABELS[0], 1)]
    tasks.append(saved("bert", tmp_path / "two", LABELS[1], 2, "BertForTokenClassification"))
    with pytest.raises(InputError, match="BertForSequenceClassification, BertForTokenClassification"):
        merge_checkpoints(base, tasks, tmp_path / "out")


def test_a_label_of_several_tasks_is_the_mean_by_weight(make, tmp_path):
    base, tasks = make("vit", (("cat", "dog"), ("dog", "owl")))
    merge_checkpoints(base, tasks, tmp_path / "out", weights=[3, 1])
    one, two = (tensors(task) for task in tasks)
    made = tensors(tmp_path / "out")
    assert list(config(tmp_path / "out")["label2id"]) == ["cat", "dog", "owl"]
    for part in ("classifier.weight", "classifier.bias"):
        shared = 0.75 * one[part][1] + 0.25 * two[part][0]
        assert torch.allclose(made[part], torch.stack([one[part][0], shared, two[part][1]]))


def fitted(folder: Path, names: tuple[str, ...], labels: int) -> FittedTensors:
    """A random head in place of these tensors."""
    draw, held = np.random.default_rng(5), tensors(folder)
    last = next(name for name in reversed(names) if name.endswith("bias")).rpartition(".")[0]
    shapes = {name: (labels if name.startswith(last) else held[name].shape[0], *held[name].shape[1:]) for name in names}
    return FittedTensors({name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


HEADS = {
    "bert": ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"),
    "vit": ("classifier.weight", "classifier.bias"),
    "distilbert": ("pre_classifier.weight", "pre_classifier.bias", "classifier.weight", "classifier.bias"),
    "roberta": tuple(f"classifier.{layer}.{part}" for layer in ("dense", "out_proj") for part in ("weight", "bias")),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_fitted_head_takes_the_place_of_the_tasks_and_changes_nothing_else(make, tmp_path, kind):
    base, tasks = make(kind)
    head = fitted(tasks[0], HEADS[kind], 5)
    plain, out = tmp_path / "plain", tmp_path / "out"
    merge_checkpoints(base, tasks, plain, weights=[3, 1])
    report = merge_checkpoints(base, tasks, out, weights=[3, 1], fitted_head=head)
    assert list(loaded(out).config.id2label.values()) == [*LABELS[0], *LABELS[1]]
    for name, value in tensors(out).items():
        if name in head.tensors:
            assert np.array_equal(value.numpy(), head.tensors[name]), name
        else:
            assert torch.equal(value, tensors(plain)[name]), name
    assert report.options["fitted_head"] == report.heads["fitted"]["digest"] == head.digest
    assert verify_checkpoint(out, base, tasks).ok
    small = tmp_path / "small"
    merge_checkpoints(base, tasks, small, weights=[3, 1], fitted_head=head, out_dtype="bfloat16", shard_size="2KB")
    assert verify_checkpoint(small, base, tasks).ok


def test_a_fitted_head_of_other_names_or_shapes_is_refused(make, tmp_path):
    base, tasks = make("vit")
    odd = FittedTensors({"score.weight": np.zeros((5, 8), np.float32)})
    with pytest.raises(InputError, match=r"score\.weight"):
        merge_checkpoints(base, tasks, tmp_path / "out", fitted_head=odd)
    short = FittedTensors({"classifier.weight": np.zeros((4, 8), np.float32)})
    with pytest.raises(InputError, match=r"classifier\.weight"):
        merge_checkpoints(base, tasks, tmp_path / "out", fitted_head=short)
    assert not (tmp_path / "out").exists()


def test_a_base_with_another_head_loses_it_and_a_lacking_pooler_is_a_mean(make, tmp_path):
    base, tasks = make("bert", base="BertForMaskedLM")
    report = merge_checkpoints(base, tasks, tmp_path / "out")
    loaded(tmp_path / "out")
    assert any(name.startswith("cls.predictions") for name in report.heads["left_out"])
    assert sorted(report.heads["mean"]) == ["bert.pooler.dense.bias", "bert.pooler.dense.weight"]


def test_equal_heads_are_merged_like_any_tensor_and_can_be_replaced(tmp_path):
    base, *tasks = (saved("vit", tmp_path / str(k), ("cat", "dog"), k) for k in range(3))
    report = merge_checkpoints(base, tasks, tmp_path / "plain")
    assert report.heads is None
    assert "classifier.weight" in report.tensors
    head = fitted(tasks[0], HEADS["vit"], 2)
    merge_checkpoints(base, tasks, tmp_path / "out", fitted_head=head)
    for name, value in tensors(tmp_path / "plain").items():
        expected = torch.from_numpy(head.tensors[name]) if name in head.tensors else value
        assert torch.equal(tensors(tmp_path / "out")[name], expected), name
    assert verify_checkpoint(tmp_path / "out", base, tasks).ok


def test_labels_without_names_and_old_names_of_layers(make, tmp_path):
    base, tasks = make("bert", (("LABEL_0", "LABEL_1"), ("LABEL_0", "LABEL_1", "LABEL_2")))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors(base).items()
    }
    save_file(old, base / "model.safetensors", {"format": "pt"})
    merge_checkpoints(base, tasks, tmp_path / "out")
    assert loaded(tmp_path / "out").config.id2label[2] == "task2/LABEL_0"


def test_a_wrong_list_of_labels_is_named(make, tmp_path):
    base, tasks = make("bert")
    written = config(tasks[1])
    written["id2label"] = {"0": "saw", "1": "nail", "2": "file", "3": "plane"}
    (tasks[1] / "config.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"task2.* 4 labels"):
        merge_checkpoints(base, tasks, tmp_path / "out")


REST = (LABELS[1], ("oak", "elm"))


def merged_by_tmx(tmx, out: Path, *command: object) -> str:
    """What `tmx merge` says."""
    done = tmx("merge", *command, "-o", out)
    assert done.code == 0, done.err
    return " ".join((done.out + done.err).split())


@pytest.mark.parametrize("others", [(("owl", "bat"),), REST], ids=["as many", "more"])
@pytest.mark.parametrize("method", ["task_arithmetic", "tunable_magmax"])
def test_rows_of_a_base_with_other_classes_enter_no_row_of_the_tasks(tmx, tmp_path, others, method):
    """They are lost with a note that says how to keep them, and kept where that is done."""
    base, *tasks = (saved("vit", tmp_path / str(k), labels, k) for k, labels in enumerate((LABELS[0], *others)))
    inputs = [word for task in tasks for word in ("--task", task)]
    made = ["--base", base, *inputs, "--method", method, "--scale", "0.5"]
    said = merged_by_tmx(tmx, tmp_path / "out", *made)
    assert "('cat', 'dog')" in said
    assert "--task" in said
    assert "tmx tailor" in said
    assert list(config(tmp_path / "out")["label2id"]) == [label for labels in others for label in labels]
    rows = torch.cat([tensors(task)["classifier.weight"] for task in tasks])
    assert torch.equal(tensors(tmp_path / "out")["classifier.weight"], rows)
    assert verify_checkpoint(tmp_path / "out", base, tasks).ok
    said = merged_by_tmx(tmx, tmp_path / "both", *made, "--task", base)
    assert "lost" not in said
    assert torch.equal(tensors(tmp_path / "both")["classifier.weight"][-2:], tensors(base)["classifier.weight"])


@pytest.mark.parametrize("base", [("LABEL_0", "LABEL_1"), ("cat", "dog")])
def test_classes_of_the_base_that_are_the_tasks_are_merged_like_any_tensor(tmp_path, base):
    start, task = saved("vit", tmp_path / "base", base, 0), saved("vit", tmp_path / "task", ("cat", "dog"), 1)
    report = merge_checkpoints(start, [task], tmp_path / "out", scale=0.5, method="task_arithmetic")
    assert "classifier.weight" in report.tensors
    assert list(config(tmp_path / "out")["label2id"]) == ["cat", "dog"]
    (tmp_path / "other").mkdir()
    other = saved("vit", tmp_path / "other", ("dog", "cat"), 2)
    merge_checkpoints(start, [other], tmp_path / "turned", scale=0.5, method="task_arithmetic")
    if base == ("cat", "dog"):
        assert torch.equal(tensors(tmp_path / "turned")["classifier.weight"], tensors(other)["classifier.weight"])


@pytest.mark.parametrize(
    "others", [(("owl", "bat"),), REST, (("owl", "cat"), LABELS[1])], ids=["two", "three", "shared"]
)
def test_linear_keeps_the_classes_of_all_models(tmx, tmp_path, others):
    """The first model is the base, and its rows count as those of the others."""
    listed = [("first", LABELS[0], 2), *((f"other{k}", labels, 1) for k, labels in enumerate(others))]
    held = {name: tensors(saved("vit", tmp_path / name, labels, k)) for k, (name, labels, _) in enumerate(listed)}
    file = tmp_path / "linear.yml"
    models = [{"model": name, "parameters": {"weight": weight}} for name, _, weight in listed]
    file.write_text(json.dumps({"merge_method": "linear", "models": models}))
    merged_by_tmx(tmx, tmp_path / "out", file)
    loaded(tmp_path / "out")
    expected: dict[str, list] = {}
    for name, labels, weight in listed:
        for label, row in zip(labels, held[name]["classifier.weight"], strict=True):
            expected.setdefault(label, []).append((row, weight))
    assert list(config(tmp_path / "out")["label2id"]) == list(expected)
    made = tensors(tmp_path / "out")
    rows = [sum(row * weight for row, weight in each) / sum(weight for _, weight in each) for each in expected.values()]
    assert torch.allclose(made["classifier.weight"], torch.stack(rows))
    mean = sum(held[name]["vit.embeddings.cls_token"] * weight for name, _, weight in listed) / (2 + len(others))
    assert torch.allclose(made["vit.embeddings.cls_token"], mean)
    assert tmx("merge", file, "--dry-run", "-o", tmp_path / "dry").code == 0
    merged_by_tmx(tmx, tmp_path / "again", tmp_path / "out" / "tmx-config.yaml")
    for name, value in tensors(tmp_path / "again").items():
        assert torch.equal(value, made[name]), name
