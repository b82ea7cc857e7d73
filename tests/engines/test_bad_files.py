"""Bad input gets a clear error and leaves nothing behind; odd but good input works."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sequences import SMALL, StateDict, raw, save_sequence, save_sharded, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.state_dicts import merge_state_dicts
from tunable_magmax.workflows.convert import convert_checkpoint


def values(seed: int = 0) -> StateDict:
    random = torch.Generator().manual_seed(seed)
    return {
        "head.bias": torch.randn(5, generator=random),
        "head.weight": torch.randn(5, 7, generator=random),
        "trunk.weight": torch.randn(7, 9, generator=random),
    }


class Place:
    """A folder with a base and two tasks that a test can spoil, and the merge of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = [values(t) for t in range(3)]
        self.paths = [folder / f"{name}.safetensors" for name in ("base", "one", "two")]
        self.out = folder / "out"
        for path, tensors in zip(self.paths, self.models, strict=True):
            save_file(tensors, path)

    def put(self, k: int, tensors: StateDict) -> None:
        self.models[k] = tensors
        save_file(tensors, self.paths[k])

    def merge(self, **options) -> MergeReport:
        return merge_checkpoints(self.paths[0], self.paths[1:], self.out, **options)

    def refused(self, *values: str, **options) -> InputError:
        """The merge is refused with an error that names all the values, and nothing is left behind."""
        before = self.listing()
        with pytest.raises(InputError) as caught:
            self.merge(**options)
        for value in values:
            assert value in str(caught.value)
        assert self.listing() == before
        return caught.value

    def listing(self) -> dict[str, float]:
        return {str(path.relative_to(self.folder)): path.stat().st_mtime_ns for path in self.folder.rglob("*")}

    def result(self) -> StateDict:
        return load_file(self.out / "model.safetensors")


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


# -- names and shapes -------------------------------------------------------------------------------------------------


def test_all_that_does_not_match_is_named_at_once(place) -> None:
    one, two = dict(place.models[1]), dict(place.models[2])
    one["trunk.wieght"] = one.pop("trunk.weight")
    del two["head.bias"]
    place.put(1, {**one, "head.weight": torch.zeros(7, 5), "head.bias": torch.zeros(5, dtype=torch.int32)})
    place.put(2, {**two, "adapter": torch.zeros(2)})
    error = place.refused(*map(str, place.paths[1:]), "'trunk.wieght'", "exclude")
    for k, name in ((1, "trunk.weight"), (1, "trunk.wieght"), (2, "head.bias"), (2, "adapter")):
        assert any(f"task {k}" in problem and repr(name) in problem for problem in error.problems)
    place.put(1, {**place.models[1], "trunk.weight": values(1)["trunk.weight"]})
    place.refused("[7, 5]", "[5, 7]", "I32", "F32", exclude=["adapter", "trunk.wieght"])


def test_many_names_that_differ_cost_little_time_and_text(tmp_path) -> None:
    for k in range(2):
        save_file({f"block.{j}.{k}.weight": torch.zeros(0) for j in range(20_000)}, tmp_path / f"{k}")
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        merge_checkpoints(tmp_path / "0", [tmp_path / "1"], tmp_path / "out")
    assert time.monotonic() - start < 30  # it was minutes
    assert len(str(caught.value)) < 10_000
    assert (len(caught.value.problems), caught.value.problems[-1]) == (10_001, "and 30,000 more")


def test_a_prefix_is_one_problem_and_its_advice_leads_to_the_merge(tmp_path) -> None:
    """A bare encoder and tasks of a model with a head, and the other way round: done as told, it is the same merge."""
    bare = [{f"layer.{k}.weight": torch.randn(3) for k in range(20)} for _ in range(3)]
    head = {"head.bias": torch.ones(2), "head.weight": torch.ones(2, 3)}
    headed = [{**{f"model.{name}": value for name, value in each.items()}, **head} for each in bare]
    for kind, models in (("bare", bare), ("headed", headed)):
        for number, tensors in enumerate(models):
            save_file(tensors, tmp_path / f"{kind}{number}.safetensors")
            if kind == "headed":
                path = tmp_path / f"headed{number}.safetensors"
                convert_checkpoint(path, tmp_path / f"stripped{number}.safetensors", strip_prefix="model.")

    def merged(base: str, tasks: str, **given: object) -> StateDict:
        inputs = tmp_path / f"{base}0.safetensors", [tmp_path / f"{tasks}{k}.safetensors" for k in (1, 2)]
        merge_checkpoints(*inputs, tmp_path / "out.safetensors", overwrite=True, **given)
        return load_file(tmp_path / "out.safetensors")

    expected = raw(merged("bare", "bare"))
    names = {"headed": "stripped", "bare": "bare"}
    for base, tasks in (("bare", "headed"), ("headed", "bare")):
        with pytest.raises(InputError) as caught:
            merged(base, tasks)
        assert "`tmx convert CHECKPOINT --strip-prefix model. -o NEW`" in str(caught.value)
        found = merged(names[base], names[tasks], exclude=["head.*"])
        assert raw({name: found[name] for name in bare[0]}) == expected


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "source", "method"), [(float("nan"), 0, "average"), (-float("inf"), 2, "last_task")])
def test_nan_and_infinity(place, bad, source, method) -> None:
    spoiled = {name: value.clone() for name, value in place.models[source].items()}
    spoiled["trunk.weight"][-1, -1] = spoiled["trunk.weight"][3, 3] = bad
    place.put(source, spoiled)
    role = ("base", "task 1", "task 2")[source]
    place.refused(f"{role}: 'trunk.weight' has 2 values", "exclude", method=method)
    place.merge(method=method, exclude=["trunk.*"])


def test_values_that_do_not_fit(place) -> None:
    place.refused("'head.bias'", "float16", scale=1e6, out_dtype="float16")
    place.refused("'head.", scale=3e38, shard_size=100)
    for k in range(3):
        place.put(k, {**place.models[k], "head.bias": torch.full((5,), 1e6)})
    place.refused("'head.bias'", "copied", "float16", out_dtype="float16")
    for k, sign in enumerate((-1, 1, 1)):
        place.put(k, {**place.models[k], "head.bias": torch.full((5,), sign * 3e38)})
    place.refused("task 1: 'head.bias' has", "too far from the base")


# -- places -----------------------------------------------------------------------------------------------------------


def test_an_output_that_is_or_holds_an_input(place) -> None:
    folder = place.folder / "deep"
    place.paths[1] = save_sharded(folder / "one", place.models[1], 2)
    (place.folder / "snapshot").mkdir()
    (place.folder / "snapshot" / "model.safetensors").symlink_to(place.paths[0])
    (place.folder / "link.safetensors").symlink_to(place.paths[2])
    inputs = [place.paths[0], place.paths[2], folder, folder / "one", folder / "one" / ".." / "one"]
    for out in [*inputs, place.folder / "link.safetensors"]:
        place.out = out
        place.refused(str(out.name), overwrite=True)
    place.paths[0], place.out = place.folder / "snapshot", place.folder / "snapshot"
    place.refused("would replace base", overwrite=True)


def test_a_log_that_is_a_link_is_not_written_through(place) -> None:
    private = place.folder / "private"
    private.write_text("mine")
    place.out.with_name("out.log").symlink_to(private)
    place.refused("out.log")
    assert private.read_text() == "mine"


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "threads"), [(1, 1), ("1MiB", 4), ("2MiB", 7)])
def test_memory_that_is_too_small_says_what_would_do(tmp_path, memory, threads) -> None:
    paths = save_sequence(tmp_path / "in", *sequence(9, SMALL, "f32+f64"))
    out = tmp_path / "out.safetensors"
    with pytest.raises(InputError) as caught:
        merge_checkpoints(*paths, out, memory=memory, threads=threads)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    needed = str(caught.value).rsplit("at least ", 1)[1]
    assert merge_checkpoints(*paths, out, memory=needed.replace(" ", ""), threads=threads).elements


# -- odd but good -----------------------------------------------------------------------------------------------------


def test_the_base_among_the_tasks(place) -> None:
    place.paths[1] = place.paths[0]
    report = place.merge(weights=[1, 1])
    assert sum("task 1" in warning for warning in report.warnings) == 1
    assert report.counts == report.budget == (52, 51)
    assert json.loads((place.out / "tmx-report.json").read_text())["warnings"] == list(report.warnings)


def test_odd_tensors_and_names(place) -> None:
    for k in range(3):
        odd = {
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 4),
            "empty.int": torch.zeros(0, dtype=torch.int64),
            "int8": torch.arange(-3, 3, dtype=torch.int8) + k,
            "scalar": torch.tensor(1.0 + k),
            "scalar.int": torch.tensor(5),
            "half": torch.arange(3).half() + k,
            "schicht/größe": torch.arange(5) + k / 2,
            "\U0001f600": torch.ones(1, 1, 2) * k,
        }
        place.put(k, {**place.models[k], **odd})
    report = place.merge(method="last_task", scale=1)
    assert sorted(report.copied) == ["bool", "empty", "empty.int", "int8", "scalar.int"]
    found = place.result()
    for name in place.models[0].keys() - values().keys():
        assert raw({name: found[name]}) == raw({name: place.models[0 if name in report.copied else 2][name]})
    merged = merge_state_dicts(place.models[0], place.models[1:], method="last_task", scale=1)
    assert raw(found) == raw(merged.state_dict)


def test_float8_is_refused_and_copied_when_excluded(place) -> None:
    for k in range(3):
        place.put(k, {**place.models[k], "tiny": torch.arange(9).to(torch.float8_e4m3fn)})
    place.refused("'tiny'", "F8_E4M3", "exclude")
    report = place.merge(exclude=["tiny"])
    assert report.copied == ("tiny",)
    found = place.result()["tiny"]
    assert found.dtype == torch.float8_e4m3fn
    assert found.view(torch.uint8).tolist() == place.models[0]["tiny"].view(torch.uint8).tolist()
