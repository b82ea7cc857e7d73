"""Samples in memory: lists, columns, rows of tables, data sets of torch and of Hugging Face; and what is none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import tiny
from torch.utils.data import Dataset

from tunable_magmax.data.samples import Unreadable
from tunable_magmax.data.source import as_samples, class_names_of
from tunable_magmax.errors import InputError

TEXTS, LABELS = ["hello", "bye", "hi"], ["greet", "part", "greet"]


class Rows(Dataset):
    """A data set of torch: no iterator, and no IndexError at its end."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, position):
        self.read.append(position)
        return self.rows[position % len(self.rows)]


class HuggingFace(Rows):
    """What `datasets.Dataset` offers of it: columns, features, and rows that a transform changes."""

    def __init__(self, rows):
        super().__init__(rows)
        self.features = {"text": None, "label": SimpleNamespace(names=["greet", "part"])}
        self.column_names = ["text", "label"]

    def with_format(self, kind):
        return HuggingFace(self.rows)

    def __getitem__(self, position):
        return [row[position] for row in self.rows] if isinstance(position, str) else super().__getitem__(position)


def rows(**columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def frame():
    import pandas

    return pandas.DataFrame({"id": [1, 2, 3], "text": TEXTS, "label": LABELS})


PAIRS = list(zip(TEXTS, LABELS, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: PAIRS,
        lambda: iter(PAIRS),
        lambda: rows(text=TEXTS, label=LABELS),
        lambda: Rows(PAIRS),
        lambda: HuggingFace(rows(text=TEXTS, label=LABELS)),
        frame,
    ],
)
def test_labelled_samples_of_every_kind(make):
    samples = as_samples(make())
    assert (samples.kind, samples.classes, samples.labels) == ("text", ("greet", "part"), (0, 1, 0))
    assert [*samples.load(range(3))] == TEXTS
    assert samples.digest() == as_samples(PAIRS).digest() != as_samples(PAIRS[::-1]).digest()


@pytest.mark.parametrize("make", [lambda: TEXTS, lambda: iter(TEXTS), lambda: frame()["text"], frame])
def test_inputs_of_every_kind(make):
    samples = as_samples(make(), "inputs")
    assert (samples.labels, [*samples.load([0, 2])]) == (None, ["hello", "hi"])


def test_labels_are_names_or_numbers_of_any_library():
    for labels in ([3, 1, 3], np.array([3, 1, 3]), torch.tensor([3, 1, 3]), (np.int64(k) for k in (3, 1, 3))):
        assert as_samples(labels, "labels").classes == ("1", "3")
    assert as_samples(frame()["label"], "labels").labels == (0, 1, 0)


def test_labels_are_read_without_the_inputs():
    data = HuggingFace(rows(text=TEXTS, label=LABELS))
    plain = HuggingFace(data.rows)
    data.with_format = lambda kind: plain
    samples = as_samples(data)
    assert set(plain.read) == {0}
    assert [*samples.load([2])] == ["hi"]
    assert set(plain.read) == {0, 2}
    assert class_names_of(data) == ("greet", "part")


def test_pictures_arrays_and_files(tmp_path):
    picture = tiny.picture((9, 0, 0))
    picture.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"?")
    pixels = np.asarray(picture)
    given = [picture, pixels, torch.tensor(pixels).permute(2, 0, 1), tmp_path / "a.png", tmp_path / "b.png"]
    samples = as_samples(given, "inputs")
    *read, bad = samples.load(range(5))
    assert samples.kind == "image"
    assert {image.tobytes() for image in read} == {picture.tobytes()}
    assert isinstance(bad, Unreadable)
    assert samples.digest() != as_samples(given[:4], "inputs").digest()


def test_what_a_processor_made_is_undone():
    picture = tiny.picture((200, 30, 0), 5)
    processor = SimpleNamespace(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4], rescale_factor=1 / 255)
    values = (np.asarray(picture) / 255 - processor.image_mean) / processor.image_std
    row = {"pixel_values": torch.tensor(values, dtype=torch.float32).permute(2, 0, 1), "labels": 1}
    (again,) = as_samples([row], "labelled", {1: "red"}, processor).load([0])
    assert again.tobytes() == picture.tobytes()
    with pytest.raises(InputError, match="float32"):
        as_samples([row])
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: " ".join(map(str, tokens)))
    tokens = Rows([{"input_ids": [4, 5], "label": 0}])
    assert [*as_samples(tokens, processor=tokenizer).load([0])] == ["4 5"]
    with pytest.raises(InputError, match="'input_ids'"):
        as_samples(tokens)


@pytest.mark.parametrize(
    ("role", "value", "found"),
    [
        ("inputs", [3], "input 1 is a int"),
        ("inputs", [np.zeros((4, 4, 7), np.uint8)], r"\[4, 4, 7\]"),
        ("inputs", [{"phrase": "hello"}], "'phrase'"),
        ("labelled", [("a", "b", "c")], "sample 1 is a tuple"),
        ("labelled", [{"text": "hello"}], "'text'"),
        ("labelled", [("hello", True)], "label 1 is True"),
        ("labelled", [("hello", "a"), ("bye", -100)], "label 2 is -100"),
    ],
)
def test_what_is_no_sample(role, value, found):
    with pytest.raises(InputError, match=found):
        as_samples(value, role)
