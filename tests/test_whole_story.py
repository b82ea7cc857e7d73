"""Train, profile, prefer, merge, evaluate, and load with transformers: one story for each family of encoders."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny
from safetensors.torch import load_file
from training import toy

from tunable_magmax.cli.app import main
from tunable_magmax.data.arrays import unit_rows
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.models.tower import trainable
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.profile import Profile

CPU = ("--device", "cpu")
LOADS_AS = {
    "clip": "CLIPVisionModelWithProjection",
    "siglip": "SiglipVisionModel",
    "vit": "AutoModel",
    "bert": "AutoModel",
}
IMAGES = [tiny.picture(colour, seed) for seed, colour in enumerate(toy.CLASSES.values(), 50)]
TEXTS = ["pay my bill", "good hello", "card"]


@pytest.fixture
def tmx(capsys):
    """Run the program, which must succeed without a word on stderr; what it printed."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert not stopped.value.code, err
        return out

    return run


def site(root, kind, *classes):
    """What a site gives: inputs without labels, the labels alone, and labelled data to evaluate on."""
    (root / "site").mkdir()
    (root / "site" / "labels.txt").write_text("".join(f"{name}\n" * 3 for name in classes))
    if kind == "bert":
        lines = [f"{filler} {name}" for name in classes for filler in toy.FILLERS]
        (root / "site" / "inputs.txt").write_text("\n".join(lines))
        rows = "\n".join(f"{line},{line.split()[-1]}" for line in lines)
        (root / "site" / "test.csv").write_text(f"text,label\n{rows}\n")
        return root / "site" / "inputs.txt", root / "site" / "test.csv"
    for name in classes:
        (root / "site" / "test" / name).mkdir(parents=True)
        (root / "site" / "inputs").mkdir(exist_ok=True)
        for k in range(5):
            picture = tiny.picture(toy.CLASSES[name], 300 + k)
            picture.save(root / "site" / "test" / name / f"{k}.png")
            picture.save(root / "site" / "inputs" / f"{name}{k}.png")
    return root / "site" / "inputs", root / "site" / "test"


def share_of(data, out, *classes):
    """A task's part of data: some class folders, or some rows of a table."""
    if data.is_dir():
        for name in classes:
            shutil.copytree(data / name, out / name)
        return out
    header, *rows = data.read_text().splitlines()
    out = out.with_suffix(".csv")
    out.write_text("\n".join([header, *(row for row in rows if row.rpartition(",")[2] in classes)]))
    return out


def by_transformers(kind, folder, encoder):
    """Embeddings by the family's own class and its own output; nothing may be missing or left over."""
    import transformers

    model, told = getattr(transformers, LOADS_AS[kind]).from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        if kind == "bert":
            tokens = encoder.prepare_texts(TEXTS)
            states = model.eval()(**tokens).last_hidden_state
            mask = tokens["attention_mask"][..., None]
            return ((states * mask).sum(1) / mask.sum(1)).numpy()
        output = model.eval()(pixel_values=encoder.prepare_images(IMAGES))
    return (output.image_embeds if kind == "clip" else output.pooler_output).numpy()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers, when it loads
@pytest.mark.parametrize("kind", LOADS_AS)
def test_from_a_saved_model_to_a_tailored_one(tmx, tmp_path, kind):
    run = tmp_path / "run"
    path = toy.file(tmp_path, kind, train={"epochs": 3, "lr": "3e-3"})
    data = tmp_path / ("texts/train.csv" if kind == "bert" else "images/train")

    # Train: base, two tasks, a head that tells the classes apart.
    assert f"{run}: 2 tasks trained" in tmx("train", path, *CPU)
    head = load_head(run / "classifier-head.safetensors")
    assert head.classes == tuple(sorted(toy.CLASSES))
    rows = unit_rows(head.weight)
    assert (np.triu(rows @ rows.T, 1) < 1 - 1e-4).all()
    base, *tasks = (load_file(run / name / "model.safetensors") for name in ("base", "task-01", "task-02"))
    original = load_file(tmp_path / kind / "model.safetensors")
    assert all(torch.equal(original[name], value) for name, value in base.items())
    encoder = load_encoder(run / "base", "cpu")
    # A pooler that the embedding does not read gets no gradient.
    used = [p for name, p in trainable(encoder) if kind != "bert" or "pooler" not in name]
    trained = sum(parameter.numel() for parameter in used)
    for task in tasks:
        changed = [name for name, value in task.items() if not torch.equal(value, base[name])]
        assert sum(base[name].numel() for name in changed) == trained
        assert task.keys() == base.keys()

    # Profile: the one that training left is the one that the command makes.
    left = Profile.load(run / "profiles" / "task-01.safetensors")
    made = shutil.copytree(run, tmp_path / "again")
    tmx("init", made, "--data", f"task-01={share_of(data, tmp_path / 'share', 'card', 'hello')}", *CPU)
    again = Profile.load(made / "profiles" / "task-01.safetensors")
    counts = {name: count for name, count in left.label_table.items() if count}
    assert (again.label_table, again.encoder, again.base) == (counts, left.encoder, left.base)

    # Prefer: labels of the second task only, the same by hand, and inputs.
    inputs, test = site(tmp_path, kind, "pay", "bill")
    labels, looks = tmp_path / "labels.json", tmp_path / "inputs.json"
    tmx("prefer", run, "--labels", tmp_path / "site" / "labels.txt", "-o", labels)
    assert Preference.load(labels).weights[1] > 0.9
    tmx("prefer", run, "--weights", "0,1", "-o", labels)
    tmx("prefer", run, "--inputs", inputs, "--method", "ot", "-o", looks, *CPU)
    weights = Preference.load(looks).weights
    assert sum(weights) == pytest.approx(1)
    assert all(weight > 0 for weight in weights)

    # Merge: by hand it is the second task; by inputs something of both.
    for preference in (labels, looks):
        tmx("merge", run, "--preference", preference, "-o", tmp_path / preference.stem)
    alone, mixed = (load_file(tmp_path / name / "model.safetensors") for name in ("labels", "inputs"))
    for name, value in tasks[1].items():
        torch.testing.assert_close(alone[name], value, atol=1e-6, rtol=1e-5)
        if torch.equal(tasks[1][name], base[name]):
            assert torch.equal(mixed[name], base[name])

    # Evaluate: files and the merge in memory agree, and the second task knows its classes.
    for preference in (labels, looks):
        [found], [memory] = (
            json.loads(tmx("eval", *which, "--data", test, "--json", *CPU))["accuracies"].values()
            for which in ((tmp_path / preference.stem,), (run, "--preference", preference))
        )
        assert found == memory
        assert {task["name"]: task["samples"] for task in found["tasks"]} == {"task-01": 0, "task-02": found["samples"]}
        if preference == labels:
            assert found["known_accuracy"] == 1
    assert "average accuracy" in tmx("eval", run)

    # Tailor: one directory with head and prior, which eval and predict take as it is.
    tailored = tmp_path / "tailored"
    tmx("tailor", run, "--preference", labels, "-o", tailored, *CPU)
    assert json.loads(tmx("eval", tailored, "--data", test, "--json", *CPU))["accuracies"]
    predicted = json.loads(tmx("predict", tailored, inputs, "--json", *CPU))
    assert {row["label"] for row in predicted["predictions"]} <= {"card", "hello", "pay", "bill"}

    # Load: transformers finds every tensor, and embeds as we do.
    for name in ("inputs", "run/base", "run/task-02"):
        encoder = load_encoder(tmp_path / name, "cpu")
        own = embed_inputs(encoder, TEXTS if kind == "bert" else IMAGES)
        np.testing.assert_allclose(by_transformers(kind, tmp_path / name, encoder), own, atol=1e-6)
    assert json.loads((tmp_path / "inputs" / "config.json").read_text()) == json.loads(
        (run / "base" / "config.json").read_text()
    )
