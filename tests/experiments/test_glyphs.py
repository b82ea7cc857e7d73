"""The built-in benchmark: characters are different, pictures depend on their own numbers only; and its encoder."""

import numpy as np
import pytest
import torch

from tunable_magmax.errors import InputError
from tunable_magmax.experiments import glyph_encoder
from tunable_magmax.experiments.glyph_encoder import glyph_base
from tunable_magmax.experiments.glyphs import (
    CHARACTERS,
    FONTS,
    OTHERS,
    SITE_STREAM,
    alphabets,
    glyph_pictures,
    glyph_samples,
)


def pixels(samples, positions):
    return [np.asarray(picture) for picture in samples.load(positions)]


def test_all_fonts_hold_every_character():
    import matplotlib
    from matplotlib.ft2font import FT2Font

    for font in FONTS:
        held = FT2Font(f"{matplotlib.get_data_path()}/fonts/ttf/{font}.ttf").get_charmap()
        assert {ord(character) for character in CHARACTERS + OTHERS} <= held.keys()


def test_no_two_characters_are_drawn_alike_in_any_font():
    masks = np.concatenate([alphabet.masks for alphabet in alphabets()])
    for font in range(len(FONTS)):
        assert len({mask.tobytes() for mask in masks[:, font]}) == len(masks)


def test_more_classes_than_characters():
    most = len(alphabets()[0].characters)
    glyph_samples(classes=most, train=1, test=1)
    with pytest.raises(InputError, match=str(most)):
        glyph_samples(classes=most + 1)


def test_pictures_do_not_depend_on_what_else_is_read():
    train, _ = glyph_samples(classes=10, train=6, test=2, seed=3)
    together = pixels(train, range(len(train)))
    again, _ = glyph_samples(classes=10, train=6, test=2, seed=3)
    for position in (41, 7, 59):
        [alone] = pixels(again, [position])
        assert (alone == together[position]).all()


def test_seeds_parts_and_sites_hold_other_pictures():
    train, test = glyph_samples(classes=5, train=4, test=4)
    other, _ = glyph_samples(classes=5, train=4, test=4, seed=1)
    sites = [glyph_pictures(train.labels, 5, 0, SITE_STREAM + k) for k in range(2)]
    drawn = [picture.tobytes() for samples in (train, test, other, *sites) for picture in pixels(samples, range(20))]
    assert len(set(drawn)) == len(drawn)


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr(glyph_encoder, "PICTURES_EACH", 2)
    monkeypatch.setattr(glyph_encoder, "STEPS", 3)


def test_one_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    before = torch.get_rng_state()
    files = [(glyph_base(tmp_path / str(k), seed=seed) / "model.safetensors") for k, seed in enumerate((0, 0, 1))]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert (torch.get_rng_state() == before).all()  # the caller's random numbers are left alone
