"""Reading ahead: it happens, it is bounded, and its errors and those of the work arrive."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import LARGE, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.sources import FileSource, LastRead, widen
from tunable_magmax.errors import StorageError
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels
from tunable_magmax.merging.resources import AHEAD


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(NumbaKernels, "chunk", 1 << 12)  # many pieces of few values
    return save_sequence(tmp_path / "in", *sequence(3, LARGE))


class Spy:
    """Counts pieces whose reading has begun and those that were surveyed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.surveyed = 0
        self.lock = threading.Lock()
        read, survey = LastRead.read, NumbaKernels.survey
        spy = self

        def noted_read(self: LastRead, *given: Any) -> torch.Tensor:
            with spy.lock:
                spy.begun += 1
            return read(self, *given)

        def noted_survey(self: NumbaKernels, *given: Any) -> Any:
            found = survey(self, *given)
            with spy.lock:
                spy.surveyed += 1
            return found

        monkeypatch.setattr(LastRead, "read", noted_read)
        monkeypatch.setattr(NumbaKernels, "survey", noted_survey)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_read_ahead_is_bounded(files, tmp_path, monkeypatch, threads) -> None:
    spy, seen = Spy(monkeypatch), []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "survey" and done < total:
            seen.append(spy.begun - spy.surveyed)

    merge_checkpoints(*files, tmp_path / "again", threads=threads, progress=progress)
    assert max(seen) <= AHEAD * threads
    assert spy.begun > 20


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


@given(st.binary(min_size=2, max_size=400).filter(lambda data: len(data) % 2 == 0))
def test_widening_bfloat16_is_what_torch_does(data) -> None:
    stored = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
    wanted = stored.to(torch.float32)
    found = widen(stored, torch.empty(stored.numel()))
    same = found.view(torch.int32) == wanted.view(torch.int32)
    assert bool((same | (found.isnan() & wanted.isnan())).all())
