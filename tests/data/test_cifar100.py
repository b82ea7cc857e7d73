"""CIFAR-100 as an archive and as parquet is the same benchmark, and its pickles run nothing."""

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.data.data_sets import read_section
from tunable_magmax.errors import InputError

NAMES = ("ant_hill", "bee", "cat", "dog")
COUNTS = {"train": 24, "test": 8}


def content(split):
    """Pixels [n, 3072] and labels of one side."""
    count = COUNTS[split]
    pixels = np.random.default_rng(len(split)).integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, [k % len(NAMES) for k in range(count)]


def string(value):
    short = len(value) < 256
    return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value


def pickled(value):
    """A value as python 2 pickles it: byte strings, and NumPy under its old name."""
    if isinstance(value, bytes):
        return string(value)
    if isinstance(value, int):
        return b"K" + bytes([value])
    if isinstance(value, list):
        return b"](" + b"".join(map(pickled, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(pickled(key) + pickled(item) for key, item in value.items()) + b"u"
    sizes = b"".join(b"M" + struct.pack("<H", size) for size in value.shape)
    kind = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNN"
    kind += b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    return made + b"(K\x01" + sizes + b"\x86" + kind + b"\x89" + string(value.tobytes()) + b"tb"


def python2(value):
    return b"\x80\x02" + pickled(value) + b"."


def python_files():
    files = {"meta": python2({b"fine_label_names": [name.encode() for name in NAMES]})}
    for split in COUNTS:
        pixels, labels = content(split)
        about = {b"filenames": [b"picture.png"] * len(labels), b"batch_label": b"training batch 1 of 1"}
        files[split] = python2({**about, b"fine_labels": labels, b"coarse_labels": [0] * len(labels), b"data": pixels})
    return files


def packed(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, value in files.items():
            info = tarfile.TarInfo(f"cifar-100-python/{name}")
            info.size = len(value)
            archive.addfile(info, io.BytesIO(value))
    return path


def pictures(split):
    pixels, labels = content(split)
    for row, label in zip(pixels, labels, strict=True):
        yield Image.fromarray(np.ascontiguousarray(row.reshape(3, 32, 32).transpose(1, 2, 0))), label


def parquet_files(folder):
    import pyarrow as arrow
    import pyarrow.parquet as pq

    about = json.dumps({"info": {"features": {"fine_label": {"names": list(NAMES), "_type": "ClassLabel"}}}})
    folder.mkdir(parents=True)
    for split in COUNTS:
        images, labels = [], []
        for image, label in pictures(split):
            file = io.BytesIO()
            image.save(file, format="png")
            images.append({"bytes": file.getvalue(), "path": None})
            labels.append(label)
        table = arrow.table({"img": images, "fine_label": labels, "coarse_label": [0] * len(labels)})
        table = table.replace_schema_metadata({"huggingface": about})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", row_group_size=7)
    return folder


FORMS = {
    "archive": lambda root: packed(root / "cifar-100-python.tar.gz", python_files()),
    "folder of an archive": lambda root: packed(root / "cifar-100-python.tar.gz", python_files()).parent,
    "parquet": parquet_files,
}


def opened(data, **section):
    return open_benchmark(read_section({"name": "cifar100", "data": str(data), "tasks": 2, **section}, Path()))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_pictures(tmp_path, form):
    benchmark = opened(FORMS[form](tmp_path / "data"))
    assert (benchmark.classes, benchmark.train.kind) == (NAMES, "image")
    for split, samples in (("train", benchmark.train), ("test", benchmark.test)):
        found = zip(samples.load(range(len(samples))), samples.labels, strict=True)
        assert [(image.tobytes(), label) for image, label in found] == [
            (image.tobytes(), label) for image, label in pictures(split)
        ]
        assert next(samples.load([3])).tobytes() == list(pictures(split))[3][0].tobytes()
    assert [task.classes for task in benchmark.tasks] == [(0, 1), (2, 3)]


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["train", "meta"])
def test_a_pickle_that_would_run_something_is_refused_and_does_not(tmp_path, name):
    mark = tmp_path / "ran"
    harmful = pickle.dumps({"fine_labels": Harm(mark)}, protocol=2)
    data = packed(tmp_path / "data.tar.gz", python_files() | {name: harmful})
    with pytest.raises(InputError, match=rf"data\.tar\.gz: .*{name} is refused"):
        opened(data)
    assert not mark.exists()
    pickle.loads(harmful)
    assert mark.exists(), "the pickle is harmless, so this test shows nothing"


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
        b"\x80\x02cnumpy\nload\n.",
        # BUILD on the class itself: sets an attribute of whatever NumPy's name stands for.
        b"\x80\x02cnumpy\nndarray\nN}X\x05\x00\x00\x00stateK\x01s\x86b0}.",
    ],
)
def test_only_arrays_are_on_the_list_and_no_pickle_changes_the_next(tmp_path, code):
    with pytest.raises(InputError, match="not a readable archive"):
        opened(packed(tmp_path / "a.tar.gz", python_files() | {"train": code}))
    assert next(opened(packed(tmp_path / "b.tar.gz", python_files())).test.load([0])) == next(pictures("test"))[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": b"\x80\x02"}, "EOFError"),
        ({"train": pickle.dumps({"data": 1}, protocol=4)}, "'fine_labels'"),
        ({"train": pickle.dumps([1], protocol=2)}, "'list'"),
        ({"meta": pickle.dumps({"names": ["a"]}, protocol=2)}, "'fine_label_names'"),
        ({"test": pickle.dumps({"fine_labels": [1]}, protocol=2)}, "'data'"),
        ({"test": python2({b"fine_labels": [1, 2], b"data": np.zeros((3, 3072), np.uint8)})}, "2 labels.* 3 pictures"),
        ({"test": python2({b"fine_labels": [1, 9], b"data": np.zeros((2, 3072), np.uint8)})}, "2 labels, of 4 classes"),
        *(
            ({"test": pickle.dumps({"fine_labels": [1, 2], "data": values}, protocol=4)}, says)
            for values, says in [
                (np.zeros((2, 3072), np.int64), "2 labels.* 16 pictures"),
                (np.asfortranarray(np.zeros((2, 3072), np.uint8)), "test has an array that is not of bytes by rows"),
                (np.array([None]), "test has an array that is not of bytes by rows"),
            ]
        ),
    ],
)
def test_bad_archives(tmp_path, change, says):
    with pytest.raises(InputError, match=says):
        opened(packed(tmp_path / "cifar-100-python.tar.gz", python_files() | change))


def test_what_is_no_archive(tmp_path):
    path = packed(tmp_path / "a.tar.gz", {"train": python_files()["train"]})
    with pytest.raises(InputError, match=r"not a readable archive.*'meta'"):
        opened(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="not a readable archive"):
        opened(path)
