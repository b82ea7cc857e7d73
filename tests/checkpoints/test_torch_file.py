"""Files of torch.save come back as they were written, without running code and without more memory than they have."""

import os
import pickle
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequences import data_of
from stored import holds, of_all_types, read

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import BITS, torch_dtype
from tunable_magmax.errors import InputError

NEWER = {torch.uint16, torch.uint32, torch.uint64} | {t for c in BITS if c.startswith("F8") and (t := torch_dtype(c))}


@pytest.mark.parametrize("legacy", [False, True])
def test_all_types(tmp_path: Path, legacy: bool) -> None:
    expected = of_all_types()
    if legacy:  # torch cannot load its newer types from its older format
        expected = {name: value for name, value in expected.items() if value.dtype not in NEWER}
    torch.save(expected, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    holds(tmp_path / "x.pt", expected)
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.in_memory == ((tmp_path / "x.pt").stat().st_size if legacy else 0)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
def test_where_a_state_dict_is_found(tmp_path: Path, wrapper: str | None, legacy: bool) -> None:
    state = torch.nn.Linear(3, 2).state_dict()
    content = state if wrapper is None else {"epoch": 3, wrapper: state, "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "x", _use_new_zipfile_serialization=not legacy)
    holds(tmp_path / "x", dict(state))


@pytest.mark.parametrize("legacy", [False, True])
def test_parameters_and_views_come_out_row_major(tmp_path: Path, legacy: bool) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    expected = {
        "transposed": whole.t(),
        "parameter": torch.nn.Parameter(whole[1:3]),
        "rows": whole[::2],
        "columns": whole[:, 1:4],
        "expanded": torch.arange(3, dtype=torch.int16)[:, None].expand(3, 4),
        "permuted": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).permute(2, 0, 1),
        "bfloat16": whole.bfloat16().t(),
    }
    expected |= {} if legacy else {"float8": whole.to(torch.float8_e4m3fn).t()}
    torch.save(expected, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    holds(tmp_path / "x.pt", expected)
    with open_checkpoint(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.in_memory >= whole.nbytes, "views are held in memory"
        piece = bytearray(11)
        checkpoint.read_into("columns", 5, memoryview(piece))
        assert piece == data_of(expected["columns"])[5:16]


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
        assert all(read(checkpoint, name) == data_of(state[name]) for name in checkpoint.tensors)


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
    assert ("posix.mkdir" in message) == (how in ("zip", "legacy", "pickle 2"))


REFUSED: dict[str, tuple[Any, str]] = {
    "a tensor": (torch.ones(2), "Tensor"),
    "a list": ([torch.ones(2)], "list"),
    "nothing": ({}, "nothing"),
    "no tensors": ({"epoch": 3, "weights": {"w": torch.ones(1)}}, "'epoch', 'weights'"),
    "nested twice": ({"model": {"state_dict": {"w": torch.ones(1)}}}, "'model'"),
    "two wrappers": ({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}, "'state_dict' and .*'model'"),
    "wrapper and tensors": ({"model": {"w": torch.ones(1)}, "best": torch.ones(1)}, "'model' and .*'best'"),
    "other values": (OrderedDict(w=torch.ones(1), epoch=3, name="x"), "'epoch' .*'name'"),
    "number as name": ({0: torch.ones(1)}, "0 .*int"),
    "sparse": ({"w": torch.eye(3).to_sparse()}, "'w'"),
    "complex128": ({"w": torch.ones(2, dtype=torch.complex128)}, "'w' .*complex128"),
    "conjugated": ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "'w'"),
    "meta": ({"w": torch.ones(2, device="meta")}, "'w'"),
    "views larger than the file": ({"w": torch.ones(3, 1).expand(3, 10_000)}, "memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contents_that_are_refused(tmp_path: Path, case: str) -> None:
    content, value = REFUSED[case]
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match=rf"x\.pt: .*{value}"):
        open_checkpoint(tmp_path / "x.pt")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "plain.pt")
    packed = zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, packed:
        for item in plain.namelist():
            packed.writestr(item, plain.read(item))
    with pytest.raises(InputError, match=r"x\.pt: is compressed"):
        open_checkpoint(tmp_path / "x.pt")


class Asks:
    """Becomes a call of something that torch's loader allows."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("call", [(bytearray, 2**24), (torch.FloatTensor, 2**20)])
def test_memory_without_data_is_refused(tmp_path: Path, call: tuple[Any, ...], legacy: bool) -> None:
    path = tmp_path / "x.pt"
    content = {"w": torch.zeros(4), "v": Asks(*call)}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(InputError, match=r"x\.pt: asks for memory|has no data for 'v'|a bytearray, not a tensor"):
        open_checkpoint(path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.99])
def test_a_file_cut_short(tmp_path: Path, legacy: bool, share: float) -> None:
    path = tmp_path / "x.bin"
    torch.save({"w": torch.ones(1000), "v": torch.ones(10)}, path, _use_new_zipfile_serialization=not legacy)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(InputError, match=r"x\.bin: "):
        open_checkpoint(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_mutated_file_opens_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(4), "v": torch.ones(2, 2).t()}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(InputError), open_checkpoint(path) as checkpoint:
        for name in checkpoint.tensors:
            read(checkpoint, name)
