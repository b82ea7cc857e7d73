"""Reading ahead: it happens, it is bounded, and its errors and those of the work arrive."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import LARGE, save_sequence, sequence

from tunable_magmax.engines.inputs import FileSource, widen
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import StorageError
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(NumbaKernels, "chunk", 1 << 12)  # many pieces of few values
    return save_sequence(tmp_path / "in", *sequence(3, LARGE))


@pytest.mark.parametrize(("threads", "at"), [(1, 0), (2, 7), (2, 40)])
def test_an_error_of_a_reader_arrives(files, tmp_path, monkeypatch, threads, at) -> None:
    read, lock, number = FileSource.read, threading.Lock(), iter(range(10**9))

    def failing(self: FileSource, *given: Any) -> torch.Tensor:
        with lock:
            now = next(number)
        if now >= at:
            raise StorageError("the disk is on fire")
        return read(self, *given)

    monkeypatch.setattr(FileSource, "read", failing)
    before = threading.active_count()
    with pytest.raises(StorageError, match="the disk is on fire"):
        merge_checkpoints(*files, tmp_path / "out", threads=threads)
    assert threading.active_count() == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd lists open files on Linux only")
def test_merges_leave_no_file_open(files, tmp_path) -> None:
    found = []
    for k in range(3):
        merge_checkpoints(*files, tmp_path / f"{k}", shard_size=100_000)
        found.append(len(list(Path("/proc/self/fd").iterdir())))
    assert found[1:] == found[:1] * 2


@given(st.binary(min_size=2, max_size=400).filter(lambda data: len(data) % 2 == 0))
def test_widening_bfloat16_is_what_torch_does(data) -> None:
    stored = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
    wanted = stored.to(torch.float32)
    found = widen(stored, torch.empty(stored.numel()))
    same = found.view(torch.int32) == wanted.view(torch.int32)
    assert bool((same | (found.isnan() & wanted.isnan())).all())
