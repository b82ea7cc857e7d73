"""Models with classifiers of their own are evaluated, compared, used and tailored without a head file."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tunable_magmax import load_classifier, merge_checkpoints, open_run
from tunable_magmax.errors import InputError
from tunable_magmax.models.builtin import load_builtin
from tunable_magmax.models.head import Head, save_head
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.compare import compare
from tunable_magmax.workflows.evaluate import evaluate, evaluate_run
from tunable_magmax.workflows.init import init_run
from tunable_magmax.workflows.merge import merge_recipe, recipe_of
from tunable_magmax.workflows.prefer import Estimation, prefer
from tunable_magmax.workflows.tailor import tailor
from tunable_magmax.workflows.tailoring import Tailoring
from tunable_magmax.workflows.target import TargetSources

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend

TASKS = {"pets": ("cat", "dog"), "tools": ("saw", "nail", "file")}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "cat", "dog", "saw", "nail", "file")


def write(file: Path, labels: tuple[str, ...], count: int, seed: int = 0) -> Path:
    draw = random.Random(seed)
    rows = [(f"{draw.choice(['a', 'the'])} {label} {draw.choice(['a', 'the'])}", label) for label in labels * count]
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([("text", "label"), *rows])
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A bare base and two tasks that have learned their words, as transformers saves them."""
    root = tmp_path_factory.mktemp("run")
    (root / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    given = "vocab" if int(transformers.__version__.split(".")[0]) >= 5 else "vocab_file"
    tokenizer = transformers.BertTokenizerFast(**{given: str(root / "vocab.txt")})
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, **sizes)
    transformers.BertModel(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    for name, labels in TASKS.items():
        named = {"id2label": dict(enumerate(labels)), "label2id": {label: k for k, label in enumerate(labels)}}
        model = transformers.BertForSequenceClassification.from_pretrained(root / "base", **named)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs = tokenizer([f"a {label} the" for label in labels], return_tensors="pt")
        for _ in range(12):
            loss = model(**inputs, labels=torch.arange(len(labels))).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        model.save_pretrained(root / name)
        write(root / f"{name}.csv", labels, 8)
    write(root / "all.csv", tuple(label for labels in TASKS.values() for label in labels), 6)
    tasks = [{"name": name, "checkpoint": name, "classes": list(labels)} for name, labels in TASKS.items()]
    (root / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": tasks}))
    return root


def test_a_checkpoint_is_evaluated_by_its_own_classifier(run):
    found = evaluate(run / "pets", run / "pets.csv")
    assert found.accuracy.overall.value == 1.0
    assert found.head == "that it has itself"
    with pytest.raises(InputError, match="'saw'"):
        evaluate(run / "pets", run / "tools.csv")


@pytest.mark.parametrize("name", ["base", "last", "pets"])
def test_a_named_checkpoint_of_a_run_has_the_rows_of_all_labels(run, name):
    opened, data = open_run(run), run / "all.csv"
    with data.open(newline="") as rows:
        pairs = [(row["text"], row["label"]) for row in csv.DictReader(rows)]
    (expected,) = evaluate_run(run, data, checkpoints=[name]).accuracies.values()
    for given in (data, pairs):
        found = opened.evaluate(name, given).accuracy
        assert (found.class_right, found.classes, found.tasks) == (
            expected.class_right,
            expected.classes,
            expected.tasks,
        )


def test_a_model_without_a_classifier_is_told_as_such(run):
    with pytest.raises(InputError, match="is a BertModel, which has no classifier of its own"):
        load_builtin(run / "base")


def test_a_task_that_the_model_never_predicts_is_told(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for name in TASKS:
        init_run(tmp_path / "run", data={name: run / f"{name}.csv"})
    inputs = TargetSources(inputs=tmp_path / "site.csv")
    texts = [f"{one} {label} {two}" for one in ("a", "the") for two in ("a", "the") for label in WORDS[7:]]
    (tmp_path / "site.csv").write_text("\n".join(["text", *texts]) + "\n")
    # No embedding makes up for such a bias.
    state = load_file(tmp_path / "run/tools/model.safetensors")
    state["classifier.bias"] -= 50
    save_file(state, tmp_path / "run/tools/model.safetensors", {"format": "pt"})
    made = tailor(Run.open(tmp_path / "run"), inputs, tmp_path / "site")
    share = made.preference.weights[1]
    assert share > 0.15
    text = f"of 20 inputs 'tools' gets 0 (its weight is {share:.0%}); give"
    assert [warning for warning in made.warnings if text in warning]
    quiet = tailor(Run.open(tmp_path / "run"), inputs, tmp_path / "quiet", Tailoring(check="none"))
    assert not [warning for warning in quiet.warnings if warning.startswith("the model hardly predicts")]


def test_it_predicts_what_transformers_does(run):
    classifier = load_classifier(run / "pets")
    assert classifier.classes == TASKS["pets"]
    assert [each.label for each in classifier.predict(["a cat", "the dog"])] == ["cat", "dog"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "pets").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(run / "base")(["a cat"], return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens).logits.softmax(dim=1).numpy()
    assert np.allclose(classifier.probabilities("a cat"), expected, atol=1e-6)


def test_merges_in_memory_and_on_disk_are_one_and_a_run_has_a_matrix(run, tmp_path):
    options = {"weights": [3, 1], "scale": 1}
    in_memory = evaluate(Recipe(run / "base", (run / "pets", run / "tools"), options), run / "all.csv")
    merge_checkpoints(run / "base", [run / "pets", run / "tools"], tmp_path / "out", **options)
    assert evaluate(tmp_path / "out", run / "all.csv").accuracy.class_right == in_memory.accuracy.class_right
    measured = evaluate_run(run, run / "all.csv")
    assert measured.matrix is not None
    assert measured.accuracies["pets"].known_by_task["pets"].value == 1.0


def test_the_prior_of_a_site_is_in_the_bias_of_its_model(run, tmp_path):
    opened = Run.open(run)
    made = tailor(opened, TargetSources(weights=(0.9, 0.1)), tmp_path / "site")
    assert made.record["builtin_head"]
    assert not (tmp_path / "site/head.safetensors").exists()
    plain = torch.cat([load_file(run / name / "model.safetensors")["classifier.bias"] for name in TASKS])
    labels = [label for names in TASKS.values() for label in names]
    added = torch.from_numpy(made.preference.prior.bias(labels))
    assert torch.allclose(load_file(tmp_path / "site/model.safetensors")["classifier.bias"], plain + added, atol=1e-6)
    assert "added to the bias of the classifier" in (tmp_path / "site/README.md").read_text()
    found = evaluate(tmp_path / "site", run / "all.csv")
    assert found.prior.source == "bias"
    # What is compared in memory is what was written, with the prior and without.
    comparison = compare(opened, tmp_path / "site", run / "all.csv")
    rights = {row.prior: row.share.right for row in comparison.rows if row.candidate.title == "tunable, scale 1"}
    without = evaluate(tmp_path / "site", run / "all.csv", prior="none")
    assert rights == {True: found.accuracy.overall.right, False: without.accuracy.overall.right}


def test_pairs_choose_among_models_with_their_own_heads(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    even = Preference.from_weights([1, 1])
    pairs = TargetSources(pairs=run / "all.csv")
    made = tailor(Run.open(tmp_path / "run"), pairs, tmp_path / "site", preference=even)
    assert made.record["choice"] is not None


def test_a_site_may_take_the_head_of_one_task(run, tmp_path):
    tailor(Run.open(run), TargetSources(weights=(1, 1)), tmp_path / "site", Tailoring(heads="tools"))
    assert load_classifier(tmp_path / "site").classes == TASKS["tools"]


def test_a_head_that_is_not_for_the_embeddings_is_told(run, tmp_path):
    head = Head.of(np.ones((2, 16)), TASKS["pets"], 1.0)
    save_head(head, tmp_path / "head.safetensors")
    shutil.copytree(run / "base", tmp_path / "pets")
    shutil.copytree(run / "pets", tmp_path / "pets", dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="is no better than guessing among 2 classes"):
        evaluate(tmp_path / "pets", run / "pets.csv", head=tmp_path / "head.safetensors")


def test_a_saved_configuration_has_the_prior_of_the_site(run, tmp_path):
    tailor(Run.open(run), TargetSources(weights=(0.9, 0.1)), tmp_path / "site")
    saved = tmp_path / "site/tmx-config.yaml"
    again = recipe_of(saved, None, None, None, {}, print)
    merge_recipe(again, tmp_path / "again", print)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("site", "again")]
    assert weights[0] == weights[1]
    for prior in ("auto", "none"):  # "none" takes it off again, in memory as from files
        found = [evaluate(model, run / "all.csv", prior=prior) for model in (again, tmp_path / "site")]
        assert found[0].accuracy.class_right == found[1].accuracy.class_right
        assert found[0].prior == found[1].prior


def test_what_one_call_does_with_heads_is_not_left_behind(run, tmp_path):
    opened = open_run(run)
    opened.tailor(tmp_path / "site", weights=[1, 1], heads="tools")
    assert load_classifier(tmp_path / "site").classes == TASKS["tools"]
    tools = run / "tools.csv"
    merged = opened.merge(weights=[1, 1], heads="tools", scale=1)
    assert merged.report.heads["rule"] == "task 2"
    written = evaluate(tmp_path / "site", tools, prior="none").accuracy
    assert opened.evaluate(merged, tools).accuracy.class_right == written.class_right
    opened.compare(tmp_path / "site", tools)
    assert len(opened.compare(Preference.from_weights([1, 1]), run / "all.csv").rows) > 1  # has all five labels again
    with pytest.raises(InputError, match="`merge` does, in memory too"):
        opened.session()


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
        init_run(folder, data={name: data})
    names = {n: tuple(f"{n}/LABEL_{k}" for k in range(len(c))) if generic else c for n, c in TASKS.items()}
    assert {name: set(found) for name, found in Run.open(folder).classes.items()} == {
        name: set(labels) for name, labels in names.items()
    }
    made = tailor(Run.open(folder), TargetSources(weights=(0.8, 0.2)), tmp_path / "site")
    assert set(made.preference.prior.shares) == {label for labels in names.values() for label in labels}


def test_weights_are_searched_with_the_models_own_heads(run, tmp_path):
    sources = TargetSources(pairs=run / "tools.csv")
    found = prefer(Run.open(run), sources, Estimation(method="search", trials=4, prior="none")).preference
    assert found.weights[1] > found.weights[0]
