"""What is trained is what is kept: the image tower of two-tower models, and of others all that gets a gradient."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import tiny
from safetensors.torch import load_file, save_file

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.models.encoder import image_tower, load_encoder, save_encoder, trainable
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.models.pretrained import read_state

IMAGES = [tiny.picture((200, 30, 30), 1), tiny.picture((30, 30, 200), 2, 33)]
TEXTS = ["hello", "pay my bills"]
KINDS = ["clip", "clip-vision", "clip-tower", "siglip", "siglip-vision", "vit", "vit-classifier", "bert", "bert-masked"]
TOWERS = {"clip": "CLIPVisionModelWithProjection", "siglip": "SiglipVisionModel"}


def load(kind, tmp_path, model=None):
    return load_encoder(tiny.save(model or tiny.build(kind), tmp_path / kind), "cpu")


def embeddings(encoder):
    return embed_inputs(encoder, TEXTS if encoder.image_processor is None else IMAGES)


@pytest.mark.parametrize("kind", sorted(TOWERS))
def test_a_tower_embeds_as_the_whole_and_transformers_loads_it(tmp_path, kind):
    import transformers

    folder = tiny.save(tiny.build(kind), tmp_path / kind)
    # Older checkpoints hold position numbers, which are no weights.
    old = {f"{side}.embeddings.position_ids": torch.arange(4).unsqueeze(0) for side in ("vision_model", "text_model")}
    save_file({**load_file(folder / "model.safetensors"), **old}, folder / "model.safetensors")
    whole = load_encoder(folder, "cpu")
    tower = image_tower(whole)
    assert type(tower.module).__name__ == TOWERS[kind]
    assert np.array_equal(embed_inputs(tower, IMAGES), embed_inputs(whole, IMAGES))
    with pytest.raises(InputError, match="encodes images, not texts"):
        embed_inputs(tower, TEXTS)

    save_encoder(tower, tmp_path / "tower")
    files = sorted(path.name for path in (tmp_path / "tower").iterdir())
    assert files == ["config.json", "model.safetensors", "preprocessor_config.json"]
    assert not any("position_ids" in name for name in load_file(tmp_path / "tower" / "model.safetensors"))
    back = load_encoder(tmp_path / "tower", "cpu")
    save_encoder(back, tmp_path / "again")
    assert read_state(tmp_path / "again")[1] == tower.digest
    assert back.digest == tower.digest == read_state(tmp_path / "tower")[1] != whole.digest
    assert np.array_equal(embed_inputs(back, IMAGES), embed_inputs(whole, IMAGES))
    model, told = getattr(transformers, TOWERS[kind]).from_pretrained(tmp_path / "tower", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        output = model.eval()(pixel_values=whole.prepare_images(IMAGES))
    own = output.image_embeds if kind == "clip" else output.pooler_output
    assert np.array_equal(own.numpy(), embed_inputs(whole, IMAGES))


def prepared(encoder):
    return encoder.prepare_texts(TEXTS) if encoder.image_processor is None else encoder.prepare_images(IMAGES)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_is_what_gets_a_gradient(tmp_path, kind):
    encoder = load(kind, tmp_path)
    named = trainable(encoder)
    encoder.module.train()
    encoder.pool(prepared(encoder)).square().mean().backward()
    assert encoder.module.training
    reached = {name for name, parameter in encoder.module.named_parameters() if parameter.grad is not None}
    assert reached <= set(named)
    assert all(parameter.requires_grad for parameter in named.values())
    assert not any(name.startswith(("text_", "logit_")) for name in named)
    # The attention pooling of SigLIP and a ViT's pooler stand between the states and the embedding; BERT's does not.
    pooled = {"siglip": "head.", "siglip-vision": "head.", "vit": "pooler."}.get(kind)
    assert any(pooled in name for name in reached) if pooled else not any("pooler" in name for name in reached)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(tmp_path, capfd, kind):
    encoder = load(kind, tmp_path)
    trained = replace(encoder, module=tiny.changed(encoder.module))
    capfd.readouterr()
    for name in ("one", "two"):
        save_encoder(trained, tmp_path / name)
    assert capfd.readouterr().err == ""
    back = load_encoder(tmp_path / "one", "cpu")
    assert np.array_equal(embeddings(back), embeddings(trained))
    assert type(back.module) is type(trained.module)
    save_encoder(back, tmp_path / "again")  # base and tasks must agree in names, however often they were loaded
    assert read_state(tmp_path / "again")[1] == read_state(tmp_path / "one")[1]
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "one" / "model.safetensors").values()} == {
        "torch.float32"
    }
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*"))
    assert files == sorted(path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*"))
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        assert str(tmp_path).encode() not in (tmp_path / "one" / file).read_bytes()


def test_how_a_sentence_encoder_pools_is_kept(tmp_path):
    folder = tiny.save(tiny.build("bert"), tmp_path / "bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    save_encoder(load_encoder(folder, "cpu"), tmp_path / "saved")
    back = load_encoder(tmp_path / "saved", "cpu")
    assert (back.pooling, back.text_length) == ("first", 6)


def test_a_directory_is_there_entirely_or_not_at_all(tmp_path, monkeypatch):
    encoder = load("vit", tmp_path)
    out = tmp_path / "out"
    (tmp_path / ".out.saving").mkdir()  # of a save that was killed
    (tmp_path / ".out.saving" / "half.bin").write_bytes(b"")

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tunable_magmax.models.encoder.put_companions", fails)
        with pytest.raises(StorageError, match=r"out: could not be written \(No space left on device\)"):
            save_encoder(encoder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit"]
    save_encoder(encoder, out)
    assert np.array_equal(embeddings(load_encoder(out, "cpu")), embeddings(encoder))
    save_encoder(replace(encoder, module=tiny.changed(encoder.module)), out)  # what was there goes
    assert not np.array_equal(embeddings(load_encoder(out, "cpu")), embeddings(load("vit", tmp_path / "new")))
