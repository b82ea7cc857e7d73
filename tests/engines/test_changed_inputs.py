"""An input that is written to, replaced or unreadable while it is merged is noticed, and there is no output."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sequences import StateDict

from tunable_magmax.engines.inputs import FileSource
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels
from tunable_magmax.merging.report import MergeReport

Save = Callable[[StateDict, Path], None]
SAVERS: dict[str, Save] = {
    "safetensors": save_file,
    "torch": torch.save,
    "transposed": lambda tensors, path: torch.save({name: tensor.t() for name, tensor in tensors.items()}, path),
}


def model(seed: int) -> StateDict:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{k}": torch.randn(300, 300, generator=generator) for k in range(8)}


class Place:
    """A base and two tasks; something happens to the second task once during their merge."""

    def __init__(self, folder: Path, save: Save = save_file) -> None:
        self.paths = [folder / name for name in ("base", "one", "two")]
        for seed, path in enumerate(self.paths):
            save(model(seed), path)
        save(model(7), folder / "other")
        self.victim, self.other, self.out = self.paths[2], folder / "other", folder / "out"

    def merge(self, phase: str, happens: Callable[[], object], **options) -> MergeReport:
        waiting = [happens]

        def progress(now: str, done: int, total: int) -> None:
            if now == phase and waiting:
                waiting.pop()()

        return merge_checkpoints(self.paths[0], self.paths[1:], self.out, threads=1, progress=progress, **options)

    def overwrite(self) -> None:
        with open(self.victim, "r+b") as file:
            file.write(self.other.read_bytes())


@pytest.mark.parametrize("phase", ["survey", "merge"])
@pytest.mark.parametrize("kind", SAVERS)
def test_overwritten_in_place(tmp_path: Path, kind: str, phase: str) -> None:
    place = Place(tmp_path, SAVERS[kind])
    with pytest.raises(InputError, match=r"two: was changed after it was opened"):
        place.merge(phase, place.overwrite)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("how", ["replaced", "cut short", "moved away"])
def test_another_file_or_none(tmp_path: Path, kind: str, how: str) -> None:
    place = Place(tmp_path, SAVERS[kind])
    happens = {
        "replaced": lambda: place.other.replace(place.victim),
        "cut short": lambda: os.truncate(place.victim, 4096),
        "moved away": lambda: place.victim.rename(tmp_path / "moved"),
    }
    with pytest.raises((InputError, StorageError), match=r"two: "):
        place.merge("survey", happens[how])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("threads", "at"), [(1, 0), (2, 7), (2, 40)])
def test_an_error_of_a_reader_arrives(tmp_path, monkeypatch, threads, at) -> None:
    monkeypatch.setattr(NumbaKernels, "chunk", 1 << 12)  # many pieces of few values
    place = Place(tmp_path)
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
        merge_checkpoints(place.paths[0], place.paths[1:], place.out, threads=threads)
    assert threading.active_count() == before
