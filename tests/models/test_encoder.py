"""Encoders embed as their transformers models do, from the layouts in which those are saved."""

import hashlib

import adapters
import numpy as np
import pytest
import torch
from models import tiny
from safetensors.torch import load_file, save_file

from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import load_encoder, put_weights
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.models.pretrained import read_state

IMAGES = [
    tiny.picture((200, 30, 30), 1),
    tiny.picture((30, 30, 200), 2, 33),
    tiny.picture((99, 99, 99), 3).convert("L"),
]
TEXTS = ["hello", "pay my bills", "good bye good bye"]


def pixels():
    """What the processors above do, by hand: resize, scale to [0, 1], normalise."""
    from PIL import Image

    rows = [np.asarray(i.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR), dtype=np.float32) for i in IMAGES]
    return torch.from_numpy((np.stack(rows) / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()


def reference(kind, model):
    """The embedding by the family's own rule, straight from the model."""
    with torch.no_grad():
        output = getattr(model, "vision_model", model)
        if kind == "clip":
            return model.visual_projection(output(pixel_values=pixels()).pooler_output)
        if kind == "clip-vision":
            return model(pixel_values=pixels()).image_embeds
        if kind == "vit-classifier":
            return model.vit(pixel_values=pixels()).last_hidden_state[:, 0]
        return output(pixel_values=pixels()).pooler_output


@pytest.mark.parametrize(
    "kind", ["clip", "clip-vision", "clip-tower", "siglip", "siglip-vision", "vit", "vit-classifier"]
)
def test_images(tmp_path, capfd, kind):
    model = tiny.build(kind)
    encoder = load_encoder(tiny.save(model, tmp_path / kind), "cpu")
    capfd.readouterr()
    found = embed_inputs(encoder, IMAGES)
    assert found.dtype == np.float32
    assert found.shape == (3, encoder.dim) == (3, 8 if kind in ("clip", "clip-vision") else 16)
    np.testing.assert_allclose(found, reference(kind, model).numpy(), atol=1e-4)
    exact = encoder.pool(encoder.prepare_images(IMAGES))
    np.testing.assert_allclose(found, exact.detach().numpy(), atol=1e-5)
    assert exact.requires_grad
    assert not encoder.module.training
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["bert", "bert-masked"])
def test_texts_are_pooled_over_what_is_no_padding(tmp_path, kind):
    model = tiny.build(kind)
    encoder = load_encoder(tiny.save(model, tmp_path / kind), "cpu")
    found = embed_inputs(encoder, TEXTS)
    body = getattr(model, "bert", model)
    for row, ids in zip(found, ([2, 5, 3], [2, 8, 9, 10, 11, 3], [2, 6, 7, 6, 7, 3]), strict=True):
        with torch.no_grad():
            alone = body(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        np.testing.assert_allclose(row, alone.numpy(), atol=1e-5)
    assert encoder.text_length == 12
    assert embed_inputs(encoder, ["good " * 50]).shape == (1, 16)
    with pytest.raises(InputError, match="encodes texts, not images"):
        embed_inputs(encoder, IMAGES)


def test_a_file_of_weights_takes_the_rest_from_the_base(tmp_path):
    model = tiny.build("vit")
    base = tiny.save(model, tmp_path / "base")
    task = tmp_path / "run" / "task.safetensors"
    task.parent.mkdir()
    save_file(tiny.changed(model).state_dict(), task)
    encoder = load_encoder(task, "cpu", assets=base)
    assert encoder.digest == read_state(task)[1] != read_state(base)[1]
    assert not np.allclose(embed_inputs(encoder, IMAGES), embed_inputs(load_encoder(base, "cpu"), IMAGES))
    with pytest.raises(InputError, match=r"no config\.json, so the model's architecture is unknown"):
        load_encoder(task, "cpu")


def test_an_adapter_on_its_base_embeds_as_the_checkpoint_that_is_made_of_it(tmp_path):
    from tunable_magmax import merge_checkpoints

    base = tiny.save(tiny.build("vit"), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    name = next(name for name in tensors if name.endswith("query.weight"))
    factors = adapters.factors(*tensors[name].shape, 2, 1)
    adapters.save_adapter(tmp_path / "lora", {name.removesuffix(".weight"): factors})
    merge_checkpoints(base, [tmp_path / "lora"], tmp_path / "whole", method="last_task", scale=1)
    found = load_encoder(tmp_path / "lora", "cpu", assets=base)
    whole = embed_inputs(load_encoder(tmp_path / "whole", "cpu"), IMAGES)
    np.testing.assert_allclose(embed_inputs(found, IMAGES), whole, atol=1e-5)
    assert not np.allclose(whole, embed_inputs(load_encoder(base, "cpu"), IMAGES), atol=1e-3)
    with pytest.raises(InputError, match="lora"):
        load_encoder(tmp_path / "lora", "cpu")


def test_the_digest_is_what_the_docs_say(tmp_path):
    folder = tiny.save(tiny.build("vit"), tmp_path / "vit")
    state = load_file(folder / "model.safetensors")
    by_hand = hashlib.sha256()
    for name in sorted(state):
        by_hand.update(f"{name}\nF32\n{','.join(map(str, state[name].shape))}\n".encode())
        by_hand.update(state[name].numpy().tobytes())
    expected = f"sha256:{by_hand.hexdigest()}"
    assert read_state(folder)[1] == load_encoder(folder, "cpu").digest == expected
    tiny.build("vit").save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert read_state(tmp_path / "sharded")[1] == expected


def test_what_does_not_fit_is_refused(tmp_path):
    folder = tiny.save(tiny.build("vit"), tmp_path / "vit")
    state = load_file(folder / "model.safetensors")
    name = "embeddings.cls_token"
    save_file({k: v for k, v in state.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"1 tensors of ViTModel .*'{name}'"):
        load_encoder(folder, "cpu")
    save_file({**state, name: torch.zeros(1, 1, 8)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="do not fit ViTModel"):
        load_encoder(folder, "cpu")
    save_file(state, folder / "model.safetensors")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match=r"no preprocessor_config\.json"):
        load_encoder(folder, "cpu")
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InputError, match=r"its config\.json cannot be used"):
        load_encoder(folder, "cpu")
    bert = tiny.save(tiny.build("bert"), tmp_path / "bert", companions=False)
    with pytest.raises(InputError, match="no tokenizer; add its files"):
        load_encoder(bert, "cpu")
    with pytest.raises(InputError, match="does not exist"):
        load_encoder(tmp_path / "none", "cpu")


@pytest.mark.parametrize("kind", ["vit", "vit-classifier", "clip", "bert", "bert-masked", "bert-old"])
def test_weights_are_replaced_as_if_loaded(tmp_path, kind):
    """Whatever the checkpoint calls its tensors: with a prefix, with a head, or as BERT did at first."""
    model = tiny.build(kind.removesuffix("-old"))
    first = tiny.save(model, tmp_path / "first")
    other = tiny.save(tiny.changed(model), tmp_path / "other")
    if kind == "bert-old":
        for folder in (first, other):
            tensors = load_file(folder / "model.safetensors")
            old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for n, tensor in tensors.items()}
            assert old.keys() != tensors.keys()
            save_file(old, folder / "model.safetensors", {"format": "pt"})
    encoder = load_encoder(first, "cpu")
    inputs = [tiny.picture((200, 30, 30))] if encoder.image_processor else ["pay my bill"]
    for folder in (other, first, other):  # the names are learned from the first one
        put_weights(encoder, read_state(folder)[0])
        expected = load_encoder(folder, "cpu")
        np.testing.assert_array_equal(embed_inputs(encoder, inputs), embed_inputs(expected, inputs))
