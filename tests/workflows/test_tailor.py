"""Tailoring: one directory with all that a site needs, whole or not at all, and what it tells is what it holds."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import adapters
import builtin_run
import numpy as np
import pytest
import torch
from labelled_run import TASKS, LabelledRun, keeping
from safetensors.torch import load_file, save_file

from tunable_magmax import Preference, load_classifier, verify_checkpoint
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.models.head import load_head
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.init import init_run
from tunable_magmax.workflows.merge import merge_recipe, recipe_of
from tunable_magmax.workflows.options import InitOptions, SiteSources, TailorOptions, from_flat
from tunable_magmax.workflows.tailor import tailor
from tunable_magmax.workflows.tailored import (
    HeadRecord,
    MergeRecord,
    MixtureRecord,
    Tailored,
    TailorRecord,
    read_record,
    record_lines,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend
COUNTS = {"red": 9, "blue": 5, "green": 6, "grey": 4}


@pytest.fixture(scope="module")
def kept_run(image_run, tmp_path_factory):
    return keeping(image_run, tmp_path_factory.mktemp("kept") / "run", 10)


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    """Labelled pictures of a site, and the same without labels."""
    folder = tmp_path_factory.mktemp("site")
    pairs = image_run.pairs(folder / "labelled", COUNTS)
    (folder / "inputs").mkdir()
    for file in sorted(pairs.rglob("*.png")):
        shutil.copy(file, folder / "inputs" / f"{file.parent.name}{file.name}")
    return SiteSources(inputs=folder / "inputs"), SiteSources(labelled=pairs)


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def builtin(request, tmp_path_factory):
    """A run whose tasks have their own classifiers, with profiles and kept samples."""
    root = builtin_run.build_builtin(tmp_path_factory.mktemp(request.param), request.param)
    for name in builtin_run.TASKS:
        init_run(root, InitOptions(data=[f"{name}={root / name}.csv"]))
    return root


def made(run: Path | LabelledRun, sources: SiteSources, out: Path, **options) -> Tailored:
    return tailor(
        getattr(run, "path", run), from_flat(TailorOptions, out=out, device="cpu", **vars(sources), **options)
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# -- the directory ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_inputs(kept_run, site, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "site-model"
    return made(kept_run, site[0], out), out


def test_everything_that_a_site_needs_is_there(by_inputs, kept_run):
    found, out = by_inputs
    run = Run.open(kept_run.path)
    expected = {"model.safetensors", "config.json", "preprocessor_config.json", "head.safetensors", "preference.json"}
    assert set(contents(out)) == expected | {"tmx-report.json", "tmx-config.yaml", "tmx-tailor.json", "README.md"}
    assert Preference.load(out / "preference.json") == found.preference
    assert set(found.report.files) == set(contents(out)) - {"tmx-report.json"}
    assert verify_checkpoint(out).ok
    assert verify_checkpoint(out, run.base, run.tasks).ok
    assert load_head(out / "head.safetensors").digest == found.record.head.digest
    card = (out / "README.md").read_text()
    assert f"| first | {found.preference.weights[0]:.4f} |" in card


def test_the_record_holds_what_was_tried_and_is_expected(by_inputs):
    found, out = by_inputs
    assert json.loads((out / "tmx-tailor.json").read_text()) == json.loads(json.dumps(asdict(read_record(out))))
    record = found.record
    assert record.head.kind == "fitted"
    assert (record.head.kept, record.merge.judged_by) == (40, 40)
    losses = [each["log_loss"] for each in record.merge.tried]
    assert losses == sorted(losses)
    assert found.report.method in record.merge.tried[0]["model"] or found.report.method == "last_task"
    assert set(record.expected) == {"tailored", "base", "last"}
    for value, low, high in record.expected.values():
        assert 0 <= low <= value <= high <= 1
    assert record.head.log_loss <= record.head.old_log_loss
    assert sum(record.mixture.weights.values()) == pytest.approx(1)
    assert not record.head.trained_on


def test_equal_inputs_give_equal_bytes_wherever_they_are(by_inputs, kept_run, site, tmp_path):
    shutil.copytree(kept_run.path, tmp_path / "elsewhere")
    shutil.copytree(site[0].inputs, tmp_path / "inputs")
    made(tmp_path / "elsewhere", SiteSources(inputs=tmp_path / "inputs"), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(by_inputs[1])
    assert not any(str(tmp_path).encode() in content for content in contents(tmp_path / "again").values())


def test_a_second_call_is_complete_and_another_is_refused(by_inputs, kept_run, site):
    found, out = by_inputs
    before = contents(out)
    again = made(kept_run, site[0], out)
    assert again.complete
    assert (again.record, again.preference) == (found.record, found.preference)
    with pytest.raises(InputError, match="already exists"):
        made(kept_run, site[0], out, scale=0.5)
    assert contents(out) == before
    assert not made(kept_run, site[0], out, overwrite=True).complete
    assert contents(out) == before


@pytest.mark.parametrize("moment", ["card_section", pytest.param("gather_evidence", marks=pytest.mark.stress)])
def test_a_kill_leaves_nothing_half_and_the_next_call_gives_the_same(by_inputs, kept_run, site, tmp_path, moment):
    out = tmp_path / "site-model"
    code = f"""
import os, torch
from pathlib import Path
from tunable_magmax.workflows import tailor
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.options import SiteSources
torch.set_num_threads(1)
tailor.{moment} = lambda *given, **more: os._exit(9)
sources = SiteSources(inputs=Path({str(site[0].inputs)!r}))
options = tailor.TailorOptions(out=Path({str(out)!r}), sources=sources, reading=Reading(device="cpu"))
tailor.tailor({str(kept_run.path)!r}, options)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=100).returncode == 9
    assert not out.exists()
    made(kept_run, site[0], out)
    assert contents(out) == contents(by_inputs[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site-model", "site-model.log"]


# -- what is known ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("known", ["inputs", "labels", "labelled", "weights"])
def test_whatever_is_known_of_the_site(image_run, kept_run, site, tmp_path, known, kept):
    sources = {
        "inputs": site[0],
        "labels": SiteSources(labels=site[1].labelled),
        "labelled": site[1],
        "weights": SiteSources(weights=(3, 1)),
    }[known]
    found = made(kept_run if kept else image_run, sources, tmp_path / "out")
    head = found.record.head
    assert verify_checkpoint(tmp_path / "out").ok
    assert head.kept == (40 if kept else 0)
    assert head.labelled == (24 if known == "labelled" else 0)
    assert head.profiles == 32
    assert (found.record.mixture.expected_error is None) == (known == "weights")
    judged = kept or known == "labelled"
    assert bool(found.record.merge.tried) == judged
    assert bool(found.record.expected) == judged
    classifier = load_classifier(tmp_path / "out")
    images = list(open_samples(site[0].inputs).load(range(24)))
    right = [each.label for each in classifier.predict(images)]
    assert set(right) <= set(COUNTS)


def test_numbers_of_classes_are_labels_and_names_of_tasks_fit_nothing(tmx, text_run, tmp_path):
    place = {name: k for k, name in enumerate(load_head(text_run.path / "head.safetensors").classes)}
    task_of = {name: task for task, names in TASKS.items() for name in names}
    heads = []
    for words in ({name: name for name in place}, place, task_of):
        texts = [(text, words[name]) for name in ("red", "blue", "green") for text in text_run.inputs(name, 4, 500)]
        labels, out = tmp_path / f"{words['red']}.csv", tmp_path / f"by-{words['red']}"
        labels.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in texts))
        result = tmx("tailor", text_run.path, "--labelled", labels, "-o", out, "--json", *ON_CPU)
        assert result.code == 0, result.err
        heads.append(json.loads(result.out)["head"])
    assert heads[0] == heads[1]
    assert (heads[0]["labelled"], heads[2]["labelled"]) == (12, 0)


def test_labelled_samples_are_expected_as_well_as_they_are_predicted(kept_run, site, tmp_path):
    """The cross-validated accuracy is near that of the model on fresh samples of the site."""
    found = made(kept_run, site[1], tmp_path / "out")
    fresh = open_samples(
        kept_run.pairs(tmp_path / "fresh", {name: 10 * count for name, count in COUNTS.items()}, seed=5000)
    )
    classifier = load_classifier(tmp_path / "out")
    says = classifier.predict(list(fresh.load(range(len(fresh)))))
    truth = [fresh.classes[label] for label in fresh.labels]
    accuracy = np.mean([each.label == label for each, label in zip(says, truth, strict=True)])
    value, low, high = found.record.expected["tailored"]
    assert low - 0.1 <= accuracy <= high + 0.1
    assert abs(accuracy - value) < 0.2


def test_a_stored_preference_is_used_as_it_is(by_inputs, kept_run, site, tmp_path):
    stored = by_inputs[0].preference
    run = kept_run.path
    found = made(run, SiteSources(), tmp_path / "out", preference=stored)
    assert found.preference == stored
    assert made(run, site[1], tmp_path / "labelled", preference=stored).record.head.labelled == 24
    with pytest.raises(InputError, match="holds weights already: leave out alpha"):
        made(run, SiteSources(alpha=0.5), tmp_path / "new", preference=stored)
    scaled = replace(stored, scale=0.25)
    found = made(run, SiteSources(), tmp_path / "scaled", preference=scaled)
    assert found.report.scale == 0.25


# -- head, method and scale -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["auto", "fitted", "old"])
def test_the_head_that_was_asked_for(kept_run, tmp_path, head):
    found = made(kept_run, SiteSources(weights=(3, 1)), tmp_path / "out", head=head)
    assert found.record.head.kind == ("old" if head == "old" else "fitted")
    if head == "old":
        assert found.record.merge.tried == ()
        old, new = load_head(kept_run.path / "head.safetensors"), load_head(tmp_path / "out/head.safetensors")
        ratio = new.weight / old.weight
        np.testing.assert_allclose(ratio, 1.0, rtol=1e-5)
        shares = np.exp(new.bias - np.logaddexp.reduce(new.bias))
        wanted = found.preference.prior.bias(new.classes)
        np.testing.assert_allclose(shares, np.exp(wanted) / np.exp(wanted).sum(), rtol=1e-4)


def test_nothing_to_fit_to_is_the_old_head_with_a_note(image_run, tmp_path):
    shutil.copytree(image_run.path, tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    for task in record["tasks"]:
        del task["profile"]
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    found = made(tmp_path / "run", SiteSources(equal=True), tmp_path / "out")
    assert (found.record.head.kind, found.record.head.profiles) == ("old", 0)
    assert found.record.head.note
    with pytest.raises(InputError, match="the head stays the old one"):
        made(tmp_path / "run", SiteSources(equal=True), tmp_path / "fitted", head="fitted")
    assert not (tmp_path / "fitted").exists()


@pytest.mark.parametrize(
    ("options", "method", "scale"),
    [
        ({"method": "magmax"}, "magmax", None),
        ({"scale": 0.3}, None, 0.3),
        ({"method": "average", "scale": 0.5}, "average", 0.5),
        ({"scale": 0.0}, "last_task", 0.0),
        ({"method": "last_task", "scale": 1.0}, "last_task", 1.0),
    ],
)
def test_method_and_scale_that_were_asked_for(kept_run, tmp_path, options, method, scale):
    found = made(kept_run, SiteSources(weights=(3, 1)), tmp_path / "out", **options)
    assert method in (None, found.report.method)
    assert scale in (None, found.report.scale)
    assert found.record.merge.scale == found.report.scale
    if scale == 0.0:
        own, written = (
            load_file(kept_run.path / "base/model.safetensors"),
            load_file(tmp_path / "out/model.safetensors"),
        )
        assert all(torch.equal(written[name], value) for name, value in own.items())


# -- classifiers that the tasks have themselves -----------------------------------------------------------------------


def by_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    """Probabilities as anybody gets them who loads the model."""
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokens).logits.double().softmax(dim=1).numpy()


@pytest.mark.parametrize(
    ("known", "options"),
    [
        ("labelled", {}),
        ("weights", {}),
        ("weights", {"head": "fitted", "method": "tunable_magmax", "scale": 0.5}),
        ("weights", {"head": "old"}),
        ("weights", {"method": "last_task", "scale": 0.0}),
        ("weights", {"method": "last_task", "scale": 1.0}),
    ],
)
def test_transformers_gives_what_load_classifier_gives(builtin, tmp_path, known, options):
    import transformers

    out, run = tmp_path / "out", Run.open(builtin)
    sources = SiteSources(labelled=builtin / "all.csv") if known == "labelled" else SiteSources(weights=(0.7, 0.3))
    found = made(builtin, sources, out, **options)
    assert not (out / "head.safetensors").exists()
    texts, labels = builtin_run.texts_of(builtin / "all.csv")
    classifier = load_classifier(out)
    assert classifier.classes == builtin_run.LABELS
    probabilities = classifier.probabilities(texts)
    np.testing.assert_allclose(by_transformers(out, texts), probabilities, atol=3e-3)
    pipeline = transformers.pipeline("text-classification", str(out), device="cpu")
    says = [each.label for each in classifier.predict(texts)]
    assert [each["label"] for each in pipeline(texts)] == says
    if options.get("head") != "old":
        accuracy = np.mean([one == two for one, two in zip(says, labels, strict=True)])
        assert found.record.head.kind == "fitted"
        assert accuracy >= found.record.expected["tailored"][1] - 0.15
    assert found.record.head.digest == found.report.options["fitted_head"]
    for inputs in ((), (run.base, run.tasks)):
        again = verify_checkpoint(out, *inputs)
        assert again.ok, [check for check in again.checks if not check.ok]


def test_a_changed_fitted_head_does_not_verify(builtin, tmp_path):
    out, run = tmp_path / "out", Run.open(builtin)
    made(builtin, SiteSources(weights=(0.7, 0.3)), out)
    state = load_file(out / "model.safetensors")
    state["classifier.bias"] = state["classifier.bias"] + 1
    save_file(state, out / "model.safetensors", {"format": "pt"})
    for inputs in ((), (run.base, run.tasks)):
        failed = [check.what for check in verify_checkpoint(out, *inputs).checks if not check.ok]
        assert failed == ["SHA-256 of the files", "digest of the fitted head"]
    del state["classifier.bias"]
    save_file(state, out / "model.safetensors", {"format": "pt"})
    failed = [check.what for check in verify_checkpoint(out).checks if not check.ok]
    assert {"tensors", "digest of the fitted head"} <= set(failed)


def test_a_saved_configuration_has_the_stacked_head_and_says_so(builtin, tmp_path):
    made(builtin, SiteSources(weights=(0.7, 0.3)), tmp_path / "site", method="average", scale=1.0)
    with pytest.warns(UserWarning, match="fitted"):
        again = recipe_of(tmp_path / "site/tmx-config.yaml")
    merge_recipe(again, tmp_path / "again", lambda note: None)
    run = Run.open(builtin)
    merge_recipe(
        Recipe(run.base, run.tasks, {"method": "average", "scale": 1.0, "weights": [0.7, 0.3]}, run.names),
        tmp_path / "stacked",
        lambda note: None,
    )
    stacked, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("stacked", "again"))
    assert stacked.keys() == merged.keys()
    for name, value in stacked.items():
        assert torch.equal(merged[name], value), name


def test_a_classifier_without_a_bias_takes_a_fitted_head_too(tmp_path):
    run = builtin_run.build_builtin(tmp_path / "run", "gpt2")
    init_run(run, InitOptions(data=[f"{name}={run / name}.csv" for name in builtin_run.TASKS]))
    found = made(run, SiteSources(weights=(0.7, 0.3)), tmp_path / "out", head="fitted")
    assert found.record.head.kind == "fitted"
    assert found.record.head.log_loss < found.record.head.old_log_loss
    assert "score.bias" not in load_file(tmp_path / "out/model.safetensors")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_adapters_are_scored_on_their_base(kept_run, site, tmp_path):
    run = LabelledRun(shutil.copytree(kept_run.path, tmp_path / "run"), kept_run.kind)
    base = load_file(run.path / "base/model.safetensors")
    name = next(name for name, value in base.items() if value.ndim == 2 and name.endswith("query.weight"))
    for task in TASKS:
        shutil.rmtree(run.path / task)
        factors = adapters.factors(*base[name].shape, 2, 1)
        adapters.save_adapter(run.path / task, {name.removesuffix(".weight"): factors})
        Run.open(run.path).register(task, profile=f"profiles/{task}.safetensors")
    found = made(run, SiteSources(labels=site[1].labelled), tmp_path / "out", head="fitted")
    assert found.record.head.kind == "fitted"
    assert set(found.record.expected) == {"tailored", "base", "last"}
    assert verify_checkpoint(tmp_path / "out").ok


def test_of_many_tasks_the_largest_are_named():
    mixture = MixtureRecord("probe", 100, {f"task {t}": 0.1 for t in range(10)}, None, 0.07, 10.0)
    merge, head = MergeRecord("tsv", 1.0, "by rule"), HeadRecord("old", "it is as good")
    lines = list(record_lines(TailorRecord({}, mixture, merge, head, {}, None)))
    assert [title for title, _, _ in lines] == ["mixture", "merge", "head"]
    assert lines[0][1].endswith("5 others 0.50")


# -- the command -----------------------------------------------------------------------------------------------------

ON_CPU = ("--device", "cpu")


@pytest.fixture
def labels(tmp_path):
    file = tmp_path / "labels.txt"
    file.write_text("red\n" * 15 + "blue\n" * 9 + "green\n" * 8)
    return file


def test_a_model_from_labels(tmx, image_run, labels, tmp_path):
    out = tmp_path / "site-model"
    result = tmx("tailor", image_run.path, "--labels", labels, "-o", out, *ON_CPU)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    heads = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert heads[:3] == ["mixture", "merge", "head"]
    assert len(lines) <= 14
    assert max(map(len, lines[:-1])) <= 80
    # A posterior mean of 24 against 8 labels: a little nearer to the middle.
    assert 0.65 < float(lines[0].split()[2]) <= 0.75
    assert "from 32 samples by label" in lines[1]
    assert lines[-1].endswith(f"tmx predict {out} INPUTS")
    assert tmx("inspect", "--verify", out, "-q").code == 0
    again = tmx("tailor", image_run.path, "--labels", labels, "-o", out, *ON_CPU)
    assert (again.code, again.out.startswith(f"{out} is complete, made from the same inputs")) == (0, True)
    assert again.out.splitlines()[1 : len(lines)] == lines[:-1]
    other = tmx("tailor", image_run.path, "--labels", labels, "--scale", 0.5, "-o", out, *ON_CPU)
    assert (other.code, "already exists: choose another output" in other.err) == (2, True)
    assert tmx("tailor", image_run.path, "--labels", labels, "--scale", 0.5, "-o", out, "--overwrite", "-q").code == 0


def test_a_method_of_the_users_own(tmx, text_run, tmp_path):
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(
        "from tunable_magmax.merging.methods import Method\n"
        "class First(Method):\n"
        "    def vector(self, vectors):\n"
        "        return vectors[0]\n"
    )
    command = ("tailor", text_run.path, "--equal", "--method", f"{file}:First", "--scale", 1, "-o", out, *ON_CPU)
    result = tmx(*command)
    assert result.code == 0, result.err
    assert json.loads((out / "tmx-report.json").read_text())["method"] == "mine.py:First"
    assert "is complete" in tmx(*command).out
    file.write_text(file.read_text() + "# changed\n")
    assert "already exists" in tmx(*command).err


def test_json(tmx, text_run, tmp_path):
    pairs, out = text_run.pairs(tmp_path / "pairs", {"red": 6, "blue": 3, "green": 3, "grey": 3}), tmp_path / "out"
    result = tmx("tailor", text_run.path, "--labelled", pairs, "-o", out, "--json", *ON_CPU)
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["sources"] == {"labelled": "pairs.csv"}
    assert told["seconds"] > 0
    stored = json.loads((out / "tmx-tailor.json").read_text())
    assert "seconds" not in stored
    assert {key: told[key] for key in stored if key != "warnings"} == {
        k: v for k, v in stored.items() if k != "warnings"
    }
    assert told["warnings"][: len(stored["warnings"])] == stored["warnings"]
    assert set(told["files"]) == {file.name for file in out.iterdir()} - {"tmx-report.json"}
    again = json.loads(tmx("tailor", text_run.path, "--labelled", pairs, "-o", out, "--json", *ON_CPU).out)
    assert (told["already_complete"], again["already_complete"], again["merge"]) == (False, True, told["merge"])
