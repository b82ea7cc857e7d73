"""run.yaml: read in full, told back in full, and every problem of a file at once."""

import json

import pytest
import yaml

from tunable_magmax.errors import InputError
from tunable_magmax.training.config import TrainConfig, read_config

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
