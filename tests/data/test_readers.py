"""Readers of data: labels at once, inputs when asked for, and what cannot be read is counted and named."""

import io
import json

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as pq
import pytest
from data.files import folder, written
from models import tiny

from tunable_magmax.data.samples import Unreadable, by_name, warn_unreadable
from tunable_magmax.data.source import find_splits, open_labels, open_samples
from tunable_magmax.errors import InputError


def test_class_folders(tmp_path):
    samples = open_samples(folder(tmp_path / "data", dog=2, cat=3, empty=0))
    assert samples.kind == "image"
    assert samples.classes == ("cat", "dog", "empty")
    assert samples.labels == (0, 0, 0, 1, 1)
    assert [image.mode for image in samples.load([1, 4])] == ["RGB", "RGB"]
    assert open_labels(tmp_path / "data") == ["cat"] * 3 + ["dog"] * 2


def test_loose_images_have_no_labels_and_unreadable_ones_are_named(tmp_path):
    folder(tmp_path, site=2)
    written(tmp_path / "site" / "bad.jpg", "not an image")
    whole = (tmp_path / "site" / "0.png").read_bytes()
    (tmp_path / "site" / "cut.png").write_bytes(whole[: len(whole) // 2])
    samples = open_samples(tmp_path / "site")
    assert samples.labels is None
    failed: dict[int, Unreadable] = {}
    assert [where for where, _ in samples.batches(range(4), 1, failed)] == [[0], [1]]
    with pytest.warns(UserWarning, match=r"2 of 4 samples .*bad\.jpg \(not an image\), cut\.png"):
        warn_unreadable("site", failed, 4)
    with pytest.raises(InputError, match="2 of 2 samples"):
        warn_unreadable("site", failed, 2)
    with pytest.raises(InputError, match="without labels"):
        open_labels(tmp_path / "site")


def test_folders_that_are_no_data(tmp_path):
    with pytest.raises(InputError, match=r"holds no images .* give a table"):
        open_samples(tmp_path)
    folder(tmp_path, cat=1)
    tiny.picture((0, 0, 0)).save(tmp_path / "loose.png")
    with pytest.raises(InputError, match="1 loose images as well as folders"):
        open_samples(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        open_samples(tmp_path / "none")
    with pytest.raises(InputError, match="unknown kind of data"):
        open_samples(written(tmp_path / "x.xml", "<x/>"))


# -- splits -----------------------------------------------------------------------------------------------------------


def test_splits_of_folders_tables_and_json(tmp_path):
    folder(tmp_path / "folders" / "train", cat=1)
    folder(tmp_path / "folders" / "test", cat=2)
    written(tmp_path / "tables" / "train.csv", "text,label\na,cat\n")
    written(tmp_path / "tables" / "test.jsonl", '{"text": "a", "label": "cat"}\n' * 2)
    rows = [["a", "cat"], ["b", "cat"]]
    written(tmp_path / "one.json", json.dumps({"train": rows[:1], "test": rows, "oos": []}))
    for name in ("folders", "tables", "one.json"):
        assert {"train", "test"} <= set(find_splits(tmp_path / name))
        assert len(open_samples(tmp_path / name, "test")) == 2
        assert open_labels(tmp_path / name, "train") == ["cat"]
        for split in (None, "tset"):
            with pytest.raises(InputError, match="train"):
                open_samples(tmp_path / name, split)
    written(tmp_path / "tables" / "._train.parquet", "what another system left")
    assert set(find_splits(tmp_path / "tables")) == {"train", "test"}
    whole = written(tmp_path / "site.csv", "text\na\n")
    assert find_splits(whole) == find_splits(folder(tmp_path / "classes", train=1, bus=1)) == {}
    with pytest.raises(InputError, match="leave --split out"):
        open_samples(whole, "test")


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'id,text,label\n1,"pay, now",bill\n2,"two\nlines",card\n'),
        ("a.tsv", 'text\tintent\npay, now\tbill\n"two\nlines"\tcard\n'),
        ("a.jsonl", '{"text": "pay, now", "label": "bill"}\n\n{"text": "two\\nlines", "label": "card"}\n'),
        ("a.json", '[{"text": "pay, now", "label": "bill"}, {"label": "card", "text": "two\\nlines"}]'),
        ("a.json", json.dumps({"train": [["pay, now", "bill"], ["two\nlines", "card"]]})),
    ],
)
def test_tables_of_texts(tmp_path, name, content):
    path = written(tmp_path / name, content)
    samples = open_samples(path)
    assert (samples.kind, samples.classes, samples.labels) == ("text", ("bill", "card"), (0, 1))
    assert list(samples.load([0, 1])) == ["pay, now", "two\nlines"]
    assert open_labels(path) == ["bill", "card"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "\ufefftext,label\r\npay\u2028now,bill\r\nhello\x85you\x0c,card\r\n"),
        ("a.csv", "text;label\npay\u2028now;bill\n\nhello\x85you\x0c;card\n"),
        ("a.csv", "text\tlabel\npay\u2028now\tbill\nhello\x85you\x0c\tcard\n"),
        ("a.csv", " Text , LABEL\npay\u2028now, bill \nhello\x85you\x0c,card\n"),
        ("a.jsonl", '{"text": "pay\u2028now", "label": "bill"}\n\n{"text": "hello\x85you\\f", "label": "card"}\n'),
    ],
)
def test_tables_of_other_programs(tmp_path, name, content):
    samples = open_samples(written(tmp_path / name, content))
    assert [*samples.load([0, 1])] == ["pay\u2028now", "hello\x85you\x0c"]
    assert (samples.classes, samples.labels) == (("bill", "card"), (0, 1))


def test_cells_stay_as_they_are(tmp_path):
    long = "hello " * 400_000
    rows = f'text,label\n007,1\nNA,02\n1e5,2\n2024-01-01,true\n"{long}",null\n'
    samples = open_samples(written(tmp_path / "a.csv", rows))
    assert [*samples.load(range(5))] == ["007", "NA", "1e5", "2024-01-01", long]
    assert open_labels(tmp_path / "a.csv") == ["1", "02", "2", "true", "null"]


def test_columns_by_name(tmp_path):
    path = written(tmp_path / "a.csv", "phrase,topic\nhello,greeting\n")
    assert open_samples(path, text_column="phrase", label_column="topic").classes == ("greeting",)
    for columns in ({}, {"text_column": "prhase"}, {"text_column": "phrase", "label_column": "tpoic"}):
        with pytest.raises(InputError, match="'phrase', 'topic'"):
            open_samples(path, **columns)
    with pytest.raises(InputError, match=r"no column of labels among 'phrase', 'topic': .* --label-column"):
        open_samples(path, text_column="phrase").require_labels()
    with pytest.raises(InputError, match="'phrase', 'topic'"):
        open_labels(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "\n\n", "holds no samples"),
        ("a.csv", "", "holds no samples"),
        ("a.csv", 'text,label\n"hello,card\nbye,card\n', "not a table"),
        ("a.csv", "text,label\n", "holds no samples"),
        ("a.csv", "text,label\nhello,\n", "sample 1 has '' as 'label'"),
        ("a.csv", "text,label\n  ,card\n", "sample 1 has '  ' as 'text'"),
        ("a.csv", "text,label\nok,card\nhello, you,card\n", "row 2 .*: hello, you,card"),
        ("a.csv", "text,label,text\na,card,b\n", "'text'"),
        ("a.csv", "hello\nbye\n", "'hello'"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.jsonl", '{"text": "hello"}\n{"text": "bye", "label": "part"}\n', "sample 1 has None as 'label'"),
        ("a.jsonl", '{"text": "hello"}\n{"text": ["bye"]}\n', r"sample 2 has \['bye'\] as 'text'"),
        ("a.json", "[1]", "item 1"),
        ("a.json", "1", "JSON list"),
        ("a.json", '{"train": [["x"]]}', r"item 1 is \['x'\]"),
    ],
)
def test_bad_tables(tmp_path, name, content, says):
    with pytest.raises(InputError, match=says):
        open_samples(written(tmp_path / name, content))


def test_bytes_that_are_no_text(tmp_path):
    for name in ("a.csv", "a.txt", "a.json"):
        (tmp_path / name).write_bytes(b'["text","l\xff"]\n"\xfe",a\n')
        with pytest.raises(InputError, match=name):
            open_samples(tmp_path / name)


def test_a_list_of_labels_without_a_header_loses_none_in_silence(tmp_path):
    with pytest.raises(InputError, match="its first line is 'card', which is a label as well"):
        open_labels(written(tmp_path / "a.csv", "card\nbill\ncard\n"))
    with pytest.raises(InputError, match="no column of labels among 'text'"):
        open_labels(written(tmp_path / "b.csv", "text\npay my bill\n"))
    assert open_labels(written(tmp_path / "c.txt", "card\nbill\n")) == ["card", "bill"]


# -- parquet ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path):
    def make(name, values, labels):
        about = {"info": {"features": {"img": {"_type": "Image"}, "fine_label": {"names": ["ant", "bee"]}}}}
        table = arrow.table({"img": values, "fine_label": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
        pq.write_table(table, tmp_path / name, row_group_size=2)
        return tmp_path / name

    return make


def encoded(seed):
    file = io.BytesIO()
    tiny.picture((seed, 0, 0), seed).save(file, format="png")
    return {"bytes": file.getvalue(), "path": None}


def test_parquet_of_images(tmp_path, parquet):
    parquet("train-00000-of-00002.parquet", [encoded(k) for k in range(3)], [0, 1, 0])
    parquet("train-00001-of-00002.parquet", [encoded(3), {"bytes": b"?", "path": None}, None], [1, 1, 0])
    parquet("test-00000-of-00001.parquet", [encoded(9)], [0])
    samples = open_samples(tmp_path, split="train")
    assert (samples.kind, samples.classes, samples.labels) == ("image", ("ant", "bee"), (0, 1, 0, 1, 1, 0))
    *read, bad, none = samples.load([0, 2, 3, 4, 5])
    for image, seed in zip(read, (0, 2, 3), strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(tiny.picture((seed, 0, 0), seed)))
    assert bad == Unreadable("train-00001-of-00002.parquet, row 2", "not an image")
    assert none == Unreadable("train-00001-of-00002.parquet, row 3", "empty")
    for split in (None, "val"):
        with pytest.raises(InputError, match="train"):
            open_samples(tmp_path, split)


def test_parquet_of_other_programs(tmp_path):
    texts, labels = ["hello", "bye", "hi"], ["greet", "part", "greet"]
    columns = {"text": arrow.array(texts, arrow.large_string()), "label": arrow.array(labels).dictionary_encode()}
    pq.write_table(arrow.table(columns), tmp_path / "a.parquet")
    samples = open_samples(tmp_path / "a.parquet")
    assert (samples.classes, samples.labels, [*samples.load(range(3))]) == (("greet", "part"), (0, 1, 0), texts)
    pq.write_table(arrow.table({"topic": ["a", "b"]}), tmp_path / "b.parquet")
    assert open_labels(tmp_path / "b.parquet") == ["a", "b"]
    pq.write_table(arrow.table({"text": ["a", "b"], "label": [1.0, None]}), tmp_path / "c.parquet")
    for read in (open_samples, open_labels):  # pandas makes such labels where one is missing
        with pytest.raises(InputError, match=r"sample 1 has 1\.0 as 'label'"):
            read(tmp_path / "c.parquet")


def test_damage_inside_a_parquet_file_is_an_input_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(arrow.table({"text": ["hello"] * 99, "label": ["a", "b", "c"] * 33}), path, compression="zstd")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 80 + whole[84:])
    with pytest.raises(InputError, match="not a readable parquet file"):
        list(open_samples(path).load(range(99)))
    with pytest.raises(InputError, match="not a readable parquet file"):
        open_samples(written(tmp_path / "b.parquet", "?"))


def test_labels_outside_the_class_names(parquet):
    with pytest.raises(InputError, match="sample 1 has 2 as 'fine_label', expected 0 to 1"):
        open_samples(parquet("a.parquet", [encoded(0)], [2]))


# -- labels -----------------------------------------------------------------------------------------------------------


def test_indices_count_in_the_list_that_all_profiles_share():
    one, other = ("cat", "dog"), ("car", "bus")
    assert by_name(["1", "7"], [one, one], "labels") == ["dog", "7"]
    assert by_name(["3"], [one, other], "labels", ("cat", "dog", "car", "bus")) == ["bus"]
    assert by_name(["1", "cat"], [one, other], "labels") == ["1", "cat"]
    assert by_name(["1"], [("0", "1"), ("2",)], "labels") == ["1"]
    with pytest.raises(InputError, match="an index could mean several"):
        by_name(["1"], [one, other], "labels")
