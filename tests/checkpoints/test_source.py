"""Checkpoints come back as torch and the official safetensors library wrote them, or are refused with a reason."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tunable_magmax.checkpoints import descriptors
from tunable_magmax.checkpoints.source import Checkpoint, open_checkpoint
from tunable_magmax.checkpoints.tensors import BITS, torch_dtype
from tunable_magmax.errors import InputError, StorageError


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, as numpy sees them."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.clone(memory_format=torch.contiguous_format).view(whole).numpy().tobytes("C")


def read(checkpoint: Checkpoint, name: str) -> bytes:
    data = bytearray(checkpoint.tensors[name].nbytes)
    checkpoint.read_into(name, 0, memoryview(data))
    return bytes(data)


def holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            info = checkpoint.tensors[name]
            assert (info.name, info.shape, torch_dtype(info.dtype)) == (name, tuple(tensor.shape), tensor.dtype)
            assert read(checkpoint, name) == raw(tensor)


def of_all_types() -> dict[str, torch.Tensor]:
    """One tensor per type, with bytes that are valid in all of them, and shapes that are easy to get wrong."""
    tensors = {}
    for code in BITS:
        dtype = torch_dtype(code)
        if dtype is not None:
            data = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
            data = data % 2 if dtype == torch.bool else data
            tensors[f"layer.{code}"] = data.view(dtype).reshape(2, 3)
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "größe 😀": torch.ones(1, 1, 3)}
    return tensors


def header(entries: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, *, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


# One safetensors file


def test_official_file_of_all_types(tmp_path: Path) -> None:
    # The official writer has no name for E8M0 yet; our parser is checked on it below.
    expected = {name: value for name, value in of_all_types().items() if value.dtype != torch.float8_e8m0fnu}
    save_file(expected, tmp_path / "x.safetensors", metadata={"format": "pt"})
    holds(tmp_path / "x.safetensors", expected)


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), [("F4", [2, 3], 3), ("F6_E3M2", [4], 3), ("F8_E8M0", [5], 5)])
def test_types_narrower_than_torch_knows(tmp_path: Path, dtype: str, shape: list[int], nbytes: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"w": tensor(0, nbytes, dtype=dtype, shape=shape)}, b"abcdef"[:nbytes]))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["w"].is_unsupported_float
        assert read(checkpoint, "w") == b"abcdef"[:nbytes]


def test_tensors_are_in_file_order_and_pieces_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"b": tensor(4, 9), "nothing": tensor(4, 4), "a": tensor(0, 4)}, b"aaaabcdef"))
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "nothing", "b"]
        assert checkpoint.files == (path,)
        piece = bytearray(3)
        checkpoint.read_into("b", 1, memoryview(piece))
        assert piece == b"cde"
        checkpoint.read_into("nothing", 0, memoryview(b""))


def test_buffers_of_any_type_are_filled(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "x.safetensors")
    target = torch.zeros(2, 3)
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        checkpoint.read_into("w", 0, memoryview(target.numpy()))
        checkpoint.read_into("w", 24, memoryview(torch.zeros(0, 3).numpy()))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 25), (24, 1)])
def test_bytes_that_a_tensor_has_not(tmp_path: Path, offset: int, size: int) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "x.safetensors")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        with pytest.raises(InputError, match="of tensor 'w' were asked for, but it has 24"):
            checkpoint.read_into("w", offset, memoryview(bytearray(size)))
        with pytest.raises(InputError, match=r"no tensor 'wx' \(did you mean 'w'\?\)|no tensor 'wx'"):
            checkpoint.read_into("wx", 0, memoryview(bytearray(1)))


def test_tied_names_of_save_model_are_aliases(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2), "pt": torch.ones(1)}, tmp_path / "x.safetensors", {"format": "pt", "b": "a", "note": "zzz"}
    )
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.aliases == {"b": "a"}


BROKEN = {
    "3 bytes": (b"abc", "at least 8 bytes, found 3"),
    "header too long for the format": (
        header(b"{}", length=100_000_001),
        "header of 100000001 bytes.* allows 100000000",
    ),
    "header beyond the end": (header(b"{}", length=3), "header of 3 bytes announced, but only 2 follow"),
    "empty header": (header(b""), "starts with '{', found b''"),
    "not an object": (header(b"[1]"), r"starts with '{', found b'\[1\]'"),
    "not JSON": (header(b"{oops}"), "header is not JSON"),
    "not UTF-8": (header(b'{"\xff": 1}'), "header is not JSON"),
    "too deep": (header(b'{"a":' + b"[" * 100_000), "header is not JSON"),
    "number of many digits": (header(b'{"a":' + b"1" * 10_000 + b"}"), "header is not JSON"),
    "a name twice": (header(b'{"w": 1, "v": 1, "w": 1}'), "has the name 'w' twice"),
    "a key twice": (header(b'{"w": {"dtype": "U8", "dtype": "U8"}}'), "has the name 'dtype' twice"),
    "lone surrogate": (header({"\ud800": tensor(0, 1)}, b"a"), "half of a character"),
    "metadata not texts": (header({"__metadata__": {"a": 1}}), "'__metadata__' in its header must map names to texts"),
    "metadata not an object": (header({"__metadata__": 3}), "'__metadata__' in its header must map names to texts"),
    "entry not an object": (
        header({"w": 7}),
        "tensor 'w': expected an object with dtype, shape and data_offsets, found 7",
    ),
    "entry without dtype": (header({"w": {"shape": [], "data_offsets": [0, 0]}}), "tensor 'w': expected an object"),
    "unknown dtype": (
        header({"w": tensor(0, 1, dtype="Q8")}, b"a"),
        "tensor 'w' has the unknown dtype 'Q8'; known are F64",
    ),
    "dtype not a text": (header({"w": tensor(0, 1, dtype=[])}, b"a"), r"tensor 'w' has the unknown dtype \[\]"),
    "negative size": (header({"w": tensor(0, 1, shape=[-1])}, b"a"), r"'w': its shape must be .* >= 0, found \[-1\]"),
    "fractional size": (header({"w": tensor(0, 1, shape=[1.0])}, b"a"), r"shape must be .* found \[1.0\]"),
    "bool size": (header({"w": tensor(0, 1, shape=[True])}, b"a"), r"shape must be .* found \[True\]"),
    "shape not a list": (header({"w": tensor(0, 1, shape="1")}, b"a"), "shape must be .* found '1'"),
    "huge size": (header({"w": tensor(0, 0, shape=[0, 1 << 70])}), "shape must be"),
    "one offset": (header({"w": {"dtype": "U8", "shape": [1], "data_offsets": [1]}}, b"a"), "data_offsets must be two"),
    "negative offset": (header({"w": tensor(-1, 0, shape=[1])}, b"a"), "data_offsets must be two integers >= 0"),
    "backward offsets": (header({"w": tensor(1, 0, shape=[1])}, b"a"), r"needs 1 bytes, but .* \[1, 0\] span -1"),
    "half bytes": (
        header({"w": tensor(0, 1, dtype="F4", shape=[3])}, b"a"),
        "3 elements of F4 do not fill whole bytes",
    ),
    "bytes unlike shape": (
        header({"w": tensor(0, 6, dtype="F32", shape=[2])}, b"abcdef"),
        r"\[2\] of F32 needs 8 bytes",
    ),
    "cut short": (header({"w": tensor(0, 6)}, b"abcde"), "tensor 'w' ends at byte 6 of the data, but .* has only 5"),
    "trailing bytes": (header({"w": tensor(0, 6)}, b"abcdefgh"), "2 bytes follow after tensor 'w', expected none"),
    "no tensors but data": (header({}, b"ab"), "2 bytes follow after the start of the data"),
    "hole": (
        header({"v": tensor(0, 1), "w": tensor(3, 6)}, b"abcdef"),
        "'w' leaves a hole of 2 bytes after tensor 'v'",
    ),
    "hole at the start": (header({"w": tensor(3, 6)}, b"abcdef"), "'w' leaves a hole of 3 bytes after the start"),
    "overlap": (header({"v": tensor(0, 4), "w": tensor(3, 6)}, b"abcdef"), "tensor 'w' overlaps with tensor 'v'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


VALID = header(
    {"__metadata__": {"format": "pt"}, "v": tensor(0, 4, dtype="F32", shape=[1]), "w": tensor(4, 6)}, b"abcdef"
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=3), st.integers(0, 3)), max_size=3))
@example([])
def test_a_mutated_file_opens_or_is_refused(tmp_path: Path, cuts: list[tuple[int, bytes, int]]) -> None:
    data = bytearray(VALID)
    for at, put, removed in cuts:
        data[at : at + removed] = put
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with suppress(InputError), open_checkpoint(path) as checkpoint:
        total = sum(len(read(checkpoint, name)) for name in checkpoint.tensors)
        assert total == len(data) - 8 - int.from_bytes(data[:8], "little")


# Files that change, and many of them


def test_file_cut_short_or_replaced_while_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(6.0)}, path)
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(StorageError, match=r"x\.safetensors: ends at byte .* cut short meanwhile"):
            read(checkpoint, "w")
        checkpoint.read_into("w", 0, memoryview(bytearray(20)))
    with pytest.raises(ValueError, match="checkpoint is closed"):
        checkpoint.read_into("w", 0, memoryview(bytearray(20)))


def descriptor_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_descriptors_for_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LIMIT", 3)
    before = descriptor_count()
    for number in range(20):
        save_file({"w": torch.full((1000,), float(number))}, tmp_path / f"{number}.safetensors")
    checkpoints = [open_checkpoint(tmp_path / f"{number}.safetensors") for number in range(20)]
    wrong: list[object] = []

    def work(step: int) -> None:
        for turn in range(40):
            number = (turn * step) % 20
            if read(checkpoints[number], "w") != raw(torch.full((1000,), float(number))):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3, 7, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert descriptor_count() <= before + 3 + len(threads)
    for checkpoint in checkpoints:
        checkpoint.close()
        checkpoint.close()
    assert descriptor_count() <= before


def test_file_replaced_before_it_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LIMIT", 1)
    for name in "ab":
        save_file({"w": torch.arange(6.0)}, tmp_path / name)
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        assert read(b, "w") == raw(torch.arange(6.0))  # puts a's descriptor out
        save_file({"w": torch.arange(6.0) + 1}, tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "a")
        with pytest.raises(InputError, match="a: was changed after it was opened"):
            read(a, "w")
        (tmp_path / "a").unlink()
        with pytest.raises(StorageError, match="a: cannot be opened again"):
            read(a, "w")


def test_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "x.safetensors")

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match=r"x\.safetensors: reading failed at byte .*Input/output error"):
            read(checkpoint, "w")
        monkeypatch.undo()
        assert read(checkpoint, "w") == raw(torch.arange(6.0))


# Torch files

NEWER = {torch.uint16, torch.uint32, torch.uint64} | {t for c in BITS if c.startswith("F8") and (t := torch_dtype(c))}


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_file_of_all_types(tmp_path: Path, legacy: bool) -> None:
    expected = of_all_types()
    if legacy:  # torch cannot load its newer types from its older format
        expected = {name: value for name, value in expected.items() if value.dtype not in NEWER}
    torch.save(expected, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    holds(tmp_path / "x.pt", expected)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
def test_where_a_state_dict_is_found(tmp_path: Path, wrapper: str | None, legacy: bool) -> None:
    state = torch.nn.Linear(3, 2).state_dict()
    content = state if wrapper is None else {"epoch": 3, wrapper: state, "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "x", _use_new_zipfile_serialization=not legacy)
    holds(tmp_path / "x", dict(state))


def test_parameters_and_views_come_out_row_major(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    expected = {
        "transposed": whole.t(),
        "parameter": torch.nn.Parameter(whole[1:3]),
        "rows": whole[::2],
        "columns": whole[:, 1:4],
        "expanded": torch.arange(3, dtype=torch.int16)[:, None].expand(3, 4),
        "permuted": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).permute(2, 0, 1),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
        "bfloat16": whole.bfloat16().t(),
        "float8": whole.to(torch.float8_e4m3fn).t(),
    }
    torch.save(expected, tmp_path / "x.pt")
    holds(tmp_path / "x.pt", {name: value.detach().resolve_conj() for name, value in expected.items()})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 95), st.integers(0, 96), st.integers(1, 7))
def test_any_piece_of_a_view(tmp_path: Path, offset: int, size: int, block: int) -> None:
    path = tmp_path / "x.pt"
    if not path.exists():
        torch.save({"w": torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0)}, path)
    expected = raw(torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0))[offset : offset + size]
    with pytest.MonkeyPatch.context() as patch, open_checkpoint(path) as checkpoint:
        patch.setattr("tunable_magmax.checkpoints.torch_file._GATHER", block)
        data = bytearray(len(expected))
        checkpoint.read_into("w", offset, memoryview(data))
        assert bytes(data) == expected


@pytest.mark.parametrize("legacy", [False, True])
def test_tied_tensors_keep_the_first_name(tmp_path: Path, legacy: bool) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    state = {
        "z.first": w,
        "a.same": w,
        "other shape": w.view(3, 2),
        "other stride": w.t(),
        "other offset": w[1:],
        "equal values": w.clone(),
        "empty": w[:0],
        "also empty": w[:0],
    }
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.aliases == {"a.same": "z.first"}
        assert list(checkpoint.tensors) == [name for name in state if name != "a.same"]
        assert all(read(checkpoint, name) == raw(state[name]) for name in checkpoint.tensors)


def test_compressed_archive(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as z,
    ):
        for item in plain.namelist():
            z.writestr(item, plain.read(item))
    holds(tmp_path / "x.pt", {"w": torch.arange(1000.0)})


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
@pytest.mark.parametrize("view", ["contiguous", "sliced"])
def test_memory_stays_bounded(tmp_path: Path, view: str) -> None:
    w = torch.zeros(16, 1 << 20)
    torch.save({"w": w if view == "contiguous" else w[:, :-1]}, tmp_path / "x.pt")
    data = bytearray(1 << 22)

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) // 1024

    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        before, highest = resident(), 0
        for offset in range(0, checkpoint.tensors["w"].nbytes - len(data), len(data)):
            checkpoint.read_into("w", offset, memoryview(data))
            highest = max(highest, resident())
    assert highest - before < 8, "MiB of mapped file, of 64"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle 2", "pickle 4", "pickle 0", "as .safetensors"])
def test_code_is_refused_and_never_run(tmp_path: Path, how: str) -> None:
    path, target = tmp_path / ("x.safetensors" if how == "as .safetensors" else "x.pt"), tmp_path / "evil was here"
    content = {"w": torch.ones(2), "evil": Evil(target)}
    if how.startswith("pickle"):
        path.write_bytes(pickle.dumps({"evil": Evil(target)}, protocol=int(how[-1])))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how != "legacy")
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert not target.exists()
    message = str(caught.value)
    assert str(path) in message
    assert "weights_only" not in message
    assert "safe_globals" not in message
    told = {
        "pickle 0": "neither a safetensors nor a torch file",
        "as .safetensors": "is a torch file in spite of its name",
    }
    assert told.get(how, "nothing was run") in message


def test_object_that_would_run_code_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "evil": Evil(tmp_path / "no")}, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"holds the Python object posix.mkdir, which runs code when it is loaded"):
        open_checkpoint(tmp_path / "x.pt")


REFUSED: dict[str, tuple[Any, str]] = {
    "a tensor": (torch.ones(2), "holds a Tensor, expected tensors by name"),
    "a list": ([torch.ones(2)], "holds a list, expected tensors by name"),
    "nothing": ({}, "found nothing: save"),
    "no tensors": ({"epoch": 3, "weights": {"w": torch.ones(1)}}, "found 'epoch', 'weights': save"),
    "nested twice": ({"model": {"state_dict": {"w": torch.ones(1)}}}, "found 'model': save"),
    "two wrappers": (
        {"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}},
        "holds tensors under 'state_dict' and under 'model'",
    ),
    "wrapper and tensors": (
        {"model": {"w": torch.ones(1)}, "best": torch.ones(1)},
        r"holds tensors under 'model' and at top level \('best'\)",
    ),
    "other values": (
        OrderedDict(w=torch.ones(1), epoch=3, name="x", nothing=None),
        r"cannot use 'epoch' \(a int, not a tensor\), 'name' \(a str, not a tensor\), 'nothing' \(a NoneType",
    ),
    "number as name": ({0: torch.ones(1)}, r"cannot use 0 \(its name is a int, not a text\)"),
    "sparse": ({"w": torch.eye(3).to_sparse()}, r"cannot use 'w' \(a sparse tensor\)"),
    "complex128": (
        {"w": torch.ones(2, dtype=torch.complex128)},
        r"'w' \(dtype torch.complex128, which safetensors has not",
    ),
    "meta": ({"w": torch.ones(2, device="meta")}, r"cannot use 'w' \(a (tensor without data|\w+, not a tensor)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_torch_files_that_are_refused(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match=message):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"cannot use 'q' \(a quantised tensor\)"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.99])
def test_torch_file_cut_short(tmp_path: Path, legacy: bool, share: float) -> None:
    path = tmp_path / "x.bin"
    torch.save({"w": torch.ones(1000), "v": torch.ones(10)}, path, _use_new_zipfile_serialization=not legacy)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(InputError, match=r"x\.bin: .*(damaged|cut short)"):
        open_checkpoint(path)


def test_torch_file_cut_short_while_open(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(100_000)}, path)
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 4096)
        with pytest.raises(StorageError, match="cut short meanwhile"):
            read(checkpoint, "w")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_mutated_torch_file_opens_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(4), "v": torch.ones(2, 2)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(InputError), open_checkpoint(path) as checkpoint:
        for name in checkpoint.tensors:
            read(checkpoint, name)


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
    hub = pytest.importorskip("huggingface_hub")
    state = {f"layer.{number}.weight": torch.full((number, 100), float(number)) for number in range(1, 9)}
    hub.save_torch_state_dict(state, tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    holds(tmp_path, state)


def test_tied_names_in_the_index_of_torch_shards(tmp_path: Path) -> None:
    w = torch.ones(3)
    write_sharded(tmp_path, {"m-1": {"a": w, "b": w}, "m-2": {"c": torch.ones(1)}}, "torch")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["a", "c"]
        assert checkpoint.aliases == {"b": "a"}


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
    for part in (
        "model.safetensors.index.json and its shards do not fit",
        "m-1 should hold by the index but does not: 'absent'",
        "m-1 holds but the index does not list: 'extra'",
        "m-1 holds but the index puts elsewhere: 'moved'",
        "shard m-3 is missing",
        "m-4 is empty",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["../m-1", "/etc/passwd", "sub/m-1", "..", "", "a\\b"])
def test_shards_outside_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match="shards must be plain names of files beside the index") as caught:
        open_checkpoint(tmp_path)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"index\.json(: expected a 'weight_map'|: expected an object| is not JSON)"):
        open_checkpoint(tmp_path)


def test_directory_without_a_known_layout(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds none of .* Weight files found there: none\. Point at a file"):
        open_checkpoint(tmp_path)
    save_file({"w": torch.ones(1)}, tmp_path / "adapter.safetensors")
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "config.json").touch()
    with pytest.raises(
        InputError, match=r"found there: adapter\.safetensors, last\.ckpt\. Point at a file, or add an index"
    ):
        open_checkpoint(tmp_path)


# Paths


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist: give a checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(InputError, match=r"empty\.safetensors is empty \(0 bytes\)"):
        open_checkpoint(str(tmp_path / "empty.safetensors"))
    (tmp_path / "notes.txt").write_text("hello, world")
    with pytest.raises(
        InputError, match=r"notes\.txt is neither a safetensors nor a torch file \(it starts with b'hello, w"
    ):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InputError, match=r"is a Git LFS pointer.*git lfs pull"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is not a regular file"):
        open_checkpoint(tmp_path / "pipe")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(1)}, path)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything
        from tunable_magmax.checkpoints import descriptors as module

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(module, "open", refuse, raising=False)
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read \(Permission denied\): check its permissions"):
        open_checkpoint(path)


def test_opening_safetensors_needs_no_torch(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    code = (
        "import sys; from tunable_magmax.checkpoints.source import open_checkpoint; "
        f"open_checkpoint({str(tmp_path / 'x.safetensors')!r}).close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
