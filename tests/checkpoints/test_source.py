"""Checkpoints come back as torch and the official safetensors library wrote them, or are refused with a reason."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored import holds, read

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError, StorageError


def header(entries: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, *, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


# One safetensors file


def test_tensors_are_in_file_order_and_pieces_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        header({"__metadata__": None, "b": tensor(4, 9), "nothing": tensor(4, 4), "a": tensor(0, 4)}, b"aaaabcdef")
    )
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "nothing", "b"]
        assert checkpoint.files == (path,)
        piece = bytearray(3)
        checkpoint.read_into("b", 1, memoryview(piece))
        assert piece == b"cde"
        checkpoint.read_into("nothing", 0, memoryview(b""))
        with pytest.raises(InputError, match="'b'"):
            checkpoint.read_into("b", 3, memoryview(piece))


def test_tied_names_of_save_model_are_aliases(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2), "pt": torch.ones(1)}, tmp_path / "x.safetensors", {"format": "pt", "b": "a", "note": "zzz"}
    )
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.aliases == {"b": "a"}


BROKEN = {
    "3 bytes": (b"abc", "3"),
    "header too long for the format": (header(b"{}", length=100_000_001), "100000001"),
    "header beyond the end": (header(b"{}", length=3), "3"),
    "empty header": (header(b""), "b''"),
    "not an object": (header(b"[1]"), r"b'\[1\]'"),
    "not JSON": (header(b"{oops}"), "JSON"),
    "not UTF-8": (header(b'{"\xff": 1}'), "JSON"),
    "too deep": (header(b'{"a":' + b"[" * 100_000), "JSON"),
    "number of many digits": (header(b'{"a":' + b"1" * 10_000 + b"}"), "JSON"),
    "a name twice": (header(b'{"w": 1, "v": 1, "w": 1}'), "'w'"),
    "a key twice": (header(b'{"w": {"dtype": "U8", "dtype": "U8"}}'), "'dtype'"),
    "lone surrogate": (header({"\ud800": tensor(0, 1)}, b"a"), r"\\ud800"),
    "metadata not texts": (header({"__metadata__": {"a": 1}}), "'__metadata__'"),
    "metadata not an object": (header({"__metadata__": 3}), "'__metadata__'"),
    "entry not an object": (header({"w": 7}), "tensor 'w': expected .*found 7"),
    "entry without dtype": (header({"w": {"shape": [], "data_offsets": [0, 0]}}), "tensor 'w': expected"),
    "unknown dtype": (header({"w": tensor(0, 1, dtype="Q8")}, b"a"), "'w': expected .*'Q8'"),
    "dtype not a text": (header({"w": tensor(0, 1, dtype=[])}, b"a"), "'w': expected"),
    "negative size": (header({"w": tensor(0, 1, shape=[-1])}, b"a"), "'w': expected .*-1"),
    "fractional size": (header({"w": tensor(0, 1, shape=[1.0])}, b"a"), "'w': expected .*1.0"),
    "bool size": (header({"w": tensor(0, 1, shape=[True])}, b"a"), "'w': expected .*True"),
    "shape not a list": (header({"w": tensor(0, 1, shape="1")}, b"a"), "'w': expected"),
    "huge size": (header({"w": tensor(0, 0, shape=[0, 1 << 70])}), "'w': expected"),
    "a million dimensions": (header({"w": tensor(0, 0, shape=[0] + [1] * 10**6)}), "'w': expected"),
    "a name of a million letters": (header({"w" * 10**6: tensor(0, 0)}), "1,000,000 characters"),
    "65 dimensions": (header({"w": tensor(0, 1, shape=[1] * 65)}, b"a"), "'w': expected"),
    "one offset": (header({"w": {"dtype": "U8", "shape": [1], "data_offsets": [1]}}, b"a"), "'w': expected"),
    "negative offset": (header({"w": tensor(-1, 0, shape=[1])}, b"a"), "'w': expected"),
    "backward offsets": (header({"w": tensor(1, 0, shape=[1])}, b"a"), "'w': .*-1 bytes"),
    "half bytes": (header({"w": tensor(0, 1, dtype="F4", shape=[3])}, b"a"), "'w': .*12 bits"),
    "bytes unlike shape": (header({"w": tensor(0, 6, dtype="F32", shape=[2])}, b"abcdef"), "'w': .*6 bytes"),
    "cut short": (header({"w": tensor(0, 6)}, b"abcde"), "6 .*5"),
    "trailing bytes": (header({"w": tensor(0, 6)}, b"abcdefgh"), "6 .*8"),
    "no tensors but data": (header({}, b"ab"), "2"),
    "hole": (header({"v": tensor(0, 1), "w": tensor(3, 6)}, b"abcdef"), "'w' begins at byte 3, .*'v'"),
    "hole at the start": (header({"w": tensor(3, 6)}, b"abcdef"), "'w' begins at byte 3"),
    "overlap": (header({"v": tensor(0, 4), "w": tensor(3, 6)}, b"abcdef"), "'w' begins at byte 3, .*'v'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(tmp_path: Path, case: str) -> None:
    data, value = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}: .*{value}") as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000


# Files that change


def test_what_leaves_the_content_alone_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(6.0)}, path)
    with open_checkpoint(path) as checkpoint:
        before, status = read(checkpoint, "w"), path.stat()
        path.chmod(status.st_mode)
        os.utime(path, ns=(0, status.st_mtime_ns))  # as a backup does
        with suppress(OSError):
            os.setxattr(path, "user.note", b"x")
        os.link(path, tmp_path / "another name")
        assert path.stat().st_ctime_ns > status.st_ctime_ns
        checkpoint.refuse_changed()
        assert read(checkpoint, "w") == before


def test_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "x.safetensors")

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match=r"x\.safetensors: .*Input/output error"):
            read(checkpoint, "w")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_no_descriptor_stays_open_after_merges_and_refused_files(tmp_path: Path) -> None:
    for name, fill in (("base", 0.0), ("one", 1.0)):
        save_file({"w": torch.full((4,), fill)}, tmp_path / f"{name}.safetensors")
    torch.save({"w": torch.ones(4)}, tmp_path / "two.pt")
    for number, (data, _) in enumerate(BROKEN.values()):
        (tmp_path / f"bad{number}").write_bytes(data)
    before = sorted(Path("/proc/self/fd").iterdir())
    for name in ("one.safetensors", "two.pt", "missing", *(f"bad{number}" for number in range(len(BROKEN)))):
        with suppress(InputError):
            merge_checkpoints(tmp_path / "base.safetensors", [tmp_path / name], tmp_path / "out", overwrite=True)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert (tmp_path / "out" / "model.safetensors").is_file()


# Directories


def write_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], kind: str) -> None:
    names = {name: shard for shard, tensors in shards.items() for name in tensors}
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard) if kind == "safetensors" else torch.save(tensors, folder / shard)
    index = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_shards_are_one_checkpoint(tmp_path: Path, kind: str) -> None:
    shards = {"m-2": {"a": torch.ones(3)}, "m-1": {"c": torch.arange(4), "b": torch.zeros(2, 2)}}
    write_sharded(tmp_path, shards, kind)
    holds(tmp_path, shards["m-1"] | shards["m-2"])
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert list(checkpoint.tensors) == ["c", "b", "a"]
        assert checkpoint.files == (tmp_path / "m-1", tmp_path / "m-2")


def test_shards_written_by_hugging_face(tmp_path: Path) -> None:
    import huggingface_hub as hub

    state = {f"layer.{number}.weight": torch.full((number, 100), float(number)) for number in range(1, 9)}
    hub.save_torch_state_dict(state, tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    holds(tmp_path, state)


def test_preference_among_layouts(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([4.0])}, tmp_path / "pytorch_model.bin")
    holds(tmp_path, {"w": torch.tensor([4.0])})
    write_sharded(tmp_path, {"p-1": {"w": torch.tensor([3.0])}}, "torch")
    holds(tmp_path, {"w": torch.tensor([3.0])})
    save_file({"w": torch.tensor([2.0])}, tmp_path / "model.safetensors")
    holds(tmp_path, {"w": torch.tensor([2.0])})
    write_sharded(tmp_path, {"m-1": {"w": torch.tensor([1.0])}}, "safetensors")
    holds(tmp_path, {"w": torch.tensor([1.0])})


def test_all_that_is_wrong_with_shards_is_told_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "extra": torch.ones(1), "moved": torch.ones(1)}, tmp_path / "m-1")
    save_file({"moved": torch.ones(1)}, tmp_path / "m-2")
    (tmp_path / "m-4").write_bytes(b"")
    listed = {"a": "m-1", "absent": "m-1", "moved": "m-2", "gone": "m-3", "empty": "m-4"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path)
    for part in (r"m-1 .*'absent'", r"m-1 .*'extra', 'moved'", "m-3", "m-4 is empty"):
        assert re.search(part, str(caught.value)), part


@pytest.mark.parametrize("name", ["../m-1", "/etc/passwd", "sub/m-1", "..", "", "a\\b"])
def test_shards_outside_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match=re.escape(repr(name))):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"index\.json"):
        open_checkpoint(tmp_path)


# Paths


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "notes.txt").write_text("hello, world")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    told = {
        "run": "give one of its checkpoints",
        "nowhere": "",
        "empty.safetensors": "0 bytes",
        "notes.txt": "b'hello, w",
        "": "git lfs pull",
        "pipe": "",
    }
    for name, value in told.items():
        with pytest.raises(InputError, match=rf"{name}.*{value}"):
            open_checkpoint(str(tmp_path / name))


def test_a_header_whose_length_looks_like_a_pickle_is_no_torch_file(tmp_path: Path) -> None:
    for size in range(400):
        save_file({"w": torch.zeros(1)}, tmp_path / "x", metadata={"padding": "x" * size})
        if (tmp_path / "x").read_bytes()[:1] == b"\x80":
            holds(tmp_path / "x", {"w": torch.zeros(1)})
            return
    raise AssertionError("no header of such a length was made")


def test_opening_safetensors_needs_no_torch(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    code = (
        "import sys; from tunable_magmax.checkpoints.source import open_checkpoint; "
        f"open_checkpoint({str(tmp_path / 'x.safetensors')!r}).close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
