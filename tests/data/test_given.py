"""Samples in memory: lists, columns, rows of tables, data sets of torch; and values that are none of these."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny
from torch.utils.data import Dataset

from tunable_magmax.data.given import GivenSamples, given_inputs, given_labelled, given_labels
from tunable_magmax.data.samples import Unreadable
from tunable_magmax.errors import InputError

TEXTS, LABELS = ["hello", "bye", "hi"], ["greet", "part", "greet"]


class Pairs(Dataset):
    """A data set of torch: no iterator, and no IndexError at its end."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, position):
        return TEXTS[position % 3], LABELS[position % 3]


def frame():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame({"id": [1, 2, 3], "text": TEXTS, "label": LABELS})


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(zip(TEXTS, LABELS, strict=True)),
        lambda: zip(TEXTS, LABELS, strict=True),
        lambda: [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)],
        Pairs,
        frame,
    ],
)
def test_pairs_of_every_kind(make):
    samples = given_labelled(make())
    assert isinstance(samples, GivenSamples)
    assert (samples.kind, samples.classes, samples.labels) == ("text", ("greet", "part"), (0, 1, 0))
    assert [*samples.load(range(3))] == TEXTS
    assert samples.digest() == given_labelled(zip(TEXTS, LABELS, strict=True)).digest()


@pytest.mark.parametrize("make", [lambda: TEXTS, lambda: iter(TEXTS), lambda: frame()["text"], frame])
def test_inputs_of_every_kind(make):
    samples = given_inputs(make())
    assert (samples.labels, [*samples.load([0, 2])]) == (None, ["hello", "hi"])


def test_labels_are_names_or_numbers_of_any_library():
    for labels in ([3, 1, 3], np.array([3, 1, 3]), (np.int64(k) for k in (3, 1, 3))):
        assert given_labels(labels).classes == ("1", "3")
    assert given_labels(frame()["label"]).labels == (0, 1, 0)


def test_pictures_arrays_and_files(tmp_path):
    picture = tiny.picture((9, 0, 0))
    picture.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"?")
    given = [picture, np.asarray(picture), tmp_path / "a.png", tmp_path / "b.png"]
    samples = given_inputs(given)
    *read, bad = samples.load(range(4))
    assert samples.kind == "image"
    assert {image.tobytes() for image in read} == {picture.tobytes()}
    assert isinstance(bad, Unreadable)


@pytest.mark.parametrize(
    ("function", "value", "found"),
    [
        (given_inputs, 3, "int"),
        (given_inputs, {"text": TEXTS}, "dict"),
        (given_inputs, [], "empty"),
        (given_inputs, ["a", 3], "input 2 is a int"),
        (given_inputs, [np.zeros((4, 4, 7), np.uint8)], r"\[4, 4, 7\]"),
        (given_inputs, [{"phrase": "hello"}], "'phrase'"),
        (given_labelled, ["hello"], "pair 1 is a str"),
        (given_labelled, [("a", "b", "c")], "pair 1 is a tuple"),
        (given_labelled, [("hello", True)], "label 1 is True"),
        (given_labels, [1.5], "label 1 is 1.5"),
    ],
)
def test_what_is_no_sample(function, value, found):
    with pytest.raises(InputError, match=found):
        function(value)
