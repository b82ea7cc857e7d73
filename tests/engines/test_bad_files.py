"""Bad input gets a clear error and leaves nothing behind; odd but good input works."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sequences import SMALL, StateDict, raw, save_sequence, save_sharded, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError, StorageError
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

    def refused(self, *words: str, error: type[Exception] = InputError, **options) -> str:
        """The merge fails with a message that holds all the words, and nothing is left behind."""
        before = self.listing()
        with pytest.raises(error) as caught:
            self.merge(**options)
        message = str(caught.value)
        for word in words:
            assert word in message
        assert self.listing() == before
        return message

    def listing(self) -> dict[str, float]:
        return {str(path.relative_to(self.folder)): path.stat().st_mtime_ns for path in self.folder.rglob("*")}

    def result(self) -> StateDict:
        with safe_open(self.out / "model.safetensors", "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


# -- names and shapes -------------------------------------------------------------------------------------------------


def test_all_wrong_names_at_once_with_the_closest(place) -> None:
    one, two = dict(place.models[1]), dict(place.models[2])
    one["trunk.wieght"] = one.pop("trunk.weight")
    del two["head.bias"]
    two["adapter"] = torch.zeros(2)
    place.put(1, one)
    place.put(2, two)
    message = place.refused(
        "4 problems",
        "task 1",
        "lacks 'trunk.weight' (did you mean 'trunk.wieght'?)",
        "has 'trunk.wieght', which the base lacks (did you mean 'trunk.weight'?)",
        "lacks 'head.bias'",
        "has 'adapter', which the base lacks",
        "exclude",
    )
    assert str(place.paths[1]) in message
    assert str(place.paths[2]) in message


def test_excluded_names_may_be_missing(place) -> None:
    place.put(2, {name: value for name, value in place.models[2].items() if not name.startswith("head")})
    place.refused("lacks 'head.bias', 'head.weight'")
    report = place.merge(exclude=["head.*"])
    assert sorted(report.copied) == ["head.bias", "head.weight"]
    kept = {name: place.models[0][name] for name in report.copied}
    assert raw({name: place.result()[name] for name in kept}) == raw(kept)


def test_all_wrong_shapes_at_once(place) -> None:
    place.put(1, {**place.models[1], "head.weight": torch.zeros(7, 5)})
    place.put(2, {**place.models[2], "trunk.weight": torch.zeros(63), "head.bias": torch.zeros(5, 1)})
    place.refused(
        "3 problems", "shape [7, 5], the base [5, 7]", "shape [63], the base [7, 9]", "shape [5, 1], the base [5]"
    )


def test_float_here_and_integer_there(place) -> None:
    place.put(1, {**place.models[1], "head.bias": torch.zeros(5, dtype=torch.int32)})
    place.refused("task 1", "'head.bias' has type I32, the base F32")


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("method", ["tunable_magmax", "average", "last_task"])
def test_nan_and_infinity(place, bad, source, method) -> None:
    spoiled = {name: value.clone() for name, value in place.models[source].items()}
    spoiled["trunk.weight"][-1, -1] = bad
    spoiled["trunk.weight"][3, 3] = bad
    place.put(source, spoiled)
    role = ("base", "task 1", "task 2")[source]
    place.refused(f"{role}: 'trunk.weight' has 2 values that are NaN or infinite", "exclude", method=method)
    place.merge(method=method, exclude=["trunk.*"])


def test_nan_everywhere_is_told_at_once(place) -> None:
    for k in range(3):
        place.put(k, {**place.models[k], "head.bias": torch.full((5,), float("nan"))} if k else place.models[0])
    place.put(2, {**place.models[2], "trunk.weight": torch.full((7, 9), float("inf"))})
    place.refused(
        "task 1: 'head.bias' has 5 values", "task 2: 'head.bias' has 5 values", "task 2: 'trunk.weight' has 63 values"
    )


def test_nan_that_nobody_changed_is_copied(place) -> None:
    for k in range(3):
        tensors = {**place.models[k], "head.bias": torch.tensor([float("nan"), 1, float("inf"), 0, -0.0])}
        place.put(k, tensors)
    report = place.merge()
    assert report.copied == ("head.bias",)
    assert raw({"x": place.result()["head.bias"]}) == raw({"x": place.models[0]["head.bias"]})


def test_difference_that_overflows(place) -> None:
    for k, sign in enumerate((-1, 1, 1)):
        place.put(k, {**place.models[k], "head.bias": torch.full((5,), sign * 3e38)})
    place.refused("task 1: 'head.bias' is so far from the base that the difference overflows")


def test_result_that_does_not_fit(place) -> None:
    place.refused("'head.bias'", "float16", "wider out_dtype", scale=1e6, out_dtype="float16")
    place.refused("does not fit", scale=3e38, shard_size=100)


def test_copied_value_that_does_not_fit(place) -> None:
    for k in range(3):
        place.put(k, {**place.models[k], "head.bias": torch.full((5,), 1e6)})
    place.refused("'head.bias'", "copied", "float16", out_dtype="float16")


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 60, -1, -100])
def test_truncated_safetensors(place, keep) -> None:
    data = place.paths[2].read_bytes()
    place.paths[2].write_bytes(data[:keep])
    place.refused("task 2", str(place.paths[2]))


def test_several_damaged_files_are_told_at_once(place) -> None:
    for k in (0, 2):
        place.paths[k].write_bytes(place.paths[k].read_bytes()[:-4])
    place.paths[1].unlink()
    place.refused("base:", "task 1:", "task 2:", "cut short", "does not exist")


def lie(path: Path, change) -> None:
    """Rewrite the header of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def grow(header) -> None:
    header["head.bias"]["shape"] = [6]


def overlap(header) -> None:
    begin, end = header["trunk.weight"]["data_offsets"]
    header["trunk.weight"]["data_offsets"] = [begin - 4, end - 4]


def beyond(header) -> None:
    begin = header["trunk.weight"]["data_offsets"][0]
    header["trunk.weight"] = {"dtype": "F32", "shape": [10**6], "data_offsets": [begin, begin + 4 * 10**6]}


def negative(header) -> None:
    header["head.bias"]["shape"] = [-5]


def backwards(header) -> None:
    header["head.bias"]["data_offsets"].reverse()


def unknown_type(header) -> None:
    header["head.bias"]["dtype"] = "F33"


def huge(header) -> None:
    header["head.bias"]["shape"] = [2**62, 2**62]


@pytest.mark.parametrize("change", [grow, overlap, beyond, negative, backwards, unknown_type, huge])
def test_lying_header(place, change) -> None:
    lie(place.paths[1], change)
    place.refused("task 1", str(place.paths[1]))


JUNK = [b"", b"\0" * 100, b"PK\x03\x04 not a zip", b"\x80\x04]\x94.", random.Random(0).randbytes(64), b"{}"]


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_junk(place, junk, suffix) -> None:
    place.paths[1] = place.folder / f"junk{suffix}"
    place.paths[1].write_bytes(junk)
    place.refused("task 1", str(place.paths[1]))


def test_truncated_torch_file(place) -> None:
    whole = place.folder / "whole.pt"
    torch.save(place.models[1], whole)
    place.paths[1] = place.folder / "one.pt"
    data = whole.read_bytes()
    for size in (10, 200, len(data) // 2, len(data) - 1):
        place.paths[1].write_bytes(data[:size])
        place.refused("task 1", str(place.paths[1]))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("archive", [True, False])
def test_pickle_with_code_is_not_run(place, tmp_path_factory, wrapped, archive) -> None:
    mark = tmp_path_factory.mktemp("mark") / "created"
    content = {**place.models[1], "x": Evil(mark)} if not wrapped else {"state_dict": place.models[1], "x": Evil(mark)}
    place.paths[1] = place.folder / "evil.pt"
    torch.save(content, place.paths[1], _use_new_zipfile_serialization=archive)
    place.refused("task 1", "refused")
    assert not mark.exists()


def test_plain_pickle_with_code_is_not_run(place, tmp_path_factory) -> None:
    mark = tmp_path_factory.mktemp("mark") / "created"
    for suffix in (".pt", ".safetensors", ".bin"):
        place.paths[1] = place.folder / f"evil{suffix}"
        place.paths[1].write_bytes(pickle.dumps(Evil(mark)))
        place.refused("task 1")
    assert not mark.exists()


# -- places -----------------------------------------------------------------------------------------------------------


def test_directory_without_an_index(place) -> None:
    folder = place.folder / "two"
    folder.mkdir()
    save_file(place.models[2], folder / "part-1.safetensors")
    place.paths[2] = folder
    place.refused("task 2", "part-1.safetensors", "model.safetensors.index.json")


def test_directory_whose_index_lies(place) -> None:
    place.paths[2] = save_sharded(place.folder / "two", place.models[2], 2)
    (place.paths[2] / "model-00002-of-00002.safetensors").unlink()
    place.refused("task 2", "model-00002-of-00002.safetensors is missing")
    index = place.paths[2] / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"head.bias": "../../etc/passwd"}}')
    place.refused("task 2", "passwd")
    index.write_text("not json")
    place.refused("task 2", "not JSON")


def test_paths_that_do_not_exist(place) -> None:
    place.paths[0] = place.folder / "nowhere" / "base.safetensors"
    place.paths[2] = place.folder / "neither"
    place.refused("base:", "task 2:", "does not exist")


@pytest.mark.parametrize("k", [0, 2])
def test_output_that_is_an_input(place, k) -> None:
    place.out = place.paths[k]
    place.refused("would replace", ("base", "", "task 2")[k])
    place.refused("would replace", overwrite=True)


def test_output_that_holds_an_input(place) -> None:
    folder = place.folder / "deep"
    place.paths[1] = save_sharded(folder / "one", place.models[1], 2)
    for out in (folder, folder / "one", folder / "one" / ".." / "one"):
        place.out = out
        place.refused(overwrite=True)


def test_output_through_a_link_to_an_input(place) -> None:
    place.out = place.folder / "link.safetensors"
    place.out.symlink_to(place.paths[1])
    place.refused(overwrite=True)
    assert place.out.is_symlink()


def test_existing_output_is_kept(place) -> None:
    place.merge()
    before = raw(place.result())
    place.refused("already exists", "--overwrite", seed=1)
    assert raw(place.result()) == before
    place.merge(seed=1, overwrite=True)
    assert raw(place.result()) != before


def test_output_below_a_file(place) -> None:
    place.out = place.paths[0] / "out"
    place.refused("not a directory")


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": [1]}, ["2"]),
        ({"weights": [1, -1]}, ["-1"]),
        ({"weights": [float("nan"), 1]}, ["nan"]),
        ({"weights": [0, 0]}, ["0"]),
        ({"budget": [1, 2]}, ["sums to 3", "103"]),
        ({"budget": [51, 52], "weights": [1, 1]}, ["both"]),
        ({"method": "tunable_magma"}, ["did you mean 'tunable_magmax'"]),
        ({"scale": "matchd"}, ["matched"]),
        ({"scale": float("inf")}, ["inf"]),
        ({"memory": "lots"}, ["memory", "lots"]),
        ({"shard_size": 0}, ["shard size"]),
        ({"threads": 0}, ["threads", "at least 1"]),
        ({"threads": -2}, ["threads", "at least 1"]),
        ({"out_dtype": "float8"}, ["float8"]),
        ({"include": "head.*"}, ["list"]),
        ({"seed": -1}, ["seed"]),
    ],
    ids=str,
)
def test_bad_options(place, options, words) -> None:
    place.refused(*words, **options)


def test_no_tasks(place) -> None:
    place.paths = place.paths[:1]
    place.refused("no tasks")


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
@pytest.mark.parametrize("memory", [1, "1MiB", "2MiB"])
def test_memory_that_is_too_small_says_what_would_do(tmp_path, memory, threads) -> None:
    base, tasks = sequence(9, SMALL, "f32+f64")
    paths = save_sequence(tmp_path / "in", base, tasks)
    out = tmp_path / "out.safetensors"
    with pytest.raises(InputError, match=r"memory of .* too little .* give at least") as caught:
        merge_checkpoints(*paths, out, memory=memory, threads=threads)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    needed = str(caught.value).rsplit("at least ", 1)[1]
    assert merge_checkpoints(*paths, out, memory=needed.replace(" ", ""), threads=threads).elements


def test_patterns_that_match_nothing_are_warned_of(place) -> None:
    report = place.merge(exclude=["heda.bias"])
    assert [w for w in report.warnings if "heda.bias" in w and "head.bias" in w]


# -- odd but good -----------------------------------------------------------------------------------------------------


def test_base_among_the_tasks(place) -> None:
    place.paths[1] = place.paths[0]
    report = place.merge()
    assert "task 1 is the base checkpoint itself" in report.warnings
    assert "task 1 is identical to the base" in report.warnings
    stored = json.loads((place.out / "tmx-report.json").read_text())
    assert stored["warnings"] == list(report.warnings)


def test_task_identical_to_the_base(place) -> None:
    place.put(1, {name: value.clone() for name, value in place.models[0].items()})
    report = place.merge(weights=[1, 1])
    assert report.warnings == ("task 1 is identical to the base",)
    assert report.counts == report.budget == (52, 51)


def test_last_task_identical_to_the_base(place) -> None:
    place.put(2, {name: value.clone() for name, value in place.models[0].items()})
    report = place.merge()
    assert report.scale == 0
    assert len(report.warnings) == 2
    assert raw(place.result()) == raw(place.models[0])


def test_all_tasks_identical_to_the_base(place) -> None:
    for k in (1, 2):
        place.put(k, place.models[0])
    with pytest.warns(UserWarning, match="copy of the base"):
        report = place.merge()
    assert report.elements == 0
    assert raw(place.result()) == raw(place.models[0])


@pytest.mark.parametrize(
    "method", ["tunable_magmax", "magmax", "average", "random_mix", "task_arithmetic", "last_task"]
)
def test_one_task(place, method) -> None:
    place.paths = place.paths[:2]
    report = place.merge(method=method, scale=1)
    base, task = place.models[:2]
    assert raw(place.result()) == raw({name: base[name] + (task[name] - base[name]) for name in base})
    assert report.elements == 103


def test_odd_tensors(place) -> None:
    for k in range(3):
        odd = {
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 4),
            "empty.int": torch.zeros(0, dtype=torch.int64),
            "int8": torch.arange(-3, 3, dtype=torch.int8) + k,
            "scalar": torch.tensor(1.0 + k),
            "scalar.int": torch.tensor(5),
            "uint8": torch.arange(3, dtype=torch.uint8),
            "one": torch.full((1, 1, 1), float(k)),
            "half": torch.arange(3).half() + k,
        }
        place.put(k, {**place.models[k], **odd})
    report = place.merge(method="last_task", scale=1)
    assert sorted(report.copied) == ["bool", "empty", "empty.int", "int8", "scalar.int", "uint8"]
    wanted = {name: place.models[0 if name in report.copied else 2][name] for name in place.models[0]}
    found = place.result()
    assert found["scalar"].shape == ()
    assert found["scalar"] == 3
    for name in (*report.copied, "one", "half"):
        assert raw({name: found[name]}) == raw({name: wanted[name]})
    merged = merge_state_dicts(place.models[0], place.models[1:], method="last_task", scale=1)
    assert raw(found) == raw(merged.state_dict)


def test_only_tensors_that_cannot_be_merged(place) -> None:
    for k in range(3):
        place.put(k, {"ids": torch.arange(4), "empty": torch.zeros(0)})
    with pytest.warns(UserWarning, match="copy of the base"):
        report = place.merge()
    assert report.elements == 0
    assert raw(place.result()) == raw(place.models[0])


def test_tied_tensors_of_torch_files_are_written_once(place) -> None:
    models = []
    for k in range(3):
        shared = torch.randn(6, 4, generator=torch.Generator().manual_seed(k))
        models.append({"embed.weight": shared, "lm_head.weight": shared, "norm": torch.full((3,), float(k))})
        place.paths[k] = place.folder / f"{k}.pt"
        torch.save(models[k], place.paths[k])
    report = place.merge()
    assert report.elements == 27
    found = place.result()
    assert sorted(found) == ["embed.weight", "norm"]
    with safe_open(place.out / "model.safetensors", "pt") as file:
        assert file.metadata()["lm_head.weight"] == "embed.weight"
    merged = merge_state_dicts(models[0], models[1:])
    assert merged.state_dict["lm_head.weight"] is merged.state_dict["embed.weight"]
    assert raw(found) == raw({name: merged.state_dict[name] for name in found})


def test_tensors_tied_in_the_base_alone_are_merged_apart(place) -> None:
    shared = torch.zeros(6)
    place.paths = [place.folder / f"{k}.pt" for k in range(3)]
    models = [{"a": shared, "b": shared}, *({"a": torch.full((6,), k), "b": torch.full((6,), -k)} for k in (1.0, 2.0))]
    for path, tensors in zip(place.paths, models, strict=True):
        torch.save(tensors, path)
    report = place.merge(method="last_task", scale=1)
    assert report.elements == 12
    assert raw(place.result()) == raw(models[2])


def test_what_cannot_be_opened_and_what_does_not_match_are_told_together(place) -> None:
    place.paths[1].write_bytes(place.paths[1].read_bytes()[:-3])
    place.put(2, {name: tensor for name, tensor in place.models[2].items() if name != "trunk.weight"})
    message = place.refused("task 1: ", "Of those that can be opened, ", "lacks 'trunk.weight'")
    assert "two.safetensors" in message


def test_float8_is_refused_and_copied_when_excluded(place) -> None:
    for k in range(3):
        place.put(k, {**place.models[k], "tiny": torch.arange(9).to(torch.float8_e4m3fn)})
    place.refused("3 problems", "'tiny' has type F8_E4M3", "exclude")
    report = place.merge(exclude=["tiny"], shard_size=150)
    assert report.copied == ("tiny",)
    found = {}
    for file in place.out.glob("*.safetensors"):
        found |= load_file(file)
    assert found["tiny"].dtype == torch.float8_e4m3fn
    assert found["tiny"].view(torch.uint8).tolist() == place.models[0]["tiny"].view(torch.uint8).tolist()


def test_names_beyond_ascii(place) -> None:
    for k in range(3):
        place.put(
            k,
            {"schicht/größe": torch.arange(5) + k / 2, "层.0": torch.arange(3.0) * k, "\U0001f600": torch.ones(2) * k},
        )
    report = place.merge(method="last_task", scale=1)
    assert raw(place.result()) == raw(place.models[2])
    assert set(report.tensors) == set(place.models[0])


def test_input_that_vanishes_or_changes_is_a_storage_error(place, monkeypatch) -> None:
    def spoil(phase: str, done: int, total: int) -> None:
        place.paths[2].write_bytes(place.paths[2].read_bytes()[:-50])

    with pytest.raises(StorageError, match=r"two\.safetensors") as caught:
        place.merge(progress=spoil, threads=1)
    assert f"{place.out}.partial" in str(caught.value)
    assert not place.out.exists()
    assert (place.folder / "out.partial").is_dir()


def test_an_input_behind_a_link_is_not_replaced(tmp_path) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "blobs" / "x")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "blobs" / "x")
    save_file({"w": torch.ones(3)}, tmp_path / "task.safetensors")
    with pytest.raises(InputError, match="would replace base"):
        merge_checkpoints(snapshot, [tmp_path / "task.safetensors"], snapshot, overwrite=True)
    assert (snapshot / "model.safetensors").is_symlink()


def refusal(base: Path, tasks: list[Path]) -> InputError:
    with pytest.raises(InputError) as caught:
        merge_checkpoints(base, tasks, base.parent / "out")
    return caught.value


def test_of_many_wrong_names_five_are_shown_and_all_are_listed(tmp_path) -> None:
    shared = {f"shared.{k}": torch.zeros(1) for k in range(5)}  # so it is no prefix
    base, tasks = tmp_path / "base.safetensors", [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    save_file({f"layer.{k:02}.weight": torch.zeros(1) for k in range(40)} | shared, base)
    for path in tasks:
        save_file({f"{k}.kernel": torch.zeros(1) for k in range(30)} | shared, path)
    error = refusal(base, tasks)
    title, *lines = str(error).splitlines()
    assert title == "these checkpoints can't be merged, 140 problems:"
    assert len(lines) == 6
    label = f"task 1 ({tasks[0]})"
    assert lines[0].startswith(f"  - {label} lacks 'layer.00.weight', 'layer.01.weight', 'layer.02.weight', 'layer.03")
    assert lines[0].endswith("'layer.04.weight' and 35 more")
    assert lines[2].startswith(f"  - {label} has '0.kernel'")
    assert lines[2].endswith(" and 25 more, which the base lacks")
    assert lines[-1] == "--json lists all of them (`problems` of the error in Python)."
    assert len(error.problems) == 140
    for label in (f"task {t} ({path})" for t, path in enumerate(tasks, 1)):
        lacking = [f"{label} lacks 'layer.{k:02}.weight'" for k in range(40)]
        extra = [f"{label} has '{k}.kernel', which the base lacks" for k in range(30)]
        for wanted in lacking + extra:
            assert any(problem.startswith(wanted) for problem in error.problems)


def test_of_many_wrong_shapes_five_are_shown(place) -> None:
    for k, width in enumerate((2, 3, 2)):
        place.put(k, {f"w{n}": torch.zeros(width if n else 1) for n in range(9)})
    message = place.refused(
        "8 problems", "'w1' has shape [3], the base [2]; 'w2'", "'w5' has shape [3], the base [2]; and"
    )
    assert "and 3 more" in message
    assert "'w6'" not in message


def architecture(folder: Path, kind: str | None, names: str, shape: int = 2) -> Path:
    folder.mkdir()
    save_file({f"{names}.{k}.weight": torch.zeros(shape) for k in range(40)}, folder / "model.safetensors")
    if kind:
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def test_another_architecture_is_one_line(tmp_path) -> None:
    base = architecture(tmp_path / "base", "bert", "encoder")
    task = architecture(tmp_path / "task", "gpt2", "h")
    error = refusal(base, [task])
    assert str(error) == f"base is bert, task 1 is gpt2: they hold different architectures ({base}, {task})"
    assert len(error.problems) == 80
    assert f"task 1 ({task}) lacks 'encoder.0.weight'" in error.problems[0]
    line = "base is bert, task 1, task 2 are gpt2: they hold different architectures"
    assert str(refusal(base, [task, task])).startswith(line)


def test_another_architecture_without_a_config(tmp_path) -> None:
    base = architecture(tmp_path / "base", "bert", "encoder")
    for name, task, words in (
        ("h", architecture(tmp_path / "task", None, "h"), "40 such as 'h.0.weight' [2]"),
        ("wide", architecture(tmp_path / "wide", "bert", "encoder", 3), "40 such as 'encoder.0.weight' [3]"),
    ):
        error = refusal(base, [task])
        line = f"base has 40 tensors such as 'encoder.0.weight' [2], task 1 has {words}; they share 0 ({base}, {task})"
        assert str(error) == line, name
        assert len(error.problems) >= 40


def test_another_architecture_hides_no_problem_of_other_tasks(tmp_path) -> None:
    base = architecture(tmp_path / "base", "bert", "encoder")
    other = architecture(tmp_path / "other", "gpt2", "h")
    near = architecture(tmp_path / "near", "bert", "encoder")
    save_file({f"encoder.{k}.weight": torch.zeros(2) for k in range(39)}, near / "model.safetensors")
    message = str(refusal(base, [other, near]))
    assert "2 problems:\n  - base is bert, task 1 is gpt2: they hold different architectures" in message
    assert f"  - task 2 ({near}) lacks 'encoder.39.weight'" in message


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

    def merged(base: str, tasks: str, **given: object) -> dict[str, torch.Tensor]:
        inputs = tmp_path / f"{base}0.safetensors", [tmp_path / f"{tasks}{k}.safetensors" for k in (1, 2)]
        merge_checkpoints(*inputs, tmp_path / "out.safetensors", overwrite=True, **given)
        return load_file(tmp_path / "out.safetensors")

    expected = raw(merged("bare", "bare"))
    for base, tasks, side, rest, advice in (
        ("bare", "headed", "with", "and 2 more tensors: head.bias, head.weight", "each of these tasks"),
        (
            "headed",
            "bare",
            "without",
            "but not 2 tensors: head.bias, head.weight",
            "the base, and off the tasks that have it,",
        ),
    ):
        with pytest.raises(InputError, match="1 problem:") as caught:
            merged(base, tasks)
        paths = ", ".join(f"task {k} ({tmp_path / f'{tasks}{k}.safetensors'})" for k in (1, 2))
        assert f"{paths}: the names are the base's {side} the prefix 'model.' ({rest})" in str(caught.value)
        assert f"off {advice} first: `tmx convert CHECKPOINT --strip-prefix model. -o NEW`" in str(caught.value)
        assert str(caught.value).endswith("merge with `--exclude 'head.*'`.")
        names = {"headed": "stripped", "bare": "bare"}
        found = merged(names[base], names[tasks], exclude=["head.*"])
        assert raw({name: found[name] for name in bare[0]}) == expected


def test_a_prefix_is_seen_beside_shared_names_and_hides_no_other_problem(tmp_path) -> None:
    """A head that both sides name alike, and a shape that would be refused after the prefix is off."""
    layers = {f"h.{k}": torch.zeros(2) for k in range(5)}
    save_file(layers | {"lm_head.weight": torch.zeros(3)}, tmp_path / "base.safetensors")
    other = {f"model.{name}": torch.zeros(3 if name == "h.1" else 2) for name in layers}
    save_file(other | {"lm_head.weight": torch.zeros(3)}, tmp_path / "task.safetensors")
    with pytest.raises(InputError) as caught:
        merge_checkpoints(tmp_path / "base.safetensors", [tmp_path / "task.safetensors"], tmp_path / "out")
    message = str(caught.value)
    assert "2 problems" in message
    assert "the names are the base's with the prefix 'model.'" in message
    assert "'h.1'" in message
    assert "'h.2'" not in message


def test_stripping_a_prefix_twice_over_is_no_collision(tmp_path) -> None:
    save_file({"model.model.x": torch.zeros(1), "model.x": torch.ones(1)}, tmp_path / "old.safetensors")
    convert_checkpoint(tmp_path / "old.safetensors", tmp_path / "new.safetensors", strip_prefix="model.")
    assert sorted(load_file(tmp_path / "new.safetensors")) == ["model.x", "x"]


def test_advice_never_leaves_out_what_both_sides_have(tmp_path) -> None:
    save_file({f"layer.{k}": torch.zeros(1) for k in range(9)}, tmp_path / "base.safetensors")
    task = {f"model.layer.{k}": torch.zeros(1) for k in range(10)}
    save_file(task | {"model.pooler.bias": torch.zeros(1)}, tmp_path / "task.safetensors")
    with pytest.raises(InputError) as caught:
        merge_checkpoints(tmp_path / "base.safetensors", [tmp_path / "task.safetensors"], tmp_path / "out")
    assert str(caught.value).endswith("merge with `--exclude layer.9 --exclude 'pooler.*'`.")


def test_a_broken_configuration_is_found_before_the_merge(tmp_path) -> None:
    (tmp_path / "base").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{")
    save_file({"w": torch.ones(3)}, tmp_path / "task.safetensors")
    with pytest.raises(InputError, match=r"config\.json is not JSON"):
        merge_checkpoints(tmp_path / "base", [tmp_path / "task.safetensors"], tmp_path / "out", out_dtype="bfloat16")
    assert not (tmp_path / "out.partial").exists()


def test_a_log_that_is_a_link_is_not_written_through(place) -> None:
    private = place.folder / "private"
    private.write_text("mine")
    place.out.with_name("out.log").symlink_to(private)
    place.refused("out.log is a symbolic link")
    assert private.read_text() == "mine"


def test_a_tied_tensor_that_is_called_format(place) -> None:
    """Headers have that key for themselves."""
    place.paths = [path.with_suffix(".pt") for path in place.paths]
    for k, path in enumerate(place.paths):
        tensors = values(k)
        torch.save({**tensors, "format": tensors["head.bias"]}, path)
    place.merge(method="last_task", scale=1)
    assert torch.equal(place.result()["format"], place.result()["head.bias"])
    convert_checkpoint(place.paths[1], place.folder / "converted.safetensors")
    converted = load_file(place.folder / "converted.safetensors")
    assert raw({"format": converted["format"]}) == raw({"format": values(1)["head.bias"]})
