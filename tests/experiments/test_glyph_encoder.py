"""The encoder of the benchmark glyphs: made the same again, loaded like any other, with a head of clean pictures."""

import numpy as np
import pytest
import torch

from tunable_magmax.experiments import glyph_encoder
from tunable_magmax.experiments.glyph_encoder import glyph_base, glyph_head
from tunable_magmax.experiments.glyphs import FONTS, alphabets, clean_glyphs
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


def test_the_head_is_the_mean_of_the_clean_pictures(encoder):
    classes = [alphabets()[0].names[k] for k in (7, 2, 30)]
    head = glyph_head(encoder, classes)
    assert head.classes == tuple(classes)
    for row, pictures in zip(head.weight, clean_glyphs(classes), strict=True):
        assert len(pictures) == len(FONTS)
        embedded = embed_inputs(encoder, pictures)
        mean = (embedded / np.linalg.norm(embedded, axis=1, keepdims=True)).mean(axis=0)
        np.testing.assert_allclose(row / np.linalg.norm(row), mean / np.linalg.norm(mean), atol=1e-5)
