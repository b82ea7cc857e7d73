"""The readers on real data, where it is at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tunable_magmax.data.source import open_samples

SHARED = Path(__file__).resolve().parents[3] / "shared"


def needs(path):
    return pytest.mark.skipif(not (SHARED / path).exists(), reason=f"shared/{path} is not here")


@needs("data/cifar100")
def test_cifar100():
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    samples = open_samples(SHARED / "data" / "cifar100", split="test")
    assert len(samples) == 10_000
    assert samples.classes[:2] == ("apple", "aquarium_fish")
    assert np.bincount(samples.labels).tolist() == [100] * 100
    assert [image.size for image in samples.load([0, 9_999])] == [(32, 32)] * 2


@needs("data/clinc150/data_full.json")
def test_clinc150():
    samples = open_samples(SHARED / "data" / "clinc150" / "data_full.json")
    assert (len(samples), len(samples.classes)) == (15_000, 150)
    assert set(np.bincount(samples.labels)) == {100}


@needs("models/mini-clip")
@needs("data/cifar100")
def test_the_small_clip_and_its_head_are_better_than_chance():
    pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    from tunable_magmax.models.encoder import load_encoder
    from tunable_magmax.models.head import load_head

    model = SHARED / "models" / "mini-clip"
    encoder, head = load_encoder(model, "cpu"), load_head(model / "cifar100_head.safetensors")
    samples = open_samples(SHARED / "data" / "cifar100", split="test")
    chosen = list(range(80))
    predicted = head.probabilities(encoder.embed(list(samples.load(chosen)))).argmax(axis=1)
    # 15.7% of all test images; eight or more of 80 by luck alone has a chance below 1e-5.
    assert (predicted == np.array([samples.labels[k] for k in chosen])).sum() >= 8
