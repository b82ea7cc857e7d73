"""Benchmarks: every class in one task, every sample on one side, and errors that name what is wrong."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
from data.files import folder, written
from models import tiny

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.data.data_sets import DATA_SETS, DataSet, Split, read_section
from tunable_magmax.data.samples import text_samples
from tunable_magmax.errors import InputError

ROOT = Path("/runs")


def opened(root, **section):
    return open_benchmark(read_section(section, root))


def table(path, labels, each=5):
    rows = [{"text": f"{label} number {k}", "label": label} for label in labels for k in range(each)]
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def counts(benchmark):
    return [(len(task.train), len(task.test)) for task in benchmark.tasks]


# -- the section ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section",
    [
        {"name": "cifar100", "data": "cifar", "tasks": 20, "order": {"file": "class_orders.json", "name": "A"}},
        {"name": "imagenet-r", "data": "/data/r", "tasks": 10, "split_seed": 4, "test_share": 0.25},
        {"name": "clinc150", "data": "c", "tasks": {"money": ["pay", 3], "trip": ["book"]}},
        {"name": "texts", "data": "t", "tasks": 2, "order": {"seed": 5}, "text_column": "a", "label_column": "b"},
        {"name": "glyphs", "tasks": 2, "classes": 7},
    ],
)
def test_the_record_is_complete_and_can_be_read(section):
    data_set = read_section(section, ROOT)
    record = json.loads(json.dumps(asdict(data_set)))
    assert read_section(record, Path("/elsewhere")) == data_set
    assert {*section, "split_seed"} <= set(record)
    assert Path(record.get("data", "/")).is_absolute()
    assert "file" not in record["order"] or record["order"]["file"] == "/runs/class_orders.json"


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "cifar"}, r"name is 'cifar': .* \(did you mean 'cifar100'\?\)"),
        ({}, "name is None"),
        ({"name": "images", "data": "x", "tasks": True}, "tasks is True"),
        ({"name": "images", "data": "x", "tasks": {"a": []}}, r"tasks is {'a': \[\]}"),
        ({"name": "images", "data": "x", "tasks": {"a": "ant"}}, "tasks is {'a': 'ant'}"),
        ({"name": "images", "data": "x", "tasks": {"a": ["b"]}, "order": {"seed": 1}}, "leave order out"),
        ({"name": "glyphs", "tasks": 3, "data": "x"}, "'data'"),
    ],
)
def test_each_problem(section, says):
    with pytest.raises(InputError, match=says):
        read_section(section, ROOT)


@dataclass(frozen=True, kw_only=True)
class Toy(DataSet):
    """Texts that repeat their class."""

    name: Literal["toy"] = "toy"
    each: int = 2

    def open(self):
        labels = [name for name in ("no", "perhaps", "yes") for _ in range(self.each)]
        samples = text_samples("toy", [f"I say {label}" for label in labels], labels)
        return Split(samples, samples)


def test_a_class_and_a_line_are_all_that_a_data_set_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(DATA_SETS, "toy", Toy)
    benchmark = opened(tmp_path, name="toy", tasks=3, each=4)
    assert benchmark.classes == ("no", "perhaps", "yes")
    assert [task.train for task in benchmark.tasks] == [tuple(range(4 * t, 4 * t + 4)) for t in range(3)]


# -- splits and tasks -------------------------------------------------------------------------------------------------


def test_image_folders_with_a_split(tmp_path):
    folder(tmp_path / "train", ant=3, bee=4, cat=5)
    folder(tmp_path / "test", bee=2, cat=1, ant=1)
    benchmark = opened(tmp_path, name="images", data=".", tasks=2, order=["cat", "ant", "bee"])
    assert benchmark.train.kind == "image"
    assert [task.name for task in benchmark.tasks] == ["task-01", "task-02"]
    assert [task.classes for task in benchmark.tasks] == [(2, 0), (1,)]
    assert counts(benchmark) == [(8, 2), (4, 2)]
    assert benchmark.facts["classes"] == {"task-01": ["cat", "ant"], "task-02": ["bee"]}
    json.dumps(benchmark.facts)


def test_a_folder_is_split_inside_each_class(tmp_path):
    folder(tmp_path, ant=10, bee=20, cat=2)
    benchmark = opened(tmp_path, name="images", data=".", tasks=3, split_seed=5)
    assert counts(benchmark) == [(8, 2), (16, 4), (1, 1)]
    seen = [image.tobytes() for part in (benchmark.train, benchmark.test) for image in part.load(range(len(part)))]
    assert len(set(seen)) == 32
    again = opened(tmp_path, name="images", data=".", tasks=3, split_seed=5)
    other = opened(tmp_path, name="images", data=".", tasks=3, split_seed=6)
    assert again.facts["digest"] == benchmark.facts["digest"] != other.facts["digest"]
    for samples, side in ((benchmark.train, "train"), (benchmark.test, "test")):
        assert samples.classes == benchmark.classes
        assert sorted(p for task in benchmark.tasks for p in getattr(task, side)) == list(range(len(samples)))
        for task in benchmark.tasks:
            assert {samples.labels[p] for p in getattr(task, side)} == set(task.classes)


def test_train_without_test_and_a_class_called_train(tmp_path):
    folder(tmp_path / "a" / "train", ant=5)
    assert counts(opened(tmp_path, name="images", data="a", tasks=1)) == [(4, 1)]
    folder(tmp_path / "b", train=5, bus=5)
    assert opened(tmp_path, name="images", data="b", tasks=2).classes == ("bus", "train")
    folder(tmp_path / "a" / "val", ant=2)
    assert counts(opened(tmp_path, name="images", data="a", tasks=1)) == [(5, 2)]


def test_named_tasks_have_the_classes_that_are_listed(tmp_path):
    folder(tmp_path, ant=5, cat=5, dog=5)
    benchmark = opened(tmp_path, name="images", data=".", tasks={"pets": ["dog", 1], "insects": ["ant"]})
    assert [(task.name, task.classes) for task in benchmark.tasks] == [("pets", (2, 1)), ("insects", (0,))]
    assert counts(benchmark) == [(8, 2), (4, 1)]
    for insects, says in (["anti"], "'anti'"), (["ant", "cat"], "named twice: 'cat'"), ([0, 1], "'cat'"):
        with pytest.raises(InputError, match=says):
            opened(tmp_path, name="images", data=".", tasks={"pets": ["dog", "cat"], "insects": insects})


def test_texts_in_two_files_with_some_held_out(tmp_path):
    table(tmp_path / "both" / "train.jsonl", ["b", "a", "c"], each=50)
    written(tmp_path / "both" / "test.csv", "text,label\nx,c\ny,a\nz,b\n")
    benchmark = opened(tmp_path, name="texts", data="both", tasks=3, holdout=0.2)
    for task in benchmark.tasks:
        assert (len(task.train), len(task.held), set(task.train) & set(task.held)) == (40, 10, set())
    assert (benchmark.classes, benchmark.test.labels) == (("a", "b", "c"), (2, 0, 1))
    assert [list(benchmark.test.load(task.test)) for task in benchmark.tasks] == [["y"], ["z"], ["x"]]


def test_clinc150(tmp_path):
    pairs = [[f"say {label} {k}", label] for label in ("pay_bill", "book_flight") for k in range(3)]
    content = {"train": pairs, "val": pairs[:1], "test": pairs[::-1], "oos_train": [["x", "oos"]]}
    written(tmp_path / "data_full.json", json.dumps(content))
    benchmark = opened(tmp_path, name="clinc150", data="data_full.json", tasks=2)
    assert benchmark.classes == ("book_flight", "pay_bill")
    assert next(iter(benchmark.test.load(benchmark.tasks[0].test))) == "say book_flight 2"
    content["test"].append(["strange", "pay_bil"])
    written(tmp_path / "data_full.json", json.dumps(content))
    with pytest.raises(InputError, match=r"labels that are outside .*: 'pay_bil' \(did you mean"):
        opened(tmp_path, name="clinc150", data="data_full.json", tasks=2)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "cifar100", "data": "a.jsonl", "tasks": 1}, "not a readable archive"),
        ({"name": "images", "data": "none", "tasks": 1}, "none does not exist"),
        ({"name": "texts", "data": "b.csv", "tasks": 1}, "no column of labels"),
        ({"name": "texts", "data": "c.csv", "tasks": 1}, "text_column"),
        ({"name": "texts", "data": "a.jsonl", "tasks": 3}, "tasks is 3, but there are only 2 classes"),
    ],
)
def test_what_is_no_data_set(tmp_path, section, says):
    table(tmp_path / "a.jsonl", "ab")
    written(tmp_path / "b.csv", "text\nhello\n")
    written(tmp_path / "c.csv", "phrase,topic\nhello,greeting\n")
    folder(tmp_path / "pictures", ant=2)
    with pytest.raises(InputError, match=says):
        opened(tmp_path, **section)


def test_empty_classes(tmp_path):
    folder(tmp_path / "train", ant=2, bee=0, cat=2)
    folder(tmp_path / "test", ant=1, bee=1, cat=0)
    with pytest.raises(InputError, match="no training sample of 'bee'"):
        opened(tmp_path, name="images", data=".", tasks=1)
    (tmp_path / "train" / "bee").rmdir()
    (tmp_path / "test" / "bee" / "0.png").unlink()
    with pytest.raises(InputError, match="no test sample for 'b' of the 2 tasks"):
        opened(tmp_path, name="images", data=".", tasks={"a": ["ant"], "b": ["cat"]})
    assert counts(opened(tmp_path, name="images", data=".", tasks={"a": ["ant", "cat"]})) == [(4, 1)]


# -- ImageNet-R -------------------------------------------------------------------------------------------------------

IDS = {"n01443537": "goldfish", "n07742313": "Granny_Smith", "n02102318": "cocker_spaniels"}


def imagenet_r(root, names, count=10):
    for k, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for n in range(count):
            tiny.picture((20 * n, 60 * k, 0), n).save(root / name / f"art_{n}.png")
    written(root / "README.txt", "ImageNet-R\n\n" + "".join(f"{key} {name}\n" for key, name in IDS.items()))
    return root


def test_both_ways_to_name_folders_give_one_benchmark(tmp_path):
    section = {"name": "imagenet-r", "data": ".", "tasks": 3}
    by_id = opened(imagenet_r(tmp_path / "ids", IDS), **section)
    by_name = opened(imagenet_r(tmp_path / "names", IDS.values()), **section)
    assert by_id.classes == by_name.classes == ("Granny_Smith", "cocker_spaniels", "goldfish")
    assert by_id.facts["digest"] == by_name.facts["digest"]
    assert (len(by_id.train), len(by_id.test)) == (24, 6)
    images = [image.tobytes() for part in (by_id.train, by_id.test) for image in part.load(range(len(part)))]
    assert len(set(images)) == 30


def test_what_is_no_imagenet_r(tmp_path):
    with pytest.raises(InputError, match="holds no images"):
        opened(imagenet_r(tmp_path, []), name="imagenet-r", data=".", tasks=1)
