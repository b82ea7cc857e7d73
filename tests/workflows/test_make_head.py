"""Head files from class names and from samples."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models.tiny import build, picture, save

from tunable_magmax.errors import InputError
from tunable_magmax.models.encoder import load_encoder
from tunable_magmax.models.head import load_head
from tunable_magmax.workflows.head import HeadSource, make_head, read_names


def test_class_means_of_a_folder_and_the_command(tmx, tmp_path):
    model = save(build("vit"), tmp_path / "vit")
    pictures = {"red": [picture((220, 30, 30), k) for k in range(3)], "blue": [picture((30, 30, 220), 5)]}
    for label, images in pictures.items():
        (tmp_path / "data" / label).mkdir(parents=True)
        for k, image in enumerate(images):
            image.save(tmp_path / "data" / label / f"{k}.png")
    out = tmp_path / "head.safetensors"
    done = tmx("head", model, "--data", tmp_path / "data", "-o", out)
    assert (done.code, done.out) == (0, f"{out}: 2 classes, rows of width 16\n"), done.err
    found = load_head(out)
    rows = load_encoder(model, "cpu").embed(pictures["red"])
    mean = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).sum(axis=0)
    assert np.allclose(found.weight[found.classes.index("red")], 20 * mean / np.linalg.norm(mean), atol=1e-4)
    assert "exists already" in tmx("head", model, "--data", tmp_path / "data", "-o", out).err


def test_class_names_are_sentences_of_texts(tmp_path):
    model = save(build("bert"), tmp_path / "bert")
    (tmp_path / "names.txt").write_text("good bye\nhello\n")
    made = make_head(model, HeadSource(names=str(tmp_path / "names.txt"), device="cpu"))
    assert made.classes == ("good bye", "hello")
    assert read_names("a,b ,") == ["a", "b"]


def test_what_is_refused(tmp_path):
    own = save(build("vit-classifier"), tmp_path / "own")
    with pytest.raises(InputError, match="has a classifier of its own, over 3 classes"):
        make_head(own, HeadSource())
    with pytest.raises(InputError, match="Give either --names"):
        make_head(own, HeadSource(names="cat", data=tmp_path))
    with pytest.raises(InputError, match="has no text tower"):
        make_head(own, HeadSource(names="cat,dog", device="cpu"))
