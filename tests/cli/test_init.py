"""`tmx init`: a run of checkpoints that were trained elsewhere; data becomes profiles and kept samples."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import builtin_run
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

WORDS = {"travel": ["hello good", "bye"], "bank": ["pay my bill", "card"]}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A base, and two folders as Trainer leaves them: one with checkpoints alone, one with the last model as well."""
    monkeypatch.chdir(tmp_path)
    model = tiny.build("bert")
    tiny.save(model, tmp_path / "base")
    for seed, name in enumerate(WORDS, 1):
        for step in (5, 10):
            tiny.changed(model, 0.01 * step, seed).save_pretrained(tmp_path / "out" / name / f"checkpoint-{step}")
        (tmp_path / "out" / name / "checkpoint-100").mkdir()  # killed while it was saved
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows([text, f"{name}-{k}"] for k, text in enumerate(WORDS[name]) for _ in range(4))
    tiny.changed(model, 0.2, 3).save_pretrained(tmp_path / "out" / "bank")
    return tmp_path


def test_a_run_of_what_trainer_left(tmx, trained):
    words = ["--base", "base", "--task", "out/travel", "--task", "money=out/bank", "--data", "travel=travel.csv"]
    planned = tmx("init", "run", *words, "--dry-run")
    assert planned.code == 0, planned.err
    assert not (trained / "run").exists()
    made = tmx("init", "run", *words)
    assert made.code == 0, made.err
    lines = made.out.splitlines()
    assert " ".join(lines[1].split()) == "travel out/travel/checkpoint-10 8 samples of 2 classes"
    assert lines[2].split() == ["money", "out/bank"]
    shutil.move(trained, trained.with_name("moved"))
    run = Run.open(trained.with_name("moved") / "run")
    assert run.names == ("travel", "money")
    assert all(path.is_dir() for path in (run.base, *run.tasks))
    assert run.profiles[0].base is not None
    trained.mkdir()


def test_what_comes_next_can_be_typed(tmx, trained):
    words = ["--base", "base", "--task", "out/travel", "--task", "out/bank"]
    made = tmx("init", "run", *words, "--data", "travel=travel.csv", "--data", "bank=bank.csv")
    assert made.out.splitlines()[-1].strip().startswith("tmx tailor run --inputs SITE -o site-model")
    (trained / "labels.txt").write_text("bank\n" * 3 + "travel\n")
    assert tmx("prefer", "run", "--labels", "labels.txt").code == 0
    again = tmx("init", "run", *words)
    assert (again.code, "--overwrite" in again.err) == (2, True)
    record = json.loads(tmx("init", "run", *words, "--overwrite", "--json").out)
    assert [task["name"] for task in record["tasks"]] == ["travel", "bank"]
    assert Run.open("run").profiles == (None, None)


def test_all_problems_come_at_once(tmx, trained):
    tiny.save(tiny.build("vit"), trained / "vit")
    shutil.rmtree(trained / "out/travel/checkpoint-5")
    shutil.rmtree(trained / "out/travel/checkpoint-10")
    words = ["--task", "vit", "--task", "nowhere", "--task", "out/travel", "--data", "vitt=travel.csv"]
    words += ["--data", "vit=travel.csv", "--data", "vit=bank.csv"]
    result = tmx("init", "run", "--base", "base", *words)
    assert result.code == 2
    assert len(json.loads(tmx("init", "run", "--base", "base", *words, "--json").out)["error"]["problems"]) == 5
    assert "'vit'" in result.err
    assert not (trained / "run").exists()


def test_data_is_added_to_a_run(tmx, trained):
    tmx("init", "run", "--base", "base", "--task", "out/travel", "--task", "out/bank")
    content = json.loads((trained / "run/run.json").read_text())
    (trained / "run/run.json").write_text(json.dumps({**content, "benchmark": {"tasks": 5}}))
    made = tmx("init", "run", "--data", "travel=travel.csv")
    assert made.code == 0, made.err
    first = Run.open("run").kept[0]
    assert tmx("init", "run", "--data", "bank=bank.csv").code == 0
    run = Run.open("run")
    assert run.kept[0] == first
    assert [profile.task for profile in run.profiles] == ["travel", "bank"]
    after = json.loads((trained / "run/run.json").read_text())
    assert (after["benchmark"], after["base"]) == ({"tasks": 5}, content["base"])
    with open(run.path / first.path, newline="") as file:
        assert sorted(row["text"] for row in csv.DictReader(file)) == sorted(
            WORDS["travel"]
        )  # each of four is there once
    wrong = tmx("init", "run", "--data", "bank=travel.csv")
    assert (wrong.code, "travel" in wrong.err) == (2, True)
    assert Profile.load("run/profiles/bank.safetensors").classes == ("bank-0", "bank-1")


@pytest.fixture
def classifiers(tmp_path, monkeypatch):
    """A base and two tasks with classifiers that have learned their words, and data with these as labels."""
    monkeypatch.chdir(builtin_run.build_builtin(tmp_path))
    Path("run.json").unlink()
    return ["--base", "base", "--task", "pets", "--task", "tools"]


def take_names_away():
    for name in builtin_run.TASKS:
        config = json.loads(Path(name, "config.json").read_text())
        config["id2label"] = {k: f"LABEL_{k}" for k in config["id2label"]}
        Path(name, "config.json").write_text(json.dumps(config))


def write_data(name, labels):
    """Writes texts of words that the classifiers know, with these labels."""
    rows = [f"a {word} the,{label}" for word, label in labels.items() for _ in range(4)]
    Path(f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")


def test_swapped_data_is_refused_before_anything_is_written(tmx, classifiers):
    swapped = tmx("init", "run", *classifiers, "--data", "pets=tools.csv", "--data", "tools=pets.csv")
    assert swapped.code == 2
    assert "'nail'" in swapped.err
    assert not Path("run").exists()
    assert tmx("init", "run", *classifiers, "--data", "pets=pets.csv", "--data", "tools=tools.csv").code == 0
    assert Run.open("run").kept[1].classes == ("file", "nail", "saw")


def test_a_label_that_is_no_class_is_named(tmx, classifiers):
    write_data("pets", {"cat": "cat", "dog": "dog", "the": "dgo"})
    made = tmx("init", "run", *classifiers, "--data", "pets=pets.csv")
    assert made.code == 0, made.err
    assert "pets.csv: no class of pets: 'dgo'" in " ".join(made.err.split())


def test_classes_that_no_sample_shows_are_named_by_init_and_tailor(tmx, classifiers):
    write_data("tools", {"saw": "saw", "nail": "nail"})
    told = (
        "tools's checkpoint has 3 classes, the data show 2; a fitted head cannot learn classes without samples ('file')"
    )
    assert told in tmx("init", "run", *classifiers, "--data", "pets=pets.csv", "--data", "tools=tools.csv").err
    for weights, matters in (("pets=1", False), ("tools=1", True)):
        made = tmx("tailor", "run", "--weights", weights, "-o", weights)
        assert made.code == 0, made.err
        assert (told in made.err) == matters


def test_classifiers_without_names_are_believed_where_they_predict_the_order(tmx, classifiers):
    take_names_away()
    write_data("pets", {"cat": "cat", "dog": "dog"})
    made = tmx("init", "run", *classifiers, "--data", "pets=pets.csv", "--json")
    assert made.code == 0, made.err
    assert Run.open("run").kept[0].classes == ("pets/LABEL_0", "pets/LABEL_1")  # what the merge calls them
    (note,) = (note for note in json.loads(made.out)["notes"] if "'dog' is LABEL_1" in note)
    assert "answer 'pets/LABEL_0', 'pets/LABEL_1'" in note


@pytest.mark.parametrize("labels", [{"cat": "b", "dog": "a"}, {"cat": "cat", "dog": "dog", "the": "owl"}])
def test_classifiers_without_names_are_not_guessed(tmx, classifiers, labels):
    take_names_away()
    write_data("pets", labels)
    refused = tmx("init", "run", *classifiers, "--data", "pets=pets.csv")
    assert (refused.code, "id2label" in refused.err) == (2, True)
    assert not Path("run").exists()


def test_unrelated_classifiers_without_names_are_not_one(tmx, classifiers):
    """A merge would take the two rows of either for the same two classes."""
    take_names_away()
    shutil.copytree("pets", "tools", dirs_exist_ok=True)
    write_data("tools", {"cat": "nail", "dog": "saw"})
    for data in (["pets=pets.csv"], ["pets=pets.csv", "tools=tools.csv"]):
        refused = tmx("init", "run", *classifiers, *(part for text in data for part in ("--data", text)))
        assert (refused.code, "id2label" in refused.err) == (2, True)
        assert not Path("run").exists()


def test_killed_at_any_write_the_run_is_whole_or_not_there(tmx, trained):
    words = ["--base", "base", "--task", "out/travel", "--task", "out/bank", "--data", "travel=travel.csv"]
    assert tmx("init", "whole", *words).code == 0
    code = f"""
import os, signal, torch
from tunable_magmax.cli.app import main
torch.set_num_threads(1)
try:
    main(["init", "warm", *{words!r}])  # loads all that the children need
except SystemExit as done:
    assert not done.code
original = os.replace
for moment in range(4):
    def killed(*names, left=iter(range(moment))):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*names)
    if os.fork() == 0:
        os.replace = killed
        main(["init", f"run{{moment}}", *{words!r}])
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    codes = [line for line in done.stdout.splitlines() if line.lstrip("-").isdecimal()]
    assert codes[:2] == ["-9", "-9"], done.stderr
    for moment, _ in enumerate(codes):
        place = trained / f"run{moment}"
        if (place / "run.json").exists():
            assert Run.open(place).names == ("travel", "bank")
        assert tmx("init", place.name, *words).code == 0, "the same command goes on"
        assert (place / "run.json").read_bytes() == (trained / "whole/run.json").read_bytes()
        assert not list(place.rglob(".*"))


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
    kept, _ = (record["tasks"][1].pop(part) for part in ("kept", "profiled"))
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
        ("--data warm={data}/warm/red", "put images into class folders"),
        ("--data warm={data}/warm --head {run}/none.safetensors", "none.safetensors"),
        ("--data warm={data}/warm --head {run}/none", "none"),
        ("--data warm={data}/warm --head {data}/warm/red", "red"),
        ("--data warm={data}/warm --max-samples 0", "0"),
        ("--data warm={data}/warm --keep -1", "--keep is -1"),
        ("--data warm={table} --label-column kind", "--label-column is 'kind'"),
        ("--data warm={table} --text-column words", "--text-column is 'words'"),
        ("--base {run}/base --task {run}/warm", "leave out --base"),
        ("--base {run}/base/model.safetensors --task {run}/warm", "give its folder, {run}/base"),
        ("--base {run}/base --task {run}/warm/model.safetensors", "give its folder, {run}/warm"),
        ("--base {run}/base --task other={run}/warm --data other={data}/warm", "leave out --base"),
    ],
)
def test_bad_input(tmx, tmp_path, run, arguments, says):
    (tmp_path / "table.csv").write_text("text,label\na,b\n")
    places = {"run": run, "data": tmp_path / "data", "table": tmp_path / "table.csv"}
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    result = tmx("init", run, *arguments.format(**places).split())
    assert result.code == 2
    assert says.format(**places) in result.err
    assert "Traceback" not in result.err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_profile_that_is_lost_is_made_again_by_the_command_that_the_error_names(tmx, tmp_path, run, content):
    command = ("init", run, "--data", f"warm={tmp_path}/data/warm", "--device", "cpu")
    assert tmx(*command).code == 0
    file = run / "profiles" / "warm.safetensors"
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    refused = tmx("prefer", run, "--inputs", tmp_path / "data/warm")
    assert refused.code == 2
    assert f"`tmx init {run} --data warm=DATA`" in refused.err
    assert tmx(*command).code == 0
    assert file.read_bytes() == before


def test_a_profile_of_a_checkpoint_that_was_trained_again_is_refused_and_a_moved_one_is_not(tmx, tmp_path, run):
    init, site = ("init", run, *data_of(tmp_path), "--device", "cpu"), tmp_path / "data/cold"
    assert tmx(*init).code == 0
    shutil.copytree(run, tmp_path / "copy", copy_function=shutil.copyfile).rename(tmp_path / "moved")
    tiny.changed(tiny.build("vit"), 0.02, seed=3).save_pretrained(run / "warm")
    for words in (("tailor", "-o", tmp_path / "out", "--inputs", site), ("compare", "--data", site), ("studio",)):
        refused = tmx(words[0], run, *words[1:])
        assert refused.code == 2
        assert f"'warm' ({run}/profiles/warm.safetensors)" in refused.err
        assert f"`tmx init {run} --data warm=DATA`" in refused.err
    assert tmx("prefer", run, "--inputs", site).code == 2
    assert tmx("prefer", tmp_path / "moved", "--inputs", site).code == 0
    assert tmx(*init).code == tmx("prefer", run, "--inputs", site).code == 0


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
