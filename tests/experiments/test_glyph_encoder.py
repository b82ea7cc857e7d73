"""The encoder of the benchmark glyphs: made the same again, loaded like any other, with a head of clean pictures."""

import numpy as np
import pytest
import torch

from tunable_magmax.experiments import glyph_encoder
from tunable_magmax.experiments.glyph_encoder import glyph_base, glyph_head
from tunable_magmax.experiments.glyphs import FONTS, SIZE, alphabets, clean_glyphs, glyph_samples
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.prepared import embed_inputs


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr(glyph_encoder, "PICTURES_EACH", 2)
    monkeypatch.setattr(glyph_encoder, "STEPS", 3)


@pytest.fixture
def encoder(tmp_path):
    return load_encoder(glyph_base(tmp_path / "base"), "cpu")


def test_one_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    before = torch.get_rng_state()
    files = [(glyph_base(tmp_path / str(k), seed=seed) / "model.safetensors") for k, seed in enumerate((0, 0, 1))]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert (torch.get_rng_state() == before).all()  # the caller's random numbers are left alone


def test_it_loads_like_any_other_and_has_no_pooler(encoder):
    assert encoder.pooling == "first"
    assert not any("pooler" in name for name, _ in encoder.module.named_parameters())
    picture = next(glyph_samples(classes=2, train=1, test=1)[0].load([0]))
    assert embed_inputs(encoder, [picture]).shape == (1, encoder.dim)


def test_its_image_processor_prepares_pictures_as_in_pre_training(encoder):
    picture = next(glyph_samples(classes=2, train=1, test=1)[0].load([0]))
    grey = torch.from_numpy(np.array(picture)[:, :, 0])
    expected = glyph_encoder._pixels(grey[None])
    assert expected.shape == (1, 3, SIZE, SIZE)
    torch.testing.assert_close(encoder.prepare_images([picture]), expected)


def test_the_head_is_the_mean_of_the_clean_pictures(encoder):
    classes = [alphabets()[0].names[k] for k in (7, 2, 30)]
    head = glyph_head(encoder, classes)
    assert head.classes == tuple(classes)
    for row, pictures in zip(head.weight, clean_glyphs(classes), strict=True):
        assert len(pictures) == len(FONTS)
        embedded = embed_inputs(encoder, pictures)
        mean = (embedded / np.linalg.norm(embedded, axis=1, keepdims=True)).mean(axis=0)
        np.testing.assert_allclose(row / np.linalg.norm(row), mean / np.linalg.norm(mean), atol=1e-5)
