"""Benchmarks: every class in one task, every sample on one side, and errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from data.files import folder, written
from models import tiny

from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError

SHARED = Path(__file__).resolve().parents[3] / "shared"


def opened(root, **given):
    return open_benchmark(BenchmarkOptions.read(given, root))


def table(path, labels, each=5, **more):
    rows = [{"text": f"{label} number {k}", "label": label} | more for label in labels for k in range(each)]
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_image_folders_with_a_split(tmp_path):
    folder(tmp_path / "train", ant=3, bee=4, cat=5)
    folder(tmp_path / "test", bee=2, cat=1, ant=1)
    benchmark = opened(tmp_path, name="images", data=".", tasks=2, order=["cat", "ant", "bee"])
    assert (benchmark.kind, benchmark.scenario, benchmark.prompts) == ("image", "class", None)
    assert [task.name for task in benchmark.tasks] == ["task-01", "task-02"]
    assert [task.classes for task in benchmark.tasks] == [(2, 0), (1,)]
    assert [(len(task.train), len(task.test)) for task in benchmark.tasks] == [(8, 2), (4, 2)]
    assert benchmark.facts["sizes"] == "3 classes in 2 tasks: 1 of 2 and 1 of 1"
    assert benchmark.facts["task_sizes"] == [2, 1]
    assert benchmark.facts["order"] == ["cat", "ant", "bee"]
    assert benchmark.facts["split"] == "as found"
    json.dumps(benchmark.facts)


def test_a_folder_is_split_inside_each_class(tmp_path):
    folder(tmp_path, ant=10, bee=20, cat=2)
    benchmark = opened(tmp_path, name="images", data=".", tasks=3, split_seed=5)
    counts = [(len(task.train), len(task.test)) for task in benchmark.tasks]
    assert counts == [(8, 2), (16, 4), (1, 1)]
    assert benchmark.facts["split"] == "drawn from each class"
    assert (benchmark.facts["split_seed"], benchmark.facts["test_share"]) == (5, 0.2)
    seen = [
        image.tobytes() for samples in (benchmark.train, benchmark.test) for image in samples.load(range(len(samples)))
    ]
    assert len(set(seen)) == 32
    again = opened(tmp_path, name="images", data=".", tasks=3, split_seed=5)
    other = opened(tmp_path, name="images", data=".", tasks=3, split_seed=6)
    assert again.facts["digest"] == benchmark.facts["digest"] != other.facts["digest"]


def test_train_without_test_and_a_class_called_train(tmp_path):
    folder(tmp_path / "a" / "train", ant=5)
    with pytest.raises(InputError, match="has train/, but neither test/ nor val/ nor validation/; add one, or give"):
        opened(tmp_path, name="images", data="a", tasks=1)
    folder(tmp_path / "b", train=5, bus=5)
    assert opened(tmp_path, name="images", data="b", tasks=2).classes == ("bus", "train")
    folder(tmp_path / "a" / "val", ant=2)
    assert opened(tmp_path, name="images", data="a", tasks=1).facts["files"] == ["train", "val"]


def test_samples_of_a_task_are_of_its_classes(tmp_path):
    folder(tmp_path, ant=6, bee=6, cat=6, dog=6)
    benchmark = opened(tmp_path, name="images", data=".", tasks=2, order={"seed": 1})
    for samples, side in ((benchmark.train, "train"), (benchmark.test, "test")):
        assert samples.classes == benchmark.classes
        positions = [position for task in benchmark.tasks for position in getattr(task, side)]
        assert sorted(positions) == list(range(len(samples)))
        for task in benchmark.tasks:
            assert {samples.labels[position] for position in getattr(task, side)} == set(task.classes)


def test_named_groups_leave_other_classes_out(tmp_path):
    folder(tmp_path, ant=5, bee=5, cat=5, dog=5, empty=0)
    benchmark = opened(tmp_path, name="images", data=".", tasks={"pets": ["dog", "cat"], "insects": ["ant"]})
    assert benchmark.classes == ("ant", "cat", "dog")
    assert [(task.name, task.classes) for task in benchmark.tasks] == [("pets", (2, 1)), ("insects", (0,))]
    assert benchmark.facts["left_out"] == ["bee", "empty"]
    assert (len(benchmark.train), len(benchmark.test)) == (12, 3)
    first = benchmark.tasks[1].train[0]
    assert benchmark.train.labels[first] == 0
    assert next(benchmark.train.load([first])).getpixel((0, 0)) is not None
    with pytest.raises(InputError, match=r"'pets' names 'dgo' \(did you mean 'dog'\?\), which is no class"):
        opened(tmp_path, name="images", data=".", tasks={"pets": ["dgo"]})


def test_the_limit_for_each_class(tmp_path):
    table(tmp_path / "a.jsonl", "abc", each=50)
    benchmark = opened(tmp_path, name="texts", data="a.jsonl", tasks=3, per_class={"train": 7, "test": 2})
    assert [(len(task.train), len(task.test)) for task in benchmark.tasks] == [(7, 2)] * 3
    only = opened(tmp_path, name="texts", data="a.jsonl", tasks=3, per_class={"train": 7})
    assert [(len(task.train), len(task.test)) for task in only.tasks] == [(7, 10)] * 3


def test_texts_in_two_files_and_in_one(tmp_path):
    table(tmp_path / "both" / "train.jsonl", ["b", "a", "c"])
    written(tmp_path / "both" / "test.csv", "text,label\nx,c\ny,a\nz,b\n")
    benchmark = opened(tmp_path, name="texts", data="both", tasks=3)
    assert benchmark.classes == ("a", "b", "c")
    assert benchmark.test.labels == (2, 0, 1)
    assert [list(benchmark.test.load(task.test)) for task in benchmark.tasks] == [["y"], ["z"], ["x"]]
    table(tmp_path / "one.jsonl", ["b", "a", "c"], each=10)
    one = opened(tmp_path, name="texts", data="one.jsonl", tasks=1, test_share=0.3)
    assert (len(one.train), len(one.test)) == (21, 9)
    assert set(one.train.load(range(21))).isdisjoint(one.test.load(range(9)))


def test_a_json_list_is_split_by_a_draw_and_has_no_splits_to_ask_for(tmp_path):
    rows = [{"text": f"{label} {k}", "label": label} for label in "ab" for k in range(5)]
    path = written(tmp_path / "all.json", json.dumps(rows))
    benchmark = opened(tmp_path, name="texts", data="all.json", tasks=2)
    train, test = ({*part.load(range(len(part)))} for part in (benchmark.train, benchmark.test))
    assert (len(train), len(test), train & test) == (8, 2, set())
    with pytest.raises(InputError, match="has no splits, but 'train'"):
        opened(tmp_path, name="clinc150", data="all.json", tasks=2)
    with pytest.raises(InputError, match="has no splits, but 'test'"):
        open_samples(path, "test")


def test_texts_in_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    import pyarrow.parquet as pq

    for split in ("train", "test"):
        rows = {"text": [f"{split} {k}" for k in range(6)], "label": ["a", "b"] * 3, "site": ["x"] * 3 + ["y"] * 3}
        pq.write_table(arrow.table(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    benchmark = opened(tmp_path, name="texts", data=".", tasks=2)
    assert list(benchmark.train.load(benchmark.tasks[1].train)) == ["train 1", "train 3", "train 5"]
    domains = opened(tmp_path, name="texts", data=".", scenario="domain", domain_column="site")
    assert [(task.name, task.train) for task in domains.tasks] == [("x", (0, 1, 2)), ("y", (3, 4, 5))]


def test_domains_of_images(tmp_path):
    for name in ("sketch", "photo", "art"):
        folder(tmp_path / name, ant=5, bee=10)
    benchmark = opened(tmp_path, name="images", data=".", scenario="domain", order=["photo", "art", "sketch"])
    assert [(task.name, task.domain, task.classes) for task in benchmark.tasks] == [
        (name, name, (0, 1)) for name in ("photo", "art", "sketch")
    ]
    assert [(len(task.train), len(task.test)) for task in benchmark.tasks] == [(12, 3)] * 3
    assert benchmark.facts["sizes"] == "3 domains of 2 classes"
    for task in benchmark.tasks:
        assert {benchmark.train.domains[position] for position in task.train} == {task.name}
    limited = opened(tmp_path, name="images", data=".", scenario="domain", per_class={"train": 2, "test": 1})
    assert [task.name for task in limited.tasks] == ["art", "photo", "sketch"]
    assert [(len(task.train), len(task.test)) for task in limited.tasks] == [(4, 2)] * 3
    with pytest.raises(InputError, match=r"order: not an order of the 3 domains \(missing: 'photo', 'sketch'\)"):
        opened(tmp_path, name="images", data=".", scenario="domain", order=["art"])
    with pytest.raises(InputError, match=r"tasks is 2, but .* has 3 \(art, photo, sketch\); drop tasks"):
        opened(tmp_path, name="images", data=".", scenario="domain", tasks=2)


def test_domains_of_images_with_a_split(tmp_path):
    for side, count in (("train", 4), ("test", 2)):
        for name in ("photo", "art"):
            folder(tmp_path / side / name, ant=count, bee=count)
    benchmark = opened(tmp_path, name="images", data=".", scenario="domain", order={"seed": 0})
    assert sorted(task.name for task in benchmark.tasks) == ["art", "photo"]
    assert [(len(task.train), len(task.test)) for task in benchmark.tasks] == [(8, 4)] * 2
    folder(tmp_path / "test" / "sketch", ant=1)
    with pytest.raises(InputError, match="no training sample is of the domain 'sketch'"):
        opened(tmp_path, name="images", data=".", scenario="domain")
    tiny.picture((0, 0, 0)).save(tmp_path / "train" / "art" / "loose.png")
    with pytest.raises(InputError, match="holds 1 loose images: with domains every image lies in DOMAIN/CLASS/"):
        opened(tmp_path, name="images", data=".", scenario="domain")


def test_a_domain_may_lack_a_class_and_it_is_said(tmp_path):
    folder(tmp_path / "photo", ant=5, bee=5)
    folder(tmp_path / "art", bee=5)
    benchmark = opened(tmp_path, name="images", data=".", scenario="domain")
    assert [(task.name, task.classes) for task in benchmark.tasks] == [("art", (0, 1)), ("photo", (0, 1))]
    assert [task["absent"] for task in benchmark.facts["tasks"]] == [["ant"], []]


def test_domains_of_texts(tmp_path):
    parts = [table(tmp_path / f"{site}.jsonl", "ab", each=5, site=site).read_text() for site in ("north", "south")]
    written(tmp_path / "all.jsonl", "".join(parts))
    benchmark = opened(tmp_path, name="texts", data="all.jsonl", scenario="domain", domain_column="site")
    assert [(task.domain, len(task.train), len(task.test)) for task in benchmark.tasks] == [
        ("north", 8, 2),
        ("south", 8, 2),
    ]
    with pytest.raises(InputError, match=r"domain.column is 'sites' \(did you mean 'site'\?\)"):
        opened(tmp_path, name="texts", data="all.jsonl", scenario="domain", domain_column="sites")


def test_clinc150(tmp_path):
    pairs = [[f"say {label} {k}", label] for label in ("pay_bill", "book_flight") for k in range(3)]
    content = {"train": pairs, "val": pairs[:1], "test": pairs[::-1], "oos_train": [["x", "oos"]]}
    written(tmp_path / "data_full.json", json.dumps(content))
    for data in (".", "data_full.json"):
        benchmark = opened(tmp_path, name="clinc150", data=data, tasks=2)
        assert benchmark.classes == ("book_flight", "pay_bill")
        assert (benchmark.kind, benchmark.prompts) == ("text", "clinc150")
        assert next(iter(benchmark.test.load(benchmark.tasks[0].test))) == "say book_flight 2"
    content["test"].append(["strange", "pay_bil"])
    written(tmp_path / "data_full.json", json.dumps(content))
    says = r"1 labels are outside the 2 classes of .*: 'pay_bil' \(did you mean 'pay_bill'\?\); correct them, or add"
    with pytest.raises(InputError, match=says):
        opened(tmp_path, name="clinc150", data=".", tasks=2)
    with pytest.raises(InputError, match="found 0 JSON files"):
        opened(tmp_path, name="clinc150", data=folder(tmp_path / "other", ant=1), tasks=2)


def test_names_for_labels_and_lists_of_classes(tmp_path):
    table(tmp_path / "a.jsonl", ["0", "1", "2"])
    written(tmp_path / "names.json", '{"0": "zebra", "1": "ant", "2": "bee"}')
    renamed = opened(tmp_path, name="texts", data="a.jsonl", tasks=3, class_names="names.json")
    assert renamed.classes == ("zebra", "ant", "bee")
    written(tmp_path / "list.txt", "zebra\nant\nbee\n")
    listed = opened(tmp_path, name="texts", data="a.jsonl", tasks=3, class_names="list.txt")
    assert (listed.classes, listed.train.labels) == (renamed.classes, renamed.train.labels)
    written(tmp_path / "list.txt", "zebra\nant\n")
    with pytest.raises(InputError, match=r"1 labels are outside the 2 classes of .*list\.txt: '2'; correct them"):
        opened(tmp_path, name="texts", data="a.jsonl", tasks=2, class_names="list.txt")
    written(tmp_path / "list.txt", "zebra\nant\nbee\nyak\n")
    with pytest.raises(InputError, match=r"no training sample of 1 of the 4 classes: 'yak'; add samples, remove"):
        opened(tmp_path, name="texts", data="a.jsonl", tasks=2, class_names="list.txt")
    written(tmp_path / "names.json", '{"0": "zebra", "1": "ant"}')
    with pytest.raises(InputError, match=r"names\.json: no name for 1 labels of .*: '2'"):
        opened(tmp_path, name="texts", data="a.jsonl", tasks=2, class_names="names.json")


def test_empty_classes(tmp_path):
    folder(tmp_path / "train", ant=2, bee=0, cat=2)
    folder(tmp_path / "test", ant=1, bee=1, cat=0)
    with pytest.raises(InputError, match=r"no training sample of 1 of the 3 classes: 'bee'; add samples"):
        opened(tmp_path, name="images", data=".", tasks=1)
    with pytest.raises(InputError, match="no test sample for 'b' of the 2 tasks; every task needs some"):
        opened(tmp_path, name="images", data=".", tasks={"a": ["ant"], "b": ["cat"]})
    benchmark = opened(tmp_path, name="images", data=".", tasks={"a": ["ant", "cat"]})
    assert benchmark.facts["untested"] == ["cat"]


def test_data_of_another_kind(tmp_path):
    table(tmp_path / "a.jsonl", "ab")
    folder(tmp_path / "pictures", ant=2)
    with pytest.raises(InputError, match="expected a folder of images, or parquet; texts are read by name: texts"):
        opened(tmp_path, name="images", data="a.jsonl", tasks=1)
    with pytest.raises(InputError, match=r"no train table; expected train\.\*"):
        opened(tmp_path, name="texts", data="pictures", tasks=1)
    with pytest.raises(InputError, match=r"expected CLINC150 as JSON .* read by name: texts"):
        opened(tmp_path, name="clinc150", data="a.jsonl", tasks=1)
    with pytest.raises(InputError, match="expected CIFAR-100 as parquet"):
        opened(tmp_path, name="cifar100", data="pictures", tasks=1)
    with pytest.raises(InputError, match=r"none does not exist; 'data' says where"):
        opened(tmp_path, name="images", data="none", tasks=1)
    written(tmp_path / "b.csv", "text\nhello\n")
    with pytest.raises(InputError, match=r"holds no labels, which training needs: .* \(or give label_column\)"):
        opened(tmp_path, name="texts", data="b.csv", tasks=1)
    written(tmp_path / "c.csv", "phrase,topic\nhello,greeting\n")
    with pytest.raises(InputError, match="text_column"):
        opened(tmp_path, name="texts", data="c.csv", tasks=1)
    with pytest.raises(InputError, match="tasks is 3, but there are only 2 classes"):
        opened(tmp_path, name="texts", data="a.jsonl", tasks=3)


def test_a_text_parquet_is_no_cifar(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: train)")
    import pyarrow.parquet as pq

    for split in ("train", "test"):
        pq.write_table(arrow.table({"text": ["x", "y"], "label": ["a", "b"]}), tmp_path / f"{split}.parquet")
    with pytest.raises(InputError, match="holds texts, but the benchmark cifar100 is of images"):
        opened(tmp_path, name="cifar100", data=".", tasks=2)


def test_glyphs():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")
    options = BenchmarkOptions.read({"name": "glyphs", "classes": 7, "train": 3, "test": 2, "tasks": 3}, Path())
    assert options.record()["seed"] == 0
    benchmark = open_benchmark(options)
    assert [len(task.train) for task in benchmark.tasks] == [9, 6, 6]
    assert benchmark.facts["sizes"] == "7 classes in 3 tasks: 1 of 3 and 2 of 2"
    with pytest.raises(InputError, match=r"data does not apply to glyphs, which takes .* classes, train, test, seed"):
        BenchmarkOptions.read({"name": "glyphs", "tasks": 3, "data": "x"}, Path())


@pytest.mark.skipif(not (SHARED / "data/clinc150").exists(), reason="shared/data/clinc150 is not here")
def test_the_real_clinc150():
    benchmark = opened(SHARED, name="clinc150", data="data/clinc150", tasks=15, order={"seed": 3})
    assert (len(benchmark.train), len(benchmark.test), len(benchmark.classes)) == (15_000, 4_500, 150)
    assert {(len(task.train), len(task.test), len(task.classes)) for task in benchmark.tasks} == {(1_000, 300, 10)}
    uneven = opened(SHARED, name="clinc150", data="data/clinc150", tasks=4)
    assert uneven.facts["sizes"] == "150 classes in 4 tasks: 2 of 38 and 2 of 37"
