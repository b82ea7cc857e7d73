"""An output is there entirely or not at all, at every moment."""

import errno
import functools
import hashlib
import json
import os
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tunable_magmax.checkpoints import writer
from tunable_magmax.checkpoints.safetensors_file import Shard, index_json, plan_shards
from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import BITS, TensorInfo, torch_dtype
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.errors import ExactnessError, InputError, StorageError

U8 = [TensorInfo("a", "U8", (4,)), TensorInfo("b", "U8", (3,)), TensorInfo("c", "U8", (5,))]
SHARDS = plan_shards(U8, 7)
[ONE] = plan_shards(U8, stem="x")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def data(shard: Shard, fill: bytes = b"n") -> bytes:
    return fill * shard.data_size


def write(out: Path, fill: bytes = b"n", **options: Any) -> None:
    """A whole merge in small: shards, sidecars, commit."""
    shards = [ONE] if out.name.endswith(".safetensors") else SHARDS
    with Output(out, **options) as output:
        for shard in shards:
            output.write_shard(shard, [data(shard, fill)])
        output.write_file("report.json", fill)
        if len(shards) > 1:
            output.write_file("model.safetensors.index.json", index_json(shards))
        output.scratch("masks").write_bytes(fill)
        output.commit()


def expected(out: Path, fill: bytes = b"n") -> dict[str, bytes]:
    """What the parent directory of a written output holds."""
    if out.name.endswith(".safetensors"):
        return {out.name: ONE.header + data(ONE, fill), "x.report.json": fill}
    content = {shard.name: shard.header + data(shard, fill) for shard in SHARDS}
    content |= {"report.json": fill, "model.safetensors.index.json": index_json(SHARDS)}
    return {f"{out.name}/{name}": value for name, value in content.items()}


# Shards


def test_the_official_library_reads_our_shards(tmp_path: Path) -> None:
    tensors, values = [], {}
    for number, code in enumerate(BITS):
        dtype = torch_dtype(code)
        if dtype is None or code == "F8_E8M0":  # not in the official table for torch
            continue
        # An odd number of bytes in front makes all later tensors unaligned.
        shape = [(3,), (2, 3), (), (0, 2)][number % 4]
        info = TensorInfo(f"größe.{code}", code, shape)
        raw = torch.arange(info.nbytes, dtype=torch.uint8) % 2
        tensors += [info, TensorInfo(f"odd.{code}", "U8", (1,))]
        values[info.name] = raw.view(dtype).reshape(shape) if info.numel else torch.zeros(shape, dtype=dtype)
        values[f"odd.{code}"] = torch.tensor([number], dtype=torch.uint8)
    [shard] = plan_shards(tensors, metadata={"by": "us"}, aliases={"tied": "odd.F32"})
    assert len(shard.header) % 8 == 0
    with Output(tmp_path / "out") as output:
        chunks = (values[info.name].reshape(-1).view(torch.uint8).numpy().tobytes() for info in tensors)
        sha256 = output.write_shard(shard, chunks)
        output.commit()
    path = tmp_path / "out" / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    assert path.stat().st_size == shard.size
    loaded = load_file(path)
    assert set(loaded) == set(values)
    for name, value in values.items():
        assert loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape
        assert loaded[name].reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us", "tied": "odd.F32"}
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert list(checkpoint.tensors.values()) == tensors
        assert checkpoint.aliases == {"tied": "odd.F32"}


@given(st.lists(st.integers(0, 50)), st.one_of(st.none(), st.integers(1, 100)))
@settings(max_examples=100, deadline=None)
def test_shards_hold_all_in_order_and_no_more_than_they_may(sizes: list[int], limit: int | None) -> None:
    tensors = [TensorInfo(str(number), "U8", (size,)) for number, size in enumerate(sizes)]
    shards = plan_shards(tensors, limit)
    assert [info for shard in shards for info in shard.tensors] == tensors
    for shard in shards:
        assert shard.data_size == sum(info.nbytes for info in shard.tensors)
        assert limit is None or shard.data_size <= limit or len([i for i in shard.tensors if i.nbytes]) == 1
    for before, after in pairwise(shards):
        assert before.data_size + after.tensors[0].nbytes > (limit or 0)
    names = [shard.name for shard in shards]
    count = len(shards)
    if count == 1:
        assert names == ["model.safetensors"]
    else:
        assert names == [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    index = json.loads(index_json(shards))
    assert index["metadata"]["total_size"] == sum(sizes)
    assert list(index["weight_map"]) == sorted(info.name for info in tensors)


# A whole run


def test_sidecars(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"z" * 3_000_000)
    with Output(tmp_path / "out") as output:
        assert output.write_file("b", tmp_path / "source") == hashlib.sha256(b"z" * 3_000_000).hexdigest()
        assert output.write_file("2_Pooling/config.json", b"{}") == hashlib.sha256(b"{}").hexdigest()
        with pytest.raises(StorageError, match="nowhere"):
            output.write_file("c", tmp_path / "nowhere")
        with pytest.raises(ExactnessError):
            output.commit()  # without a shard
        output.write_shard(ONE, [data(ONE)])
        with pytest.raises(InputError, match=ONE.name):
            output.write_file(ONE.name, b"")
        output.commit()
        with pytest.raises(ValueError, match="committed"):
            output.write_file("late", b"")
    assert sorted(files(tmp_path / "out")) == ["2_Pooling/config.json", "b", "x.safetensors"]


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(StorageError, match="cannot be written to"):
        Output.check(tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_sidecar_beside_a_single_file_replaces_nothing_unasked(tmp_path: Path) -> None:
    (tmp_path / "x.report.json").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"x\.report\.json"):
        write(tmp_path / "x.safetensors")
    assert (tmp_path / "x.report.json").read_bytes() == b"mine"
    write(tmp_path / "x.safetensors", overwrite=True)
    assert files(tmp_path) == expected(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("chunks", "found"), [([b"123"], "3"), ([], "0"), ([b"1234567", b"8"], "more than 7")])
def test_wrong_number_of_bytes(tmp_path: Path, chunks: list[bytes], found: str) -> None:
    with Output(tmp_path / "out") as output:
        with pytest.raises(ExactnessError, match=f"{found} bytes of data were made, but its tensors have 7"):
            output.write_shard(SHARDS[0], chunks)
        with pytest.raises(ExactnessError):
            output.commit()
    assert not (tmp_path / "out").exists()


# Others at work, and commits that fail


def test_a_disk_that_is_full_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def full(path: Path, *given: Any, **named: Any) -> None:
        if path.name == "scratch":
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *given, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match="No space left"):
        Output(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time_writes_an_output(tmp_path: Path) -> None:
    with Output(tmp_path / "out"), pytest.raises(InputError, match="another process is writing"):
        write(tmp_path / "out")
    write(tmp_path / "out")


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("name", ["out", "x.safetensors"])
def test_a_commit_that_fails_leaves_the_old_output_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, swaps: bool
) -> None:
    out = tmp_path / name
    write(out, b"o")
    places = [(os, "rename"), (os, "replace"), (writer, "exchange")]
    real = {name: getattr(module, name) for module, name in places}
    if not swaps:
        real["exchange"] = lambda one, other: False
    for fails_at in range(1, 40):
        count = 0

        def failing(name: str, *places: Any) -> Any:
            nonlocal count
            count += 1
            if count == fails_at:  # noqa: B023
                raise OSError(errno.EIO, "Input/output error")
            return real[name](*places)

        for module, call in places:
            monkeypatch.setattr(module, call, functools.partial(failing, call))
        with suppress(StorageError):
            write(out, b"n", overwrite=True)
            break
        found = {path: value for path, value in files(tmp_path).items() if ".partial/" not in path}
        if found == expected(out, b"n"):  # it failed at the report, after the weights, and got through when repeated
            assert out.is_file()
            write(out, b"o", overwrite=True)
        else:
            assert found == expected(out, b"o")
    assert fails_at > 2
    assert files(tmp_path) == expected(out, b"n")


# Places that are refused


def test_places_that_no_output_may_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "a" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for place in (".", "..", "../..", "/", str(here), str(tmp_path), "", "~x/../", Path.home(), Path.home().parent):
        with pytest.raises(InputError, match="current or home directory or one that these are in"):
            Output(place, overwrite=True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", here]


def test_kind_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder.safetensors")
    for place in ("file", "folder.safetensors", "link", "file/below"):
        for overwrite in (False, True):
            with pytest.raises(InputError, match=str(tmp_path / place)):
                Output(tmp_path / place, overwrite=overwrite)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"does not look like a checkpoint \(it holds files but no \*\.safetensors\)"):
        Output(out, overwrite=True)
    (out / "model.safetensors").touch()
    (out / "photos").mkdir()
    with pytest.raises(InputError, match=r"does not look like a checkpoint \(it holds the folder 'photos'\)"):
        Output(out, overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["home", "model.safetensors", "photos", "thesis.tex"]
    shutil.rmtree(out)
    out.mkdir()
    write(out, overwrite=True)
    assert files(tmp_path) == expected(out)


def test_a_partial_directory_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").touch()
    with pytest.raises(InputError, match=r"out\.partial exists and is not work in progress of a merge: move it away"):
        Output(tmp_path / "out")
    (tmp_path / "x.partial").touch()
    with pytest.raises(InputError, match=r"x\.partial is a file, but the work in progress goes there"):
        Output(tmp_path / "x")
    assert sorted(files(tmp_path)) == ["out.partial/mine", "x.partial"]


def test_output_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Output(out) as output:
        output.write_shard(ONE, [data(ONE)])
        out.mkdir()
        (out / "theirs").touch()
        with pytest.raises(InputError, match="already exists"):
            output.commit()
    assert (out / "theirs").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "x/", "a/b/c", "a/../b", "a//b", "a/\0"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with Output(tmp_path / "out") as output, pytest.raises(InputError, match="name of an output file"):
        output.write_file(name, b"")


# Links where something is to be written


@pytest.mark.parametrize("linked", ["x.partial", "x.partial/output", "x.partial/tmx.lock", "x.partial/model"])
def test_links_in_the_work_in_progress_are_not_followed(tmp_path: Path, linked: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("private")
    link = tmp_path / linked
    link.parent.mkdir(exist_ok=True)
    (tmp_path / "x.partial").is_dir() and (tmp_path / "x.partial" / "tmx.lock").touch()
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere / "file" if linked.endswith(("lock", "model")) else elsewhere)
    with pytest.raises(InputError, match=f"{Path(linked).name} is a symbolic link"):
        Output(tmp_path / "x")
    assert [path.read_text() for path in elsewhere.iterdir()] == ["private"]
