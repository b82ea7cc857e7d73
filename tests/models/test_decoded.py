"""Decoded once or each time: the same inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny

from tunable_magmax.data.samples import Samples, Unreadable
from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.prepared import Decoded

COUNT = 8


@pytest.fixture
def encoder(tmp_path):
    return load_encoder(tiny.save(tiny.build("vit"), tmp_path / "vit"), "cpu")


@pytest.fixture
def read():
    """The positions that were decoded, in order."""
    return []


@pytest.fixture
def samples(read):
    def load(positions):
        for position in positions:
            read.append(position)
            yield Unreadable("six.png", "cut off") if position == 6 else tiny.picture((9 * position, 50, 99), position)

    return Samples("somewhere", "image", COUNT, load, ("a", "b"), tuple(k % 2 for k in range(COUNT)))


def test_kept_or_not_it_is_the_same(encoder, samples, read):
    size = 3 * 16 * 16
    kept = Decoded(encoder, samples, range(6), keep=6 * size)
    fresh = Decoded(encoder, samples, range(6), keep=6 * size - 1)
    for wanted in ([3, 1], [0, 1, 5], [1]):
        one, other = kept.take(wanted), fresh.take(wanted)
        assert one.positions == other.positions == tuple(sorted(wanted))
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.batch(range(len(wanted))), other.batch(range(len(wanted))))
    assert read == [*range(6), 1, 3, 0, 1, 5, 1]


def test_nothing_is_decoded_before_it_is_asked_for(encoder, samples, read):
    Decoded(encoder, samples)
    assert read == []


@pytest.mark.parametrize("keep", [1 << 20, 1])
def test_unreadable_ones_are_left_out_and_told(encoder, samples, keep):
    decoded = Decoded(encoder, samples, keep=keep)
    with pytest.warns(UserWarning, match=r"1 of \d samples could not be read and were left out: six\.png \(cut off\)"):
        found = decoded.take([7, 6, 0])
    assert found.positions == (0, 7)
    with pytest.raises(InputError, match="1 of 1 samples cannot be read"):
        decoded.take([6])
    with pytest.raises(InputError, match=r"1 of \d samples cannot be read"):
        Decoded(encoder, samples, keep=keep, strict=True).take([6, 7])


def test_texts_are_always_kept(tmp_path):
    encoder = load_encoder(tiny.save(tiny.build("bert"), tmp_path / "bert"), "cpu")
    texts, asked = ["hello", "pay my bill"], []

    def load(positions):
        asked.append(list(positions))
        return (texts[k] for k in positions)

    decoded = Decoded(encoder, Samples("somewhere", "text", 2, load), keep=0)
    assert [len(decoded.take(wanted)) for wanted in ([0], [1], [0, 1])] == [1, 1, 2]
    assert asked == [[0, 1]]
