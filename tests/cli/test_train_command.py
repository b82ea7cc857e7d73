"""`tmx train`: plans, trains, goes on, and says what is wrong; run.yaml is read in full and told back in full."""

import json

import pytest
import yaml
from training import toy

from tunable_magmax.cli.terminal import Screen, on_screen, working
from tunable_magmax.errors import InputError
from tunable_magmax.training.config import TrainConfig, read_config

CPU = ("--device", "cpu")


def test_a_dry_run_reads_and_writes_nothing(tmx, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("read")

    path = toy.file(tmp_path, benchmark={"tasks": 3, "order": "natural"})
    monkeypatch.setattr("tunable_magmax.data.images.read_picture", refuse)
    monkeypatch.setattr("tunable_magmax.models.encoder.read_state", refuse)
    before = sorted(tmp_path.rglob("*"))
    result = tmx("train", path, "--dry-run", "--set", "train.warmup=100")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == f"{tmp_path / 'run'}: 3 tasks, 16 steps in all"
    assert lines[1].split() == ["task", "classes", "samples", "test", "steps"]
    assert [line.split() for line in lines[2:5]] == [
        ["task-01", "2", "14", "6", "8"],
        ["task-02", "1", "7", "3", "4"],
        ["task-03", "1", "7", "3", "4"],
    ]
    told = json.loads(tmx("train", path, "--dry-run", "--json").out)
    assert [task["steps"] for task in told["tasks"]] == [8, 4, 4]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_beside_its_file_and_once_more(tmx, tmp_path):
    path = toy.file(tmp_path)
    result = tmx("train", path, *CPU)
    assert (result.code, result.err) == (0, "")
    run = tmp_path / "run"
    lines = result.out.splitlines()
    assert lines[0] == f"{run}: 2 tasks trained"
    assert lines[-1] == f"next: tmx tailor {run} --inputs DATA -o site-model/"
    again = tmx("train", path, *CPU)
    first, *rest = again.out.splitlines()
    assert (again.code, first) == (0, f"{run}/ is complete: 2 tasks; nothing was trained")
    assert rest == lines[1:]


def test_json_quiet_and_changes(tmx, tmp_path):
    path = toy.file(tmp_path)
    out = tmp_path / "elsewhere" / "run"
    changes = ("--set", "train.lr=3e-5", "--set", "seed=4", "--set", "train.epochs=1")
    result = tmx("train", path, "-o", out, *changes, "--json", *CPU)
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["out"] == str(out)
    assert [(task["name"], task["steps"]) for task in told["tasks"]] == [("task-01", 4), ("task-02", 4)]
    assert all(task["loss"] > 0 and task["seconds"] > 0 for task in told["tasks"])
    kept = read_config(out / "config.yaml")
    assert (kept.train.lr, kept.seed, kept.train.epochs) == (3e-5, 4, 1)
    assert tmx("train", path, "-o", out, *changes, "--quiet", *CPU).out == ""
    again = json.loads(tmx("train", path, "-o", out, *changes, "--json", *CPU).out)
    assert (told["trained"], again["trained"], again["tasks"]) == (2, 0, told["tasks"])
    other = tmx("train", path, "-o", out, *changes[:-2], *CPU)
    assert other.code == 2
    assert "config.yaml: the run was begun with other values of train: choose another directory" in other.err


def test_all_problems_of_a_file_at_once(tmx, tmp_path):
    path = toy.file(tmp_path, train={"lr": 0, "epochs": "many"}, seed="x")
    result = tmx("train", path, "--set", "modle=true")
    assert (result.code, result.out) == (2, "")
    for said in (
        f"error: {path}:",
        "  - train.lr is 0: must be greater than 0",
        "  - train.epochs is 'many': must be a whole number",
        "  - seed is 'x': must be a whole number",
        "  - unknown key 'modle' (did you mean 'model'?)",
    ):
        assert said in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ("{root}/none.yaml", "none.yaml"),
        ("{root}/run.yaml --set train.lr", "train.lr"),
        ("{root}/run.yaml --set model=./none", "none"),
        ("{root}/run.yaml -o {root}/images", "images"),
        ("{root}/run.yaml --device tpu9", "tpu9"),
    ],
)
def test_bad_input(tmx, tmp_path, options, value):
    toy.file(tmp_path)
    result = tmx("train", *options.format(root=tmp_path).split())
    assert (result.code, value in result.err) == (2, True)


def test_bars_are_drawn_unless_they_are_not_wanted(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with on_screen(Screen(quiet=True)), working() as progress:
        assert progress is None
    with on_screen(Screen()), working() as progress:
        for done in (3, 10):
            progress("reading", done, 10)


TEXTS = {"name": "texts", "data": "all.csv", "tasks": 3}
PLAIN = {"model": "bert", "benchmark": TEXTS}


def written(folder, given):
    path = folder / "run.yaml"
    path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    return path


def problems(given, *changes, folder=None):
    with pytest.raises(InputError) as caught:
        TrainConfig.read(given) if folder is None else read_config(written(folder, given), changes)
    return str(caught.value)


FULL = {
    "model": "clip",
    "benchmark": {**TEXTS, "order": ["a", "b", "c"]},
    "head": {"source": "file", "file": "head.safetensors", "logit_scale": 5, "templates": ["a {}.", "the {}."]},
    "train": {
        "epochs": 3,
        "steps": 40,
        "batch": 7,
        "lr": "3e-4",
        "weight_decay": 0,
        "warmup": 0.1,
        "clip": None,
        "freeze": ["embeddings.*", "x"],
        "augment": "crop+flip",
        "pad": 4,
        "precision": "float32",
    },
    "keep": 3,
    "seed": 4,
}


@pytest.mark.parametrize("given", [PLAIN, FULL])
def test_the_record_reads_back_to_an_equal_configuration(tmp_path, given):
    config = TrainConfig.read(given, tmp_path)
    record = config.record()
    assert TrainConfig.read(record, tmp_path) == config
    assert TrainConfig.read(yaml.safe_load(yaml.safe_dump(record)), tmp_path).record() == record
    assert TrainConfig.read(json.loads(json.dumps(record)), tmp_path) == config
    assert (set(record), set(record["train"])) == (set(FULL), set(FULL["train"]))
    if given is FULL:
        head = {**FULL["head"], "file": str(tmp_path / FULL["head"]["file"])}  # the record may be read from elsewhere
        train = {**FULL["train"], "lr": 3e-4}
        placed = {"model": str(tmp_path / "clip"), "benchmark": record["benchmark"], "head": head, "train": train}
        assert record == {**FULL, **placed}


def test_paths_count_from_where_they_are_written(tmp_path, monkeypatch):
    """Those in the file from the file's folder, those on the command line from the current directory."""
    file, here = tmp_path / "configs", tmp_path / "here"
    for folder in (file, here, here / "clip"):
        folder.mkdir()
    order = {"file": "orders.json", "name": "B"}
    path = written(file, {"model": "bert", "benchmark": {**TEXTS, "order": order}, "head": {"file": "h.safetensors"}})
    monkeypatch.chdir(here)
    inside = read_config(path)
    assert (inside.benchmark.data, inside.benchmark.order.file) == (str(file / "all.csv"), str(file / "orders.json"))
    assert inside.head.file == str(file / "h.safetensors")

    for name in ("all.csv", "h.st"):
        (here / name).touch()
    typed = ["benchmark.data=all.csv", "benchmark.order.file=o.json", "head.file=./h.st"]
    config = read_config(path, typed)
    assert (config.benchmark.data, config.head.file) == (str(here / "all.csv"), str(here / "h.st"))
    # What is not there counts from the file, as all others.
    assert (config.benchmark.order.file, config.benchmark.order.name) == (str(file / "o.json"), "B")

    models = ("clip", "./gone", "glyphs.d", "openai/clip")
    found = [read_config(path, [f"model={model}"]).model for model in models]
    assert found == [str(here / "clip"), str(here / "gone"), str(file / "glyphs.d"), "openai/clip"]
    for change, value in (("benchmark.data=[1]", r"data is \[1\]"), ("benchmark=7", "benchmark is 7")):
        with pytest.raises(InputError, match=value):
            read_config(path, [change])


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"source": "file"}, "head.file"),
        ({"source": "builtin", "logit_scale": 3}, "logit_scale"),
        ({"templates": [1]}, "head.templates is [1]"),
    ],
)
def test_heads_that_contradict_themselves(head, says):
    assert says in problems({**PLAIN, "head": head})
