"""`tmx init` of a run that is there: data becomes profiles and kept samples."""

import json

import numpy as np
import pytest
import torch
from models import tiny
from safetensors.torch import save_file

from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.models.pretrained import read_state
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
        tasks.append({"name": name, "checkpoint": name})
    (folder / "run.json").write_text(json.dumps({"version": 1, "base": "base", "tasks": tasks}))
    images(tmp_path / "data" / "warm", 6, "red")
    images(tmp_path / "data" / "cold", 5, "green", "blue")
    base = load_encoder(folder / "base", "cpu")
    means = [embed_inputs(base, [tiny.picture(colour, 50)])[0] for colour in COLOURS.values()]
    rows = torch.tensor(np.stack([mean / np.linalg.norm(mean) for mean in means]))
    metadata = {"classes": json.dumps(list(COLOURS)), "logit_scale": "50"}
    save_file({"weight": rows}, tmp_path / "head.safetensors", metadata)
    return folder


def data_of(tmp_path, *names):
    return [part for name in names or ("warm", "cold") for part in ("--data", f"{name}={tmp_path / 'data' / name}")]


def test_a_whole_run_with_a_head(tmx, tmp_path, run):
    arguments = (*data_of(tmp_path), "--head", tmp_path / "head.safetensors", "--max-samples", 4)
    result = tmx("init", run, *arguments, "--json")
    assert result.code == 0, result.err
    made = json.loads(result.out)
    assert [task["profile"]["task"] for task in made["tasks"]] == ["warm", "cold"]
    record = json.loads((run / "run.json").read_text())
    kept = record["tasks"][1].pop("kept")
    assert record["tasks"][1] == {"name": "cold", "checkpoint": "cold", "profile": "profiles/cold.safetensors"}
    assert (kept["samples"], kept["classes"], kept["source"]) == (10, ["blue", "green"], "training")
    assert made["tasks"][1]["kept"]["path"] == kept["path"]
    assert record["classifier"] == {"head": "classifier-head.safetensors"}
    warm, cold = Run.open(run).profiles
    assert (warm.base, warm.samples, len(warm.features)) == (cold.base, 6, 4)
    assert warm.base == cold.base == read_state(run / "base")[1]
    assert (warm.base_features.shape, warm.row_labels.tolist()) == ((4, 16), [0] * 4)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert tmx("init", run, *arguments, "--quiet").code == 0
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_as_many_samples_are_kept_as_asked(tmx, tmp_path, run):
    assert tmx("init", run, *data_of(tmp_path, "cold"), "--keep", 2).code == 0
    assert Profile.load(run / "profiles" / "cold.safetensors").label_counts == (5, 5)
    assert Run.open(run).kept[1].samples == 4
    assert sorted(path.name for path in (run / Run.open(run).kept[1].path).iterdir()) == ["blue", "green", "labels.csv"]
    assert tmx("init", run, *data_of(tmp_path, "cold"), "--keep", 0).code == 0
    assert not list((run / "kept").iterdir())


def test_held_out_samples_are_kept_if_there_are_some(tmx, tmp_path, run):
    other = images(tmp_path / "other", 9, "red")
    assert tmx("init", run, *data_of(tmp_path), "--eval-data", f"warm={other}").code == 0
    warm, cold = Run.open(run).kept
    assert (warm.source, warm.samples, cold.source, cold.samples) == ("evaluation", 9, "training", 10)
    assert Run.open(run).profiles[0].samples == 6
    assert tmx("init", run, "--eval-data", f"cold={tmp_path / 'data/cold'}").code == 0
    assert [entry.source for entry in Run.open(run).kept] == ["evaluation", "evaluation"]
    said = tmx("init", run, *data_of(tmp_path, "warm"))
    assert str(run / "kept") in said.err
    assert "--keep 0" in said.err
    assert tmx("init", run, "--keep", 0).code == 0
    assert Run.open(run).kept == (None, None)
    assert not list((run / "kept").iterdir())


def test_rows_under_the_base_are_those_of_the_task(tmx, tmp_path, run):
    """Also with samples that cannot be read among them, with a head and without."""
    data = tmp_path / "data" / "cold"
    (data / "blue" / "2.png").write_text("?")
    for more in ((), ("--head", tmp_path / "head.safetensors")):
        result = tmx("init", run, "--data", f"cold={data}", "--device", "cpu", *more)
        assert result.code == 0, result.err
        assert Run.open(run).kept[1].samples == 9
        found = Profile.load(run / "profiles" / "cold.safetensors")
        pictures = [(0, COLOURS["blue"], k) for k in (0, 1, 3, 4)] + [(1, COLOURS["green"], k) for k in range(5)]
        assert found.row_labels.tolist() == [label for label, _, _ in pictures]
        images = [tiny.picture(colour, k) for _, colour, k in pictures]
        for values, name in ((found.base_features, "base"), (found.features, "cold")):
            expected = embed_inputs(load_encoder(run / name, "cpu", assets=run / "base"), images)
            np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "--data NAME=DATA with one of warm, cold"),
        ("--data wram={data}/warm", "no task is called 'wram' (did you mean 'warm'?)"),
        ("--data warm={data}/none", "does not exist"),
        ("--data warm={data}/warm/red", "--label-column"),
        ("--data warm={data}/warm --head {run}/none.safetensors", "none.safetensors"),
        ("--data warm={data}/warm --head {run}/none", "none"),
        ("--data warm={data}/warm --head {data}/warm/red", "red"),
        ("--data warm={data}/warm --max-samples 0", "0"),
        ("--data warm={data}/warm --keep -1", "--keep is -1"),
        ("--data warm={table} --label-column kind", "--label-column is 'kind'"),
        ("--data warm={table} --text-column words", "--text-column is 'words'"),
        ("--base {run}/base --task {run}/warm", "leave out --base"),
        ("--base {run}/base --task other={run}/warm --data other={data}/warm", "leave out --base"),
    ],
)
def test_bad_input(tmx, tmp_path, run, arguments, says):
    (tmp_path / "table.csv").write_text("text,label\na,b\n")
    places = {"run": run, "data": tmp_path / "data", "table": tmp_path / "table.csv"}
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    result = tmx("init", run, *arguments.format(**places).split())
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_head_of_class_means_is_made_for_the_base(tmx, tmp_path, run):
    data = images(tmp_path / "all", 3, *COLOURS)
    assert tmx("init", run, "--head", data).code == 0
    found, base = load_head(Run.open(run).head), load_encoder(run / "base", "cpu")
    rows = embed_inputs(base, [tiny.picture(COLOURS["red"], k) for k in range(3)])
    mean = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).sum(axis=0)
    wanted = mean / np.linalg.norm(mean)
    row = found.weight[found.classes.index("red")]
    assert np.allclose(row / np.linalg.norm(row), wanted, atol=1e-4)


def test_a_head_of_class_names_is_made_of_sentences(tmx, tmp_path):
    model, folder = tiny.build("bert"), tmp_path / "texts"
    tiny.save(model, folder / "base")
    tiny.changed(model, 0.02, seed=1).save_pretrained(folder / "one")
    (tmp_path / "names.txt").write_text("good bye\nhello\n")
    words = ["--base", folder / "base", "--task", folder / "one", "--head", tmp_path / "names.txt"]
    assert tmx("init", tmp_path / "made", *words).code == 0
    assert load_head(Run.open(tmp_path / "made").head).classes == ("good bye", "hello")
    assert tmx("init", tmp_path / "made", "--head", "cat, dog").code == 0
    assert load_head(Run.open(tmp_path / "made").head).classes == ("cat", "dog")
