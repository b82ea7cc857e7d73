"""Classifiers of transformers: what their last layer reads, and how a fitted head becomes tensors that they load."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from builtin_run import build_builtin
from models import tiny
from safetensors.torch import load_file, save_file

from tunable_magmax.models.builtin import INPUT, TOKEN, BuiltinEncoder, load_builtin
from tunable_magmax.models.head import Linear
from tunable_magmax.models.prepared import embed_inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to mend

KINDS = tiny.CLASSIFIERS
DECODERS = ("gpt2", "llama", "modernbert-decoder")
BYPASSED = ("bert", "distilbert", "roberta", "electra", "deberta")
LABELS = ("cat", "dog", "owl")


def saved(kind: str, folder: Path) -> Path:
    return tiny.save(tiny.classifier(kind, LABELS, sum(map(ord, kind))), folder)


def batch(encoder: BuiltinEncoder, count: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if encoder.module.main_input_name == "input_ids":
        ids = torch.randint(3, 16, (count, 8), generator=generator)
        mask = torch.ones_like(ids)
        ids[: count // 2, 5:] = mask[: count // 2, 5:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator)}


def rows_of(encoder: BuiltinEncoder, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    with torch.inference_mode():
        return encoder.pool(inputs).double().numpy()


def plain_logits(folder: Path, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """What anybody gets who loads the model without this package."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**inputs).logits.double().numpy()


def written(folder: Path, encoder: BuiltinEncoder, head: Linear, view: str, largest: float) -> Path:
    file = folder / "model.safetensors"
    made = encoder.tensors(head, view, largest)
    state = load_file(file)
    assert made.keys() <= state.keys()
    save_file({**state, **{n: torch.from_numpy(v) for n, v in made.items()}}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_linear_layer_give_the_models_logits(kind, tmp_path):
    encoder = load_builtin(saved(kind, tmp_path), "cpu")
    inputs = batch(encoder)
    rows = rows_of(encoder, inputs)
    assert rows.shape == (12, encoder.dim)
    np.testing.assert_allclose(encoder.head.logits(rows), plain_logits(tmp_path, inputs), atol=1e-5)
    names = [view.name for view in encoder.views]
    assert names == ([INPUT, TOKEN] if kind in BYPASSED else [INPUT])
    assert encoder.views[0].bias == (kind not in DECODERS)
    assert encoder.labels == LABELS


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize(
    ("kind", "view"), [(k, v) for k in KINDS for v in (INPUT, TOKEN) if v == INPUT or k in BYPASSED]
)
def test_a_written_head_gives_its_logits_through_transformers_alone(kind, view, scale, tmp_path):
    encoder = load_builtin(saved(kind, tmp_path), "cpu")
    inputs = batch(encoder)
    rows = rows_of(encoder, inputs)
    columns = next(each.columns for each in encoder.views if each.name == view)
    rng = np.random.default_rng(2)
    head = Linear(np.zeros((3, encoder.dim)), rng.normal(size=3) * encoder.views[0].bias)
    head.weight[:, columns] = scale * rng.normal(size=(3, rows[:, columns].shape[1])) / 16
    written(tmp_path, encoder, head, view, float(np.abs(rows[:, columns]).max()))
    found = plain_logits(tmp_path, inputs)
    np.testing.assert_allclose(found, head.logits(rows), atol=1e-4 * max(1.0, scale))
    again = load_builtin(tmp_path, "cpu")
    np.testing.assert_allclose(again.head.logits(rows_of(again, inputs)), found, atol=1e-4 * max(1.0, scale))


@pytest.mark.parametrize("kind", BYPASSED)
def test_inputs_with_larger_states_than_any_that_was_seen_still_pass(kind, tmp_path):
    """Some margin is left for what the site brings."""
    encoder = load_builtin(saved(kind, tmp_path), "cpu")
    inputs = batch(encoder)
    rows = rows_of(encoder, inputs)
    columns = encoder.views[1].columns
    head = Linear(np.zeros((3, encoder.dim)), np.zeros(3))
    head.weight[:, columns] = np.random.default_rng(2).normal(size=(3, columns.stop - columns.start)) / 16
    written(tmp_path, encoder, head, TOKEN, float(np.abs(rows[:, columns]).max()) / 4)
    np.testing.assert_allclose(plain_logits(tmp_path, inputs), head.logits(rows), atol=1e-4)


def test_a_decoder_that_was_saved_without_a_padding_token_takes_several_texts(tmp_path):
    folder = build_builtin(tmp_path, "gpt2") / "pets"
    for file, changes in (
        ("config", {"pad_token_id": None}),
        ("tokenizer_config", {"pad_token": None, "eos_token": "the"}),
    ):
        path = (folder if file == "config" else tmp_path / "base") / f"{file}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    encoder = load_builtin(folder, "cpu", assets=tmp_path / "base")
    texts = ["my cat", "a dog a dog", "a"]
    together = embed_inputs(encoder, texts)
    assert encoder.tokenizer.pad_token == "the"
    np.testing.assert_allclose(together, [embed_inputs(encoder, [text])[0] for text in texts], atol=1e-5)


def test_a_classifier_that_does_not_end_in_a_linear_layer_keeps_its_head(tmp_path, monkeypatch):
    model = transformers.ViTForImageClassification
    forward = model.forward

    def scaled(*args, **options):
        output = forward(*args, **options)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(model, "forward", scaled)
    encoder = load_builtin(saved("vit", tmp_path), "cpu")
    assert (encoder.last, encoder.views) == (None, ())
