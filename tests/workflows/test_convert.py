"""`tmx convert`: any readable checkpoint as safetensors."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sequences import raw

from tunable_magmax.checkpoints.source import open_checkpoint


@pytest.fixture
def tensors():
    return {
        "b.weight": torch.randn(5, 7),
        "b.half": torch.randn(9).to(torch.bfloat16),
        "a.double": torch.randn(3, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "step": torch.tensor(12),
        "empty": torch.zeros(0, 3),
        "strided": torch.randn(4, 6).t(),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def test_a_torch_file_to_one_safetensors_file(tmx, tmp_path, tensors):
    torch.save(tensors, tmp_path / "old.pt")
    result = tmx("convert", tmp_path / "old.pt", "-o", tmp_path / "new.safetensors")
    assert result.code == 0, result.err
    assert "8 tensors" in result.out
    assert raw(load_file(tmp_path / "new.safetensors")) == raw(tensors)
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_and_back_give_the_same_bytes(tmx, tmp_path, tensors):
    torch.save(tensors, tmp_path / "old.pt")
    assert tmx("convert", tmp_path / "old.pt", "-o", tmp_path / "one.safetensors", "-q").out == ""
    done = tmx("convert", tmp_path / "one.safetensors", "-o", tmp_path / "many", "--shard-size", "100")
    assert done.code == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert tmx("convert", tmp_path / "many", "-o", tmp_path / "back.safetensors").code == 0
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "back.safetensors").read_bytes()


def test_tied_tensors_are_written_once_and_stay_tied(tmx, tmp_path):
    """Also one that is called `format`, a key that headers have for themselves: it is written whole."""
    weight = torch.randn(4, 2)
    torch.save({"wte.weight": weight, "lm_head.weight": weight, "format": weight}, tmp_path / "old.bin")
    result = tmx("convert", tmp_path / "old.bin", "-o", tmp_path / "new.safetensors", "--json")
    assert json.loads(result.out)["tied"] == {"lm_head.weight": "wte.weight"}
    assert raw(load_file(tmp_path / "new.safetensors")) == raw({"wte.weight": weight, "format": weight})
    with open_checkpoint(tmp_path / "new.safetensors") as checkpoint:
        assert dict(checkpoint.aliases) == {"lm_head.weight": "wte.weight"}


def test_configuration_and_tokenizer_go_along(tmx, tmp_path, tensors):
    (tmp_path / "old").mkdir()
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json", "vocab.txt", "training_args.bin", "optimizer.pt"):
        (tmp_path / "old" / name).write_text("{}")
    assert tmx("convert", tmp_path / "old", "-o", tmp_path / "new").code == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "vocab.txt"}


def test_refusals(tmx, sequence):
    out = sequence.folder / "x"
    for words in (
        [sequence.base],
        [sequence.base, "--overwrite", "-o", sequence.base],
        [sequence.base, "-o", sequence.tasks[0]],
        [sequence.base, "-o", out.with_suffix(".bin")],
        [sequence.folder / "nowhere", "-o", out],
        [sequence.base, "--shard-size", "big", "-o", out],
    ):
        assert tmx("convert", *words).code == 2
    assert not out.exists()
    before = sequence.tasks[0].read_bytes()
    assert tmx("convert", sequence.base, "--overwrite", "-o", sequence.tasks[0]).code == 0
    assert sequence.tasks[0].read_bytes() != before


def test_a_prefix_is_stripped_from_names_and_ties(tmx, tmp_path):
    shared = torch.randn(3, 2)
    named = {"model.embed": shared, "model.out": shared, "head": torch.randn(2)}
    torch.save(named, tmp_path / "old.pt")
    result = tmx("convert", tmp_path / "old.pt", "--strip-prefix", "model.", "-o", tmp_path / "new")
    assert result.code == 0, result.err
    assert raw(load_file(tmp_path / "new" / "model.safetensors")) == raw({"embed": shared, "head": named["head"]})
    with open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.aliases == {"out": "embed"}


@pytest.mark.parametrize(
    ("names", "prefix", "words"),
    [(["model.a"], "modle.", "'model.'"), (["model.a", "a"], "model.", "'a'"), (["model.a"], "model.a", "''")],
)
def test_prefixes_that_can_not_be_stripped(tmx, tmp_path, names, prefix, words):
    torch.save({name: torch.zeros(1) + k for k, name in enumerate(names)}, tmp_path / "old.pt")
    result = tmx("convert", tmp_path / "old.pt", "--strip-prefix", prefix, "-o", tmp_path / "new")
    assert result.code == 2
    assert words in result.err
    assert not (tmp_path / "new").exists()
