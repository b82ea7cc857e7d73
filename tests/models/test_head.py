"""Heads score as the models they are made from and come back from their files; templates and names that say nothing."""

import numpy as np
import pytest
import torch
from models import tiny
from safetensors import safe_open
from safetensors.torch import save_file

from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import image_tower, load_encoder
from tunable_magmax.models.head import (
    Head,
    load_head,
    mean_head,
    name_head,
    read_templates,
    require_match,
    save_head,
    sentences,
)
from tunable_magmax.models.prepared import embed_inputs

CLASSES = ("hello", "good_bye", "my_bills", "pay")
IMAGES = [tiny.picture((200, 30, 30), 1), tiny.picture((30, 30, 200), 2), tiny.picture((9, 99, 9), 3)]


@pytest.fixture(params=["clip", "siglip"])
def whole(request, tmp_path):
    model = tiny.build(request.param)
    with torch.no_grad():
        model.logit_scale.fill_(1.7)
    return load_encoder(tiny.save(model, tmp_path / request.param), "cpu")


def test_a_text_head_is_the_models_own_zero_shot_classifier(whole):
    head = name_head(whole, CLASSES, ["{}"])
    pixels = whole.prepare_images(IMAGES)
    tokens = whole.prepare_texts(["hello", "good bye", "my bills", "pay"])
    with torch.no_grad():
        own = whole.module(pixel_values=pixels, **tokens).logits_per_image.softmax(dim=1)
    np.testing.assert_allclose(head.probabilities(embed_inputs(whole, IMAGES)), own.numpy(), atol=1e-5)
    assert head.classes == CLASSES


def test_templates_are_averaged_as_directions(whole):
    head = name_head(whole, ["pay"], ["{} my bills", "good {}"])
    parts = [embed_inputs(whole, [text])[0] for text in ("pay my bills", "good pay")]
    mean = sum(part / np.linalg.norm(part) for part in parts)
    np.testing.assert_allclose(head.weight[0], np.exp(1.7) * mean / np.linalg.norm(mean), atol=1e-5)


def test_class_names_by_the_sentence_encoder_itself(tmp_path):
    encoder = load_encoder(tiny.save(tiny.build("bert"), tmp_path / "bert"), "cpu")
    head = name_head(encoder, CLASSES, "plain")
    rows = embed_inputs(encoder, ["hello", "good bye", "my bills", "pay"])
    np.testing.assert_allclose(head.weight, 20 * rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-5)
    require_match(encoder, head)
    with pytest.raises(InputError, match="'good_bye' and 'good bye'"):
        name_head(encoder, ["good_bye", "good bye"], "plain")
    with pytest.raises(InputError, match="width 3"):
        require_match(encoder, Head.of(np.eye(3), "abc"))


def test_heads_that_an_encoder_cannot_make(whole):
    with pytest.raises(InputError, match="no text tower"):
        name_head(image_tower(whole), CLASSES, "plain")


def test_class_means():
    generator = np.random.default_rng(3)
    features = generator.normal(size=(30, 5)).astype(np.float32)
    labels = np.arange(30) % 3
    head = mean_head(torch.from_numpy(features), torch.from_numpy(labels), ["a", "b", "c"], 7)
    for k in range(3):
        unit = [row / np.linalg.norm(row) for row in features[labels == k]]
        mean = np.mean(unit, axis=0)
        np.testing.assert_allclose(head.weight[k], 7 * mean / np.linalg.norm(mean), atol=1e-5)
    longer = mean_head(features * np.linspace(1, 9, 30)[:, None], labels, ["a", "b", "c"], 7)
    np.testing.assert_allclose(longer.weight, head.weight, atol=1e-5)  # lengths do not count


@pytest.mark.parametrize(
    ("features", "labels", "names"), [(np.eye(2), [0, 0], "'b', 'c'"), (np.zeros((3, 2)), [0, 1, 2], "3 of 3")]
)
def test_bad_class_means(features, labels, names):
    with pytest.raises(InputError, match=names):
        mean_head(features, labels, ["a", "b", "c"], 1)


@pytest.mark.parametrize("bias", [None, [0.5, 0.0, -1.0]])
def test_a_saved_head_is_the_same_head(tmp_path, bias):
    weight = np.random.default_rng(0).normal(size=(3, 5))
    head = Head.of(weight, ["żółw", 'a "b"', "palm_tree"], 48.7641487121582, bias)
    file = tmp_path / "new" / "head.safetensors"
    save_head(head, file)
    back = load_head(file)
    assert np.array_equal(back.weight, head.weight)
    assert np.array_equal(back.bias, head.bias)
    assert (back.classes, back.digest) == (head.classes, head.digest)
    with safe_open(file, "pt") as opened:
        assert set(opened.keys()) == ({"weight"} if bias is None else {"weight", "bias"})
        assert set(opened.metadata()) == {"classes", "format"}
    save_head(back, tmp_path / "again.safetensors")
    assert file.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_a_head_scores_by_cosine(tmp_path):
    path = tmp_path / "head.safetensors"
    save_file({"weight": torch.eye(2), "mean": torch.zeros(2)}, path, {"classes": '["a", "b"]', "logit_scale": "2.0"})
    shares = load_head(path).probabilities(np.array([[3.0, 4.0]]))  # cosines 0.6 and 0.8
    assert shares[0, 1] == pytest.approx(1 / (1 + np.exp(2 * (0.6 - 0.8))))


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"other": torch.eye(2)}, {"classes": '["a", "b"]'}),
        ({"weight": torch.eye(2)}, None),
        ({"weight": torch.eye(2)}, {"classes": '["a", "a"]'}),
        ({"weight": torch.eye(2)}, {"classes": '["a"]'}),
        ({"weight": torch.eye(2)}, {"classes": '"ab"'}),
        ({"weight": torch.eye(2)}, {"classes": '["a", " "]'}),
        ({"weight": torch.eye(2)}, {"classes": '["a", "b"]', "logit_scale": "0"}),
        ({"weight": torch.eye(2) * torch.nan}, {"classes": '["a", "b"]'}),
        ({"weight": torch.eye(2), "bias": torch.zeros(3)}, {"classes": '["a", "b"]'}),
    ],
)
def test_bad_head_files(tmp_path, tensors, metadata):
    save_file(tensors, tmp_path / "bad-head.safetensors", metadata)
    with pytest.raises(InputError, match=r"bad-head\.safetensors"):
        load_head(tmp_path / "bad-head.safetensors")


def test_rows_follow_class_names():
    head = Head.of(np.arange(8).reshape(4, 2), ["apple", "bear", "can", "dog"], 1.0, [1, 2, 3, 4])
    picked = head.select(["dog", "apple"])
    assert (picked.weight.tolist(), picked.bias.tolist()) == ([[6, 7], [0, 1]], [4, 1])
    assert picked.classes == ("dog", "apple")
    assert picked.digest != head.digest
    with pytest.raises(InputError, match=r"'aple' \(did you mean 'apple'\?\), 'zebra'"):
        head.select(["aple", "dog", "zebra"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("cifar10", r"no prompt templates are called 'cifar10' \(did you mean 'cifar100'\?\); known are cifar100, "),
        ("a photo of {}.", "a photo of"),
        ([], "found none"),
        (["{}", "a photo.", "{} and {}", "a {name}.", 3], r"'a photo\.', '\{\} and \{\}', 'a \{name\}\.', 3"),
    ],
)
def test_bad_templates(given, says):
    with pytest.raises(InputError, match=says):
        read_templates(given)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["n01443537", "n01484850"], "WordNet numbers, such as 'n01443537'.*give the classes' names in words"),
        (["palm_tree", "palm tree"], "'palm_tree' and 'palm tree' both read 'palm tree'"),
        (["cat", "__"], "'__' has nothing that can be read"),
    ],
)
def test_names_that_say_nothing(names, says):
    with pytest.raises(InputError, match=says):
        sentences(names, ["{}"])
