"""A model's name is a directory here or a name on the hub, of which only what is needed is fetched."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.models.pretrained import resolve_model

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra: train)")

REPOSITORY = (
    "README.md",
    "config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "merges.txt",
    "1_Pooling/config.json",
    "flax_model.msgpack",
    "tf_model.h5",
    "onnx/model.onnx",
    "openvino/config.json",
)
NEEDED = {"config.json", "preprocessor_config.json", "tokenizer.json", "merges.txt", "1_Pooling/config.json"}


@pytest.fixture
def remote(monkeypatch, tmp_path):
    """A hub with one model; fetches what is asked for."""
    files = list(REPOSITORY)
    cache = tmp_path / "cache"
    cache.mkdir()

    def download(name, allow_patterns):
        assert name == "openai/clip-vit-base-patch16"
        for file in files:
            if any(fnmatchcase(file, pattern) for pattern in allow_patterns):
                (cache / file).parent.mkdir(exist_ok=True)
                (cache / file).write_text("")
        return str(cache)

    monkeypatch.setattr(hub, "snapshot_download", download)
    return files, cache


def fetched(cache):
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}


def test_only_what_an_encoder_needs_is_fetched(remote, tmp_path):
    files, cache = remote
    files += ["model.safetensors", "pytorch_model.bin", "fp16/model.safetensors"]
    assert resolve_model("openai/clip-vit-base-patch16", tmp_path) == cache
    assert fetched(cache) == {*NEEDED, "model.safetensors"}


def test_torch_weights_only_where_there_are_no_others(remote, tmp_path):
    files, cache = remote
    files += ["pytorch_model.bin"]
    assert resolve_model("openai/clip-vit-base-patch16", tmp_path) == cache
    assert fetched(cache) == {*NEEDED, "pytorch_model.bin"}


def test_a_repository_without_weights(remote, tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json with model\.safetensors or pytorch_model\.bin.*\(found"):
        resolve_model("openai/clip-vit-base-patch16", tmp_path)


def test_what_is_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", None)
    (tmp_path / "openai" / "clip").mkdir(parents=True)
    assert resolve_model("openai/clip", tmp_path) == tmp_path / "openai" / "clip"
    assert resolve_model(str(tmp_path / "openai"), tmp_path / "elsewhere") == tmp_path / "openai"
    for name in ("./nowhere", "../a/b", "a/b/c", str(tmp_path / "none")):
        with pytest.raises(InputError, match="does not exist: give a directory with config"):
            resolve_model(name, tmp_path)
    with pytest.raises(InputError, match="name is empty"):
        resolve_model("  ", tmp_path)


def test_without_a_network_one_paragraph_says_so(tmp_path, monkeypatch):
    def download(name, allow_patterns):
        raise hub.errors.LocalEntryNotFoundError("Cannot reach the hub.\nMany\nmore\nlines")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(InputError) as caught:
        resolve_model("openai/clip", tmp_path)
    assert str(caught.value) == (
        f"the model 'openai/clip' is neither here ({tmp_path}/openai/clip does not exist) nor could it be fetched from "
        "the Hugging Face hub (LocalEntryNotFoundError: Cannot reach the hub.); check the name and the network, or "
        "download the model elsewhere and give its directory"
    )


def test_a_name_that_the_hub_does_not_know(tmp_path, monkeypatch):
    class RepositoryNotFoundError(Exception):
        pass

    def download(name, allow_patterns):
        raise RepositoryNotFoundError("401 Client Error for some address")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(InputError, match=r"\(the hub has no such model, or it is private\)"):
        resolve_model("opnai/clip", tmp_path)
