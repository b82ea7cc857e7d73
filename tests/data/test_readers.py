"""Readers of data: labels at once, inputs when asked for, and what cannot be read is counted and named."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from data.files import folder, written
from models import tiny

from tunable_magmax.data.samples import Unreadable, warn_unreadable
from tunable_magmax.data.source import open_labels, open_samples
from tunable_magmax.errors import InputError
from tunable_magmax.workflows.site import by_name


def test_class_folders(tmp_path):
    samples = open_samples(folder(tmp_path / "data", dog=2, cat=3, empty=0))
    assert samples.kind == "image"
    assert samples.classes == ("cat", "dog", "empty")
    assert samples.labels == (0, 0, 0, 1, 1)
    images = list(samples.load([1, 4]))
    assert [image.mode for image in images] == ["RGB", "RGB"]
    assert samples.positions_of(["dog"]) == samples.positions_of(["1"]) == [3, 4]
    assert open_labels(tmp_path / "data") == ["cat"] * 3 + ["dog"] * 2
    with pytest.raises(InputError, match=r"no class 'dgo' \(did you mean 'dog'\?\)"):
        samples.positions_of(["dgo"])
    with pytest.raises(InputError, match="holds no sample of 'empty'"):
        samples.positions_of(["empty"])


def test_a_split_is_a_subfolder(tmp_path):
    folder(tmp_path / "train", cat=1)
    folder(tmp_path / "test", cat=2)
    assert len(open_samples(tmp_path, split="test")) == 2


def test_loose_images_have_no_labels_and_unreadable_ones_are_named(tmp_path):
    folder(tmp_path, site=2)
    written(tmp_path / "site" / "bad.jpg", "not an image")
    whole = (tmp_path / "site" / "0.png").read_bytes()
    (tmp_path / "site" / "cut.png").write_bytes(whole[: len(whole) // 2])
    samples = open_samples(tmp_path / "site")
    assert samples.labels is None
    failed: dict[int, Unreadable] = {}
    batches = list(samples.batches(range(4), 1, failed))
    assert [where for where, _ in batches] == [[0], [1]]
    with pytest.warns(UserWarning, match=r"2 of 4 samples could not be read .*bad\.jpg \(not an image\), cut\.png"):
        warn_unreadable("site", failed, 4)
    with pytest.raises(InputError, match="2 of 2 samples cannot be read"):
        warn_unreadable("site", failed, 2)
    with pytest.raises(InputError, match="holds inputs without labels"):
        open_labels(tmp_path / "site")


def test_folders_that_are_no_data(tmp_path):
    with pytest.raises(InputError, match="holds no images"):
        open_samples(tmp_path)
    folder(tmp_path, cat=1)
    tiny.picture((0, 0, 0)).save(tmp_path / "loose.png")
    with pytest.raises(InputError, match="1 loose images as well as folders"):
        open_samples(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        open_samples(tmp_path / "none")
    with pytest.raises(InputError, match="unknown kind of data"):
        open_samples(written(tmp_path / "x.xml", "<x/>"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'id,text,label\n1,"pay, now",bill\n2,"two\nlines",card\n'),
        ("a.tsv", 'text\tintent\npay, now\tbill\n"two\nlines"\tcard\n'),
        ("a.jsonl", '{"text": "pay, now", "label": "bill"}\n\n{"text": "two\\nlines", "label": "card"}\n'),
        ("a.json", '[{"text": "pay, now", "label": "bill"}, {"label": "card", "text": "two\\nlines"}]'),
        ("a.json", json.dumps({"train": [["pay, now", "bill"], ["two\nlines", "card"]], "oos_train": []})),
    ],
)
def test_tables_of_texts(tmp_path, name, content):
    path = written(tmp_path / name, content)
    samples = open_samples(path)
    assert (samples.kind, samples.classes, samples.labels) == ("text", ("bill", "card"), (0, 1))
    assert list(samples.load([0, 1])) == ["pay, now", "two\nlines"]
    assert open_labels(path) == ["bill", "card"]


def test_columns_by_name(tmp_path):
    path = written(tmp_path / "a.csv", "phrase,topic\nhello,greeting\n")
    with pytest.raises(InputError, match="no column of texts among 'phrase', 'topic'"):
        open_samples(path)
    samples = open_samples(path, text_column="phrase", label_column="topic")
    assert samples.classes == ("greeting",)
    with pytest.raises(InputError, match="--text-column is 'prhase'"):
        open_samples(path, text_column="prhase")
    with pytest.raises(InputError, match=r"--label-column .*'phrase', 'topic'"):
        open_labels(path)


def test_lines(tmp_path):
    path = written(tmp_path / "a.txt", "\ufeffcat\n\n dog \n")
    assert open_labels(path) == ["cat", "dog"]
    assert list(open_samples(path).load([0, 1])) == ["cat", "dog"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", "\n\n", "holds no samples"),
        ("a.csv", "text,label\nhello,\n", "sample 1 has no 'label'"),
        ("a.jsonl", "{\n", "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.json", "[1]", "item 1 is not a JSON object"),
        ("a.json", "1", "expected a JSON list of objects, or a JSON object from splits"),
        ("a.json", '{"test": []}', "no split 'train'"),
        ("a.json", '{"train": [["x"]]}', r"sample 1 of 'train' is \['x'\]"),
    ],
)
def test_bad_tables(tmp_path, name, content, says):
    with pytest.raises(InputError, match=says):
        open_samples(written(tmp_path / name, content))


@pytest.fixture
def parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    import pyarrow.parquet as pq

    def make(name, values, labels, label="fine_label", names=("ant", "bee"), column="img"):
        told = {
            "info": {"features": {column: {"_type": "Image"}, label: {"names": list(names), "_type": "ClassLabel"}}}
        }
        table = arrow.table({column: values, label: labels}).replace_schema_metadata({"huggingface": json.dumps(told)})
        pq.write_table(table, tmp_path / name, row_group_size=2)
        return tmp_path / name

    return make


def encoded(seed):
    file = io.BytesIO()
    tiny.picture((seed, 0, 0), seed).save(file, format="png")
    return {"bytes": file.getvalue(), "path": None}


def test_parquet_of_images(tmp_path, parquet):
    parquet("train-00000-of-00002.parquet", [encoded(k) for k in range(3)], [0, 1, 0])
    parquet("train-00001-of-00002.parquet", [encoded(3), {"bytes": b"?", "path": None}], [1, 1])
    parquet("test-00000-of-00001.parquet", [encoded(9)], [0])
    samples = open_samples(tmp_path, split="train")
    assert (samples.kind, samples.classes, samples.labels) == ("image", ("ant", "bee"), (0, 1, 0, 1, 1))
    read = list(samples.load([0, 2, 3, 4]))
    for image, seed in zip(read, (0, 2, 3), strict=False):
        assert np.array_equal(np.asarray(image), np.asarray(tiny.picture((seed, 0, 0), seed)))
    assert read[3] == Unreadable("train-00001-of-00002.parquet, row 4", "not an image")
    with pytest.raises(InputError, match=r"several splits \(test, train\): choose one with --split"):
        open_samples(tmp_path)
    with pytest.raises(InputError, match="no parquet file starts with 'val'"):
        open_samples(tmp_path, split="val")


def test_parquet_of_texts(parquet):
    pytest.importorskip("pyarrow")
    samples = open_samples(
        parquet("a.parquet", ["hello", "bye"], [1, 0], label="label", column="text"), text_column="text"
    )
    assert (samples.kind, samples.classes, samples.labels) == ("text", ("ant", "bee"), (1, 0))
    assert list(samples.load([1])) == ["bye"]


def test_parquet_of_other_programs(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    import pyarrow.parquet as pq

    texts, labels = ["hello", "bye", "hi"], ["greet", "part", "greet"]
    columns = {"text": arrow.array(texts, arrow.large_string()), "label": arrow.array(labels).dictionary_encode()}
    pq.write_table(arrow.table(columns), tmp_path / "a.parquet")
    samples = open_samples(tmp_path / "a.parquet")
    assert (samples.classes, samples.labels, [*samples.load(range(3))]) == (("greet", "part"), (0, 1, 0), texts)
    assert open_labels(tmp_path / "a.parquet") == labels


def test_texts_are_never_taken_for_labels(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    import pyarrow.parquet as pq

    pq.write_table(arrow.table({"text": ["a", "b"], "label": [1.5, 2.0]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="--label-column"):
        open_labels(tmp_path / "a.parquet")
    pq.write_table(arrow.table({"topic": ["a", "b"]}), tmp_path / "b.parquet")
    assert open_labels(tmp_path / "b.parquet") == ["a", "b"]


def test_damage_inside_a_parquet_file_is_an_input_error(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(arrow.table({"text": ["hello"] * 99, "label": ["a", "b", "c"] * 33}), path, compression="zstd")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 80 + whole[84:])
    with pytest.raises(InputError, match="not a readable parquet file"):
        list(open_samples(path).load(range(99)))


def test_the_first_sample_that_lacks_a_cell_is_named(tmp_path):
    content = '{"text": "hello"}\n{"text": "bye", "label": "part"}\n'
    with pytest.raises(InputError, match="sample 1 has no 'label'"):
        open_samples(written(tmp_path / "a.jsonl", content))
    content = '{"text": "hello", "label": "greet"}\n{"text": ["bye"], "label": "part"}\n'
    with pytest.raises(InputError, match=r"sample 2 has no 'text' .found \['bye'\]"):
        open_samples(written(tmp_path / "a.jsonl", content))


def test_bad_parquet(tmp_path, parquet):
    with pytest.raises(InputError, match="not a readable parquet file"):
        open_samples(written(tmp_path / "b.parquet", "?"))
    with pytest.raises(InputError, match="sample 1 has 2 as 'fine_label', expected 0 to 1"):
        open_samples(parquet("a.parquet", [encoded(0)], [2]))


def test_indices_count_in_the_list_that_all_profiles_share(tmp_path):
    one, other = ("cat", "dog"), ("car", "bus")
    assert by_name(["1", "7"], [one, one], [()], tmp_path) == ["dog", "7"]
    assert by_name(["3"], [one, other], [("cat", "dog", "car", "bus")] * 2, tmp_path) == ["bus"]
    assert by_name(["1", "cat"], [one, other], [()], tmp_path) == ["1", "cat"]
    assert by_name(["1"], [("0", "1"), ("2",)], [()], tmp_path) == ["1"]
    with pytest.raises(InputError, match="an index could mean several; give class names"):
        by_name(["1"], [one, other], [()], tmp_path)


# -- tables as people have them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "\ufefftext,label\r\npay\u2028now,bill\r\nhello\x85you\x0c,card\r\n"),
        ("a.csv", "text;label\npay\u2028now;bill\nhello\x85you\x0c;card\n"),
        ("a.csv", "text\tlabel\npay\u2028now\tbill\nhello\x85you\x0c\tcard\n"),
        ("a.csv", " Text , LABEL\npay\u2028now, bill \nhello\x85you\x0c,card,\n"),
        ("a.jsonl", '{"text": "pay\u2028now", "label": "bill"}\n\n{"text": "hello\x85you\\f", "label": "card"}\n'),
    ],
)
def test_tables_of_other_programs(tmp_path, name, content):
    samples = open_samples(written(tmp_path / name, content))
    assert [*samples.load([0, 1])] == ["pay\u2028now", "hello\x85you\x0c"]
    assert (samples.classes, samples.labels) == (("bill", "card"), (0, 1))


def test_a_cell_of_megabytes(tmp_path):
    text = "hello " * 200_000
    limit = csv.field_size_limit()
    samples = open_samples(written(tmp_path / "a.csv", f'text,label\n"{text}",greeting\n'))
    assert ([*samples.load([0])], csv.field_size_limit()) == ([text], limit)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\nok,card\nhello, you,card\n", "line 3 has 3 cells, and the first line names 2 columns"),
        ("text\nhello, you\n", "line 2 has 2 cells, and the first line names 1 columns"),
        ("text,label,text\na,card,b\n", "several columns are called 'text'"),
        ("hello\nbye\n", "no column of texts among 'hello' in its first line: call it 'text'"),
        ("text,label\n  ,card\n", "sample 1 has no 'text'"),
    ],
)
def test_a_table_that_would_be_misread_is_refused(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        open_samples(written(tmp_path / "a.csv", content))


def test_a_list_of_labels_without_a_header_loses_none_in_silence(tmp_path):
    with pytest.raises(InputError, match="its first line is 'card', which is a label as well"):
        open_labels(written(tmp_path / "a.csv", "card\nbill\ncard\n"))


@pytest.mark.parametrize("labels", [["\N{SUPERSCRIPT TWO}", "\N{SUPERSCRIPT THREE}"], ["1" * 5000, "2" * 5000]])
def test_odd_numbers_are_names(tmp_path, labels):
    content = "text,label\n" + "".join(f"a,{label}\n" for label in labels)
    samples = open_samples(written(tmp_path / "a.csv", content))
    assert samples.classes == tuple(sorted(labels))
    assert by_name(labels, [("cat", "dog")], [()], "a.csv") == labels
    with pytest.raises(InputError, match="has no class"):
        samples.positions_of(["9" * 5000])
