"""ImageNet-R: names from ids, one order however folders are named, and a split that a seed decides."""

from __future__ import annotations

import pytest

pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from models import tiny

from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark
from tunable_magmax.errors import InputError

IDS = {"n01443537": "goldfish", "n07742313": "Granny_Smith", "n02102318": "cocker_spaniels"}


def made(root, names, count=10):
    root.mkdir(exist_ok=True)
    (root / "README.txt").write_text("ImageNet-R\n\n" + "".join(f"{key} {name}\n" for key, name in IDS.items()))
    for k, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for n in range(count):
            tiny.picture((20 * n, 60 * k, 0), n).save(root / name / f"art_{n}.png")
    return root


def opened(data, **given):
    return open_benchmark(BenchmarkOptions.read({"name": "imagenet-r", "data": str(data), "tasks": 3, **given}, data))


def test_both_ways_to_name_folders_give_one_benchmark(tmp_path):
    by_id = opened(made(tmp_path / "ids", IDS))
    by_name = opened(made(tmp_path / "names", IDS.values()))
    assert by_id.classes == by_name.classes == ("Granny_Smith", "cocker_spaniels", "goldfish")
    assert by_id.prompts == "imagenet-r"
    assert by_id.facts["digest"] == by_name.facts["digest"]


def test_a_fifth_of_all_images_is_for_testing_and_the_seed_says_which(tmp_path):
    data = made(tmp_path / "imagenet-r", IDS.values(), 20)
    # The folder around the distribution's own folder will do.
    one, same, other = opened(tmp_path), opened(data), opened(data, split_seed=1)
    assert (len(one.train), len(one.test)) == (48, 12)
    assert one.facts["digest"] == same.facts["digest"] != other.facts["digest"]
    assert (one.facts["split"], one.facts["split_seed"], one.facts["test_share"]) == ("drawn from all", 0, 0.2)
    seen = [
        image.tobytes() + bytes([label])
        for samples in (one.train, one.test)
        for image, label in zip(samples.load(range(len(samples))), samples.labels, strict=True)
    ]
    assert len(set(seen)) == 60


def test_a_split_that_is_there_is_kept(tmp_path):
    made(tmp_path / "train", IDS, 3)
    made(tmp_path / "test", IDS, 2)
    (tmp_path / "test" / "README.txt").rename(tmp_path / "README.txt")
    benchmark = opened(tmp_path)
    assert (len(benchmark.train), len(benchmark.test), benchmark.facts["split"]) == (9, 6, "as found")


def test_names_of_other_ids(tmp_path):
    made(tmp_path, ["n01443537", "n00000001", "n00000002"])
    with pytest.raises(InputError, match=r"no class name for the folder n00000001, n00000002.* README\.txt"):
        opened(tmp_path)
    (tmp_path / "README.txt").write_text("ImageNet-R\n\nn00000001 first thing\nn00000002 second\nn01443537 fish\n")
    assert opened(tmp_path).classes == ("first_thing", "fish", "second")
    (tmp_path / "names.txt").write_text("n01443537 fish\nn00000001 one\nn00000002 two\n")
    assert opened(tmp_path, class_names="names.txt").classes == ("fish", "one", "two")


def test_what_is_no_imagenet_r(tmp_path):
    with pytest.raises(InputError, match="no images in class folders"):
        opened(tmp_path)
    made(tmp_path, ["n01443537", "lion"])
    with pytest.raises(InputError, match="no class name for the folder lion"):
        opened(tmp_path)
    with pytest.raises(InputError, match="does not exist; 'data' says where the data lies"):
        opened(tmp_path / "none")
