"""A model's name is a directory here or a name on the hub, of which only what is needed is fetched."""

from __future__ import annotations

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.models.pretrained import resolve_model

NAME = "openai/clip-vit-base-patch16"
NEEDED = {"config.json", "preprocessor_config.json", "tokenizer.json", "merges.txt", "1_Pooling/config.json"}
NOT_NEEDED = {"README.md", "flax_model.msgpack", "tf_model.h5", "onnx/model.onnx", "openvino/config.json", "code.py"}


@pytest.fixture
def remote(hub, tmp_path):
    """The files of a model on the hub, without weights."""
    hub.repos[NAME] = {"main": dict.fromkeys([*NEEDED, *NOT_NEEDED], b"{}")}
    return hub.repos[NAME]["main"]


def fetched(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        (["model.safetensors", "pytorch_model.bin", "fp16/model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin"], "pytorch_model.bin"),
    ],
)
def test_only_what_an_encoder_needs_is_fetched(remote, tmp_path, weights, taken):
    remote |= dict.fromkeys(weights, b"{}")
    assert fetched(resolve_model(NAME, tmp_path)) == {*NEEDED, taken}


def test_what_is_here_comes_first(hub, tmp_path):
    (tmp_path / "openai" / "clip").mkdir(parents=True)
    assert resolve_model("openai/clip", tmp_path) == tmp_path / "openai" / "clip"
    assert resolve_model(str(tmp_path / "openai"), tmp_path / "elsewhere") == tmp_path / "openai"
    for name in ("./nowhere", "../a/b", "a/b/c", str(tmp_path / "none")):
        with pytest.raises(InputError, match="does not exist: give a directory with config"):
            resolve_model(name, tmp_path)
    with pytest.raises(InputError, match="name is empty"):
        resolve_model("  ", tmp_path)
    assert hub.requests == []
