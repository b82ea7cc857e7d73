"""Prepared inputs are what the encoder's own preparation makes of the same samples; forward passes in threads."""

import json
import threading

import numpy as np
import pytest
import torch
from models import tiny

from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.models import prepared as prepared_module
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.prepared import SMALLEST_PART, embed_inputs, embed_prepared, in_parallel, prepare

IMAGE_KINDS = ["clip", "clip-vision", "siglip", "siglip-vision", "vit"]
TEXTS = ["hello", "pay my bills", "good bye good bye good bye", "card", "my good bill pay card", "good"]


def load(kind, folder):
    return load_encoder(tiny.save(tiny.build(kind), folder / kind), "cpu")


def samples(values, labels=True):
    kind = "text" if isinstance(values[0], str) else "image"

    def read(positions):
        assert list(positions) == sorted(positions)
        return (values[position] for position in positions)

    given = tuple(k % 3 for k in range(len(values))) if labels else None
    return Samples("somewhere", kind, len(values), read, ("a", "b", "c"), given)


def pictures(count):
    return [tiny.picture((20 * k % 256, 90, 255 - 20 * k % 256), k, 17 + 5 * k) for k in range(count)]


@pytest.mark.parametrize("chunk", [2, 256])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_pixels_are_those_of_the_encoders_processor(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(prepared_module, "IMAGES_AT_ONCE", chunk)
    encoder, images = load(kind, tmp_path), pictures(7)
    found = prepare(encoder, samples(images))
    assert (len(found), found.positions) == (7, tuple(range(7)))
    assert found.inputs["pixels"].dtype == torch.uint8
    torch.testing.assert_close(found.batch(range(7)), encoder.prepare_images(images), atol=1e-6, rtol=1e-6)
    rows = [5, 0, 5]
    torch.testing.assert_close(
        found.batch(torch.tensor(rows)), encoder.prepare_images([images[row] for row in rows]), atol=1e-6, rtol=1e-6
    )
    np.testing.assert_allclose(embed_prepared(encoder, found, batch=3), embed_inputs(encoder, images), atol=1e-5)


def test_what_a_processor_leaves_out_is_left_out(tmp_path):
    encoder = load("vit", tmp_path)
    path = tmp_path / "vit" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_normalize": False}))
    plain = load_encoder(tmp_path / "vit", "cpu")
    images = pictures(3)
    found = prepare(plain, samples(images)).batch([0, 1, 2])
    torch.testing.assert_close(found, plain.prepare_images(images), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found, encoder.prepare_images(images) * 0.25 + 0.5, atol=1e-5, rtol=0)


def test_tokens_are_equal_up_to_padding(tmp_path):
    encoder = load("bert", tmp_path)
    found = prepare(encoder, samples(TEXTS))
    for rows in ([0], [3, 1], [4, 2, 0, 5], range(6)):
        expected = encoder.prepare_texts([TEXTS[row] for row in rows])
        batch = found.batch(rows)
        assert batch.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(batch[name], values), name
    np.testing.assert_allclose(embed_prepared(encoder, found, batch=4), embed_inputs(encoder, TEXTS), atol=1e-5)


def test_tokens_padded_on_the_left_are_not_cut_off(tmp_path):
    encoder = load("bert", tmp_path)
    encoder.tokenizer.padding_side = "left"
    found = prepare(encoder, samples(TEXTS))
    expected = encoder.prepare_texts(TEXTS)
    for row in range(len(TEXTS)):
        kept = found.batch([row])
        mask = expected["attention_mask"][row].bool()
        assert torch.equal(kept["input_ids"][kept["attention_mask"].bool()], expected["input_ids"][row][mask])


@pytest.mark.parametrize("threads", [1, 3])
def test_what_cannot_be_read_is_left_out_and_the_rest_stays_in_order(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(prepared_module, "IMAGES_AT_ONCE", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    encoder = load("vit", tmp_path)
    images: list = pictures(9)
    images[2] = Unreadable("two.png", "not an image")
    images[7] = Unreadable("seven.png", "cut off")
    told = []
    says = r"somewhere: 2 of 9 samples could not be read and were left out: two\.png \(not an image\), seven\.png \(cut"
    with pytest.warns(UserWarning, match=says) as caught:
        found = prepare(encoder, samples(images), progress=lambda *given: told.append(given))
    assert len(caught) == 1
    assert told[-1] == ("reading", 9, 9)
    assert found.positions == (0, 1, 3, 4, 5, 6, 8)
    expected = encoder.prepare_images([images[position] for position in found.positions])
    torch.testing.assert_close(found.batch(range(7)), expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(InputError, match="2 of 2 samples cannot be read"):
        prepare(encoder, samples(images), [2, 7])


def test_embedding_is_without_dropout(tmp_path):
    encoder = load("bert", tmp_path)
    found = prepare(encoder, samples(TEXTS, labels=False))
    encoder.module.train()
    one, other = embed_prepared(encoder, found), embed_prepared(encoder, found)
    assert np.array_equal(one, other)


def test_parts_of_a_forward_pass_are_in_order_and_each_has_one_thread():
    def work(rows):
        return rows, torch.get_num_threads()

    before, told = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        seen = list(in_parallel(work, 5 * SMALLEST_PART + 1, 2 * SMALLEST_PART, torch.device("cpu")))
        later = threading.Thread(target=lambda: told.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (torch.get_num_threads(), told) == (2, [2])  # the caller's number is kept
    finally:
        torch.set_num_threads(before)
    assert [row for rows, _ in seen for row in rows] == list(range(5 * SMALLEST_PART + 1))
    assert {threads for _, threads in seen} == {1}
    assert max(len(rows) for rows, _ in seen) == SMALLEST_PART
