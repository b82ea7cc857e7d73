"""Heads score as the models they are made from, and come back from their files as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny

from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import Head, load_head, mean_head, name_head, require_match, save_head, text_head
from tunable_magmax.models.tower import image_tower

CLASSES = ("hello", "good_bye", "my_bills", "pay")
IMAGES = [tiny.picture((200, 30, 30), 1), tiny.picture((30, 30, 200), 2), tiny.picture((9, 99, 9), 3)]


@pytest.fixture(params=["clip", "siglip"])
def whole(request, tmp_path):
    model = tiny.build(request.param)
    with torch.no_grad():
        model.logit_scale.fill_(1.7)
    return load_encoder(tiny.save(model, tmp_path / request.param), "cpu")


def test_a_text_head_is_the_models_own_zero_shot_classifier(whole):
    head = text_head(whole, CLASSES, ["{}"])
    pixels = whole.prepare_images(IMAGES)
    tokens = whole.prepare_texts(["hello", "good bye", "my bills", "pay"])
    with torch.no_grad():
        own = whole.module(pixel_values=pixels, **tokens).logits_per_image.softmax(dim=1)
    np.testing.assert_allclose(head.probabilities(whole.embed(IMAGES)), own.numpy(), atol=1e-5)
    assert head.logit_scale == pytest.approx(np.exp(1.7), rel=1e-6)
    assert head.classes == CLASSES


def test_templates_are_averaged_as_directions(whole):
    head = text_head(whole, ["pay"], ["{} my bills", "good {}"])
    parts = [whole.embed([text])[0] for text in ("pay my bills", "good pay")]
    mean = sum(part / np.linalg.norm(part) for part in parts)
    np.testing.assert_allclose(head.weight[0], mean / np.linalg.norm(mean), atol=1e-6)


def test_class_names_by_the_sentence_encoder_itself(tmp_path):
    encoder = load_encoder(tiny.save(tiny.build("bert"), tmp_path / "bert"), "cpu")
    head = name_head(encoder, CLASSES, "plain")
    rows = encoder.embed(["hello", "good bye", "my bills", "pay"])
    np.testing.assert_allclose(head.weight, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-6)
    assert head.logit_scale == 20
    require_match(encoder, head)
    with pytest.raises(InputError, match=r"\(bert\) has no text tower.*a head file, or use class means"):
        text_head(encoder, CLASSES, "plain")
    with pytest.raises(InputError, match="'good_bye' and 'good bye' both read"):
        name_head(encoder, ["good_bye", "good bye"], "plain")


def test_heads_that_an_encoder_cannot_make(whole):
    with pytest.raises(InputError, match="has no text tower"):
        text_head(image_tower(whole), CLASSES, "plain")
    with pytest.raises(InputError, match=r"is no sentence encoder.* for images, use the text tower"):
        name_head(whole, CLASSES, "plain")


def test_class_means():
    generator = np.random.default_rng(3)
    features = generator.normal(size=(30, 5)).astype(np.float32)
    labels = np.arange(30) % 3
    head = mean_head(torch.from_numpy(features), torch.from_numpy(labels), ["a", "b", "c"], 7)
    for k in range(3):
        unit = [row / np.linalg.norm(row) for row in features[labels == k]]
        mean = np.mean(unit, axis=0)
        np.testing.assert_allclose(head.weight[k], mean / np.linalg.norm(mean), atol=1e-6)
    assert head.logit_scale == 7
    longer = mean_head(features * np.linspace(1, 9, 30)[:, None], labels, ["a", "b", "c"], 7)
    np.testing.assert_allclose(longer.weight, head.weight, atol=1e-6)  # lengths do not count


@pytest.mark.parametrize(
    ("features", "labels", "says"),
    [
        (np.eye(2), [0, 0], "2 of 3 classes have no sample to take a mean of: 'b', 'c'"),
        (np.eye(2), [0, 3], "labels, whole numbers from 0 to 2"),
        (np.eye(2), [0, -1], "labels, whole numbers from 0 to 2"),
        (np.eye(2), [0.0, 1.0], "found embeddings .* and float64 labels"),
        (np.eye(2), [0], r"embeddings \(2, 2\) and int64 labels \(1,\)"),
        (np.eye(3) * np.nan, [0, 1, 2], "NaN"),
        (np.zeros((3, 2)), [0, 1, 2], "3 of 3 classes have no direction"),
    ],
)
def test_bad_class_means(features, labels, says):
    with pytest.raises(InputError, match=says):
        mean_head(features, labels, ["a", "b", "c"], 1)


def test_a_saved_head_is_the_same_head(tmp_path):
    weight = np.random.default_rng(0).normal(size=(3, 5))
    head = Head.of(weight, ["żółw", 'a "b"', "palm_tree"], 48.7641487121582)
    save_head(head, tmp_path / "new" / "head.safetensors")
    back = load_head(tmp_path / "new" / "head.safetensors")
    assert np.array_equal(back.weight, head.weight)
    assert (back.classes, back.logit_scale, back.digest) == (head.classes, head.logit_scale, head.digest)
    with safe_open(tmp_path / "new" / "head.safetensors", "pt") as opened:
        assert list(opened.keys()) == ["weight"]
        assert set(opened.metadata()) == {"classes", "logit_scale", "format"}
    save_head(back, tmp_path / "again.safetensors")
    first, again = (tmp_path / "new" / "head.safetensors").read_bytes(), (tmp_path / "again.safetensors").read_bytes()
    assert first == again


def test_rows_follow_class_names():
    head = Head.of(np.arange(8).reshape(4, 2), ["apple", "bear", "can", "dog"], 2)
    picked = head.select(["dog", "apple"])
    assert picked.weight.tolist() == [[6, 7], [0, 1]]
    assert (picked.classes, picked.logit_scale) == (("dog", "apple"), 2)
    assert picked.digest != head.digest
    assert head.select(head.classes) is head
    with pytest.raises(
        InputError,
        match=r"the head lacks 2 of 3 classes: 'aple' \(did you mean 'apple'\?\), 'zebra'\. It has 4, such as 'apple'",
    ):
        head.select(["aple", "dog", "zebra"])
    with pytest.raises(InputError, match="named twice: 'dog'"):
        head.select(["dog", "dog"])


@pytest.mark.parametrize(
    ("weight", "classes", "scale", "says"),
    [
        (np.eye(2), ["a"], 1, r"a head of 1 classes needs a matrix of as many rows, found \(2, 2\)"),
        (np.full((2, 2), np.inf), ["a", "b"], 1, "must be finite"),
        (np.eye(2), ["a", "b"], 0, "logit scale of a head is 0; expected a positive number"),
        (np.eye(2), ["a", " "], 1, "texts with something in them, found ' '"),
        (np.zeros((0, 2)), [], 1, "found none"),
    ],
)
def test_heads_that_are_none(weight, classes, scale, says):
    with pytest.raises(InputError, match=says):
        Head.of(weight, classes, scale)


def test_a_head_of_another_width_names_both(tmp_path):
    encoder = load_encoder(tiny.save(tiny.build("vit"), tmp_path / "vit"), "cpu")
    with pytest.raises(InputError, match=r"the head has width 3 and the encoder .*vit has width 16: they do not"):
        require_match(encoder, Head.of(np.eye(3), "abc", 1))
