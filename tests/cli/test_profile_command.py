"""`tmx profile`: from a checkpoint and data to a profile, alone and in a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny

from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.state import checkpoint_digest
from tunable_magmax.runs.profile import Profile
from tunable_magmax.runs.run import Run

COLOURS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220)}


def images(root, count, *names):
    for name in names:
        (root / name).mkdir(parents=True)
        for k in range(count):
            tiny.picture(COLOURS[name], k).save(root / name / f"{k}.png")
    return root


@pytest.fixture
def run(tmp_path):
    """A run of two tasks on a tiny ViT, with data for both, and a head over all classes."""
    folder = tmp_path / "run"
    model = tiny.build("vit")
    tiny.save(model, folder / "base")
    tasks = []
    for t, name in enumerate(("warm", "cold"), 1):
        tiny.changed(model, 0.02, seed=t).save_pretrained(folder / name)
        tasks.append({"name": name, "checkpoint": name, "note": "kept"})
    (folder / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": tasks, "extra": 1}))
    images(tmp_path / "data" / "warm", 6, "red")
    images(tmp_path / "data" / "cold", 5, "green", "blue")
    base = load_encoder(folder / "base", "cpu")
    means = [base.embed([tiny.picture(colour, 50)])[0] for colour in COLOURS.values()]
    rows = torch.tensor(np.stack([mean / np.linalg.norm(mean) for mean in means]))
    metadata = {"classes": json.dumps(list(COLOURS)), "logit_scale": "50"}
    save_file({"weight": rows}, tmp_path / "head.safetensors", metadata)
    return folder


def test_one_checkpoint(tmx, tmp_path, run):
    out = tmp_path / "p" / "profile.safetensors"
    data = tmp_path / "data" / "cold"
    (data / "blue" / "broken.png").write_text("?")
    # The checkpoint of a run has no processor of its own; this one stands alone.
    result = tmx("profile", run / "base", "--task", "cold", "--data", data, "--rows", 11, "--device", "cpu", "-o", out)
    assert result.code == 0, result.err
    assert "1 of 11 samples could not be read and were left out: blue/broken.png (not an image)" in result.err
    assert "task cold, 10 samples of 2 classes, 10 embeddings of width 16" in result.out
    found = Profile.load(out)
    assert found.label_table == {"blue": 5, "green": 5}
    assert found.encoder == checkpoint_digest(run / "base")
    assert found.base is None  # without a run there is none
    expected = load_encoder(run / "base", "cpu").embed([tiny.picture(COLOURS["blue"], k) for k in range(5)])
    np.testing.assert_allclose(found.features[:5], expected, atol=1e-5)


def test_a_whole_run_with_a_classifier(tmx, tmp_path, run):
    arguments = ("--data-root", tmp_path / "data", "--classifier", tmp_path / "head.safetensors", "--rows", 4)
    result = tmx("profile", run, *arguments, "--json")
    assert result.code == 0, result.err
    made = json.loads(result.out)
    assert [record["task"] for record in made] == ["warm", "cold"]
    record = json.loads((run / "run.json").read_text())
    assert record["extra"] == 1
    assert record["tasks"][1] == {
        "name": "cold",
        "checkpoint": "cold",
        "note": "kept",
        "profile": "profiles/cold.safetensors",
    }
    assert record["classifier"] == {"head": "classifier-head.safetensors", "checkpoint": "base"}
    warm, cold = Run.open(run).profiles
    assert warm.predicted_table == {"red": 4, "green": 0, "blue": 0}
    assert sum(cold.predicted) == 4
    assert cold.predicted_table["red"] == 0
    assert (warm.classifier, warm.samples, len(warm.features)) == (cold.classifier, 6, 4)
    assert warm.posterior.sum() == pytest.approx(1, abs=1e-4)
    assert warm.base == cold.base == made[0]["base"] == checkpoint_digest(run / "base")
    assert (warm.base_features.shape, warm.row_labels.tolist()) == ((4, 16), [0] * 4)
    before = (run / "profiles" / "warm.safetensors").read_bytes()
    assert tmx("profile", run, *arguments, "--quiet").code == 0
    assert (run / "profiles" / "warm.safetensors").read_bytes() == before


def test_the_tasks_share_of_a_data_set(tmx, tmp_path, run):
    data = images(tmp_path / "all", 3, *COLOURS)
    assert tmx("profile", run, "--task", "cold", "--data", data, "--classes", "green,blue").code == 0
    found = Profile.load(run / "profiles" / "cold.safetensors")
    assert found.classes == ("blue", "green", "red")
    assert (found.label_counts, found.samples) == ((3, 3, 0), 6)


def test_rows_under_the_base_are_those_of_the_task(tmx, tmp_path, run):
    """Also with samples that cannot be read among them, and with no classifier, or one on another encoder."""
    data = tmp_path / "data" / "cold"
    (data / "blue" / "2.png").write_text("?")
    other = ("--classifier", tmp_path / "head.safetensors", "--classifier-checkpoint", run / "warm")
    for more in ((), other):
        result = tmx("profile", run, "--task", "cold", "--data", data, "--device", "cpu", *more)
        assert result.code == 0, result.err
        assert "9 embeddings of width 16, and by the base" in result.out
        found = Profile.load(run / "profiles" / "cold.safetensors")
        pictures = [(0, COLOURS["blue"], k) for k in (0, 1, 3, 4)] + [(1, COLOURS["green"], k) for k in range(5)]
        assert found.row_labels.tolist() == [label for label, _, _ in pictures]
        images = [tiny.picture(colour, k) for _, colour, k in pictures]
        for values, name in ((found.base_features, "base"), (found.features, "cold")):
            expected = load_encoder(run / name, "cpu", assets=run / "base").embed(images)
            np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_base_that_cannot_embed_is_said(tmx, tmp_path, run):
    for name in ("warm", "cold"):  # with all they need in their own folders
        for file in (run / "base").glob("*.json"):
            (run / name / file.name).write_bytes(file.read_bytes())
    (run / "base" / "config.json").unlink()
    result = tmx("profile", run, "--task", "warm", "--data", tmp_path / "data" / "warm")
    assert result.code == 0, result.err
    assert "warning: no embeddings by the run's base, which --method probe needs: " in result.err
    assert Profile.load(run / "profiles" / "warm.safetensors").base is None


def test_texts(tmx, tmp_path):
    folder = tiny.save(tiny.build("bert"), tmp_path / "bert")
    (tmp_path / "data.csv").write_text("text,label\nhello,greeting\npay my bill,money\n")
    out = tmp_path / "p.safetensors"
    assert tmx("profile", folder, "--task", "talk", "--data", tmp_path / "data.csv", "-o", out).code == 0
    expected = load_encoder(folder, "cpu").embed(["hello", "pay my bill"])
    np.testing.assert_allclose(Profile.load(out).features, expected, atol=1e-5)


def test_ready_features(tmx, tmp_path, run):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    (tmp_path / "y.txt").write_text("cat\ndog\ncat\ncat\ndog\ndog\n")
    given = ("--features", tmp_path / "x.npy", "--labels", tmp_path / "y.txt", "--rows", 3)
    assert tmx("profile", run, "--task", "warm", *given).code == 0
    found = Run.open(run).profiles[0]
    assert (found.label_table, found.samples, found.features.shape) == ({"cat": 3, "dog": 3}, 6, (3, 2))
    assert found.encoder == checkpoint_digest(run / "warm")
    (tmp_path / "y.txt").write_text("cat\n")
    result = tmx("profile", run, "--task", "warm", *given)
    assert (result.code, "6 rows of features and 1 labels" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{run} --task warm", "Give exactly one of --data, --data-root and --features"),
        ("{run} --data {data}", "which task's data is it?"),
        ("{run} --task wram --data {data}", "no task 'wram' (did you mean 'warm'?)"),
        ("{run} --task warm --data {data}/none", "no such data"),
        ("{run} --task warm --data {data}/cold -o {run}/run.json", "exists and is no profile"),
        ("{run} --task warm --data {data}/warm/red", "holds no labels, which a profile counts"),
        ("{run} --task warm --data {data}/warm --classes pink", "no class 'pink'"),
        ("{run} --task warm --data {data}/warm --classifier {run}/none", "no such file"),
        ("{run} --task warm --data {data}/warm --rows 0", "6 samples, of which 0 are to be used"),
        ("{run}/base --data {data}/warm", "is no run directory: give --task NAME, --data DATA and -o FILE"),
        ("{run}/base --task x --data {data}/warm -o x --classifier {head}", "--classifier-checkpoint"),
        ("{run}/warm --task x --data {data}/warm -o x", "no preprocessor_config.json"),
    ],
)
def test_bad_input(tmx, tmp_path, run, arguments, says):
    places = {"run": run, "data": tmp_path / "data", "head": tmp_path / "head.safetensors"}
    result = tmx("profile", *arguments.format(**places).split())
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err
    assert result.err.count("\n") == 1
    assert "profile" not in json.loads((run / "run.json").read_text())["tasks"][0]
