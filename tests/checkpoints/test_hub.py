"""Models by their names on the hub: cache first, only what is needed, one commit for good."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tunable_magmax.checkpoints.hub import hub_name, located, needed_files, pinned
from tunable_magmax.errors import InputError

EXTRAS = {
    "tokenizer.json": "{}",
    "modeling_custom.py": "raise SystemExit",
    "onnx/model.onnx": "x",
    "flax_model.msgpack": "x",
    "training_args.bin": "x",
    "1_Pooling/config.json": "{}",
}


def model(folder: Path, value: float, shards: int = 1) -> Path:
    """A model of transformers with much that a merge does not need."""
    folder.mkdir(parents=True)
    names = ["a.weight", "b.weight"]
    tensors = {name: torch.full((3, 4), value + k) for k, name in enumerate(names)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        where = {name: f"model-{k + 1:05}-of-00002.safetensors" for k, name in enumerate(names)}
        for name, file in where.items():
            save_file({name: tensors[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    torch.save(tensors, folder / "pytorch_model.bin")
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "auto_map": {"AutoModel": "m.M"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in EXTRAS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def models(hub, tmp_path, monkeypatch):
    """A base and two tasks on the hub, one of them in shards; the current directory is empty."""
    commits = {
        name: hub.put(f"org/{name}", model(tmp_path / "there" / name, value, shards))
        for name, value, shards in (("base", 0.0, 1), ("one", 1.0, 2), ("two", 2.0, 1))
    }
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return commits


MERGE = ("--base", "org/base", "--task", "hf://org/one", "--task", "org/two@main")


def test_a_merge_of_models_on_the_hub_and_again_from_its_own_configuration(hub, models, tmx):
    result = tmx("merge", *MERGE, "--method", "average", "--scale", "1", "-o", "out")
    assert result.code == 0, result.err
    assert torch.equal(load_file("out/model.safetensors")["a.weight"], torch.full((3, 4), 1.5))
    report = json.loads(Path("out/tmx-report.json").read_text())
    roles = {"base": "base", "task 1": "one", "task 2": "two"}
    assert report["hub"] == {role: f"org/{name}@{models[name]}" for role, name in roles.items()}
    fetched = {request.split("/resolve/")[1].split("/", 1)[1] for request in hub.requests if "/resolve/" in request}
    shards = {f"model-0000{k}-of-00002.safetensors" for k in (1, 2)} | {"model.safetensors.index.json"}
    assert fetched == {"config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors", *shards}
    assert not Path("out/modeling_custom.py").exists()
    # The branch moves on; the configuration does not.
    hub.put("org/one", model(Path("moved"), 9.0))
    hub.requests.clear()
    assert tmx("merge", "out/tmx-config.yaml", "-o", "again").code == 0
    assert hub.requests == []
    for name in ("model.safetensors", "tmx-report.json", "README.md"):
        assert Path("out", name).read_bytes() == Path("again", name).read_bytes()
    assert tmx("inspect", "out", "--verify").code == 0


def test_the_card_has_the_front_matter_that_the_hub_files_models_by(hub, models, tmx):
    assert tmx("merge", *MERGE, "-o", "out").code == 0
    _, front, _ = Path("out/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": ["org/base", "org/one", "org/two"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "tags": ["merge", "tunable-magmax"],
    }


def test_the_cache_comes_before_the_network(hub, models):
    first = located("org/base")
    assert pinned(first) == f"org/base@{models['base']}"
    hub.requests.clear()
    assert located(f"org/base@{models['base']}") == located("hf://org/base@main") == first
    assert hub.requests == []
    (first / "model.safetensors").unlink()  # a download that was cut short
    assert (located("org/base") / "model.safetensors").is_file()
    assert any("model.safetensors" in request for request in hub.requests)


def test_what_is_here_always_wins(hub, models):
    shutil.copytree(located("org/one"), "org/base")
    assert located("org/base") == Path("org/base")
    # A path whose first folder is there is a mistyped path, and nobody is asked about it.
    hub.requests.clear()
    assert located("org/two") == Path("org/two")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "why"),
    [("org/none", "the hub has no such model, or it is private"), ("org/base@v9", "the model has no such revision")],
)
def test_what_is_neither_here_nor_there(hub, models, tmx, name, why):
    result = tmx("inspect", name)
    assert result.code == 2
    assert name in result.err
    assert why in result.err
    assert "hf_a_secret" not in result.err


def test_offline_only_the_cache_counts(hub, models, tmx, monkeypatch):
    from huggingface_hub import constants

    located("org/base")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert located("org/base").is_dir()
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        located("org/one")
    assert hub.requests == []


def test_a_run_is_made_of_models_on_the_hub(hub, models, tmx):
    result = tmx("init", "run", "--base", "org/base", "--task", "first=org/one", "--task", "org/two")
    assert result.code == 0, result.err
    record = json.loads(Path("run/run.json").read_text())
    assert record["base"] == f"org/base@{models['base']}"
    assert [(task["name"], task["checkpoint"]) for task in record["tasks"]] == [
        ("first", f"org/one@{models['one']}"),
        ("two", f"org/two@{models['two']}"),
    ]


def test_names():
    assert hub_name("a/b") is not None
    for text in ("a", "a/b/c", "../b", "/a/b", "a/b.safetensors", "a/merge.yml", "a b/c", "", "-a/b"):
        assert hub_name(text) is None
    assert needed_files(["pytorch_model.bin", "x/model.safetensors", "a.py"]) == ["pytorch_model.bin"]
    assert needed_files(["adapter_model.safetensors", "adapter_model.bin"]) == ["adapter_model.safetensors"]
