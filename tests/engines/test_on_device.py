"""Files through an emulated device, whole and block by block: the files of the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from device_cases import OPTIONS, given, sequence
from emulated import EmulatedModule
from safetensors.torch import save_file

import tunable_magmax as tmx
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines import on_device
from tunable_magmax.merging.kernels.cuda import CudaKernels, kernel_source

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
SHAPES = {"a": (100, 101), "b": (65,), "c": (1,), "d": (53, 97), "e": (), "f": (128,), "z": (0, 4)}
HOST = torch.device("cpu")
TASKS = 6
CHOSEN = [OPTIONS[k] for k in (0, 3, 9, 14, 17, 20, 23, 25, 30)]


class LateUploader:
    """Copies at the last moment that is allowed: a buffer that is filled too early is seen in the result."""

    device = HOST

    def __init__(self, device: torch.device) -> None:
        self._due: list[tuple[torch.Tensor, torch.Tensor] | None] = [None, None]

    def buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def send(self, side: int, values: torch.Tensor, near: torch.Tensor | None) -> torch.Tensor:
        assert self._due[side] is None
        near = torch.empty_like(values) if near is None else near
        near.fill_(255)  # NaN in every type
        self._due[side] = values, near
        return near

    def wait_until_sent(self, side: int) -> None:
        if (due := self._due[side]) is not None:
            due[1].copy_(due[0])
            self._due[side] = None

    begin_work = wait_until_sent

    def end_work(self, side: int) -> None:
        """Work is done when it is ordered."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sequence")
    paths = [folder / f"{k}.safetensors" for k in range(TASKS + 1)]
    for path, state in zip(paths, sequence(SHAPES, TASKS), strict=True):
        save_file(state, path)
    return paths


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    return EmulatedModule(emulated.compiled(kernel_source(), tmp_path_factory.mktemp("kernels")))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@contextmanager
def interrupted_after_a_shard() -> Iterator[None]:
    write = Output.write_shard

    def write_first(output: Output, *rest: Any) -> str:
        if output._partial.journal:
            raise KeyboardInterrupt
        return write(output, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "write_shard", write_first)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("room", ["everything", "blocks", "blocks without the merged vector"])
def test_files_through_the_device_are_the_files_of_the_cpu_also_if_resumed(
    files: list[Path], module: EmulatedModule, tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "open_device", lambda name: HOST)
    monkeypatch.setattr(on_device, "kernels_on", lambda device: CudaKernels(module))
    monkeypatch.setattr(on_device, "Uploader", LateUploader)
    monkeypatch.setattr(on_device, "free_memory", lambda device: 1 << 40)
    monkeypatch.setattr(on_device, "BLOCK", 20_000)
    monkeypatch.setattr(on_device, "SMALLEST_BLOCK", 1 << 10)
    real = on_device.OnDevice._room

    def less(self: Any, *arguments: Any) -> tuple[int, bool, bool]:
        block, _, stash = real(self, *arguments)
        return block, False, stash and room == "blocks"

    if room != "everything":
        monkeypatch.setattr(on_device.OnDevice, "_room", less)
    for k, options in enumerate(CHOSEN):
        asked: dict[str, Any] = {**given(options, TASKS), "shard_size": "20kB"}
        tmx.merge_checkpoints(files[0], files[1:], tmp_path / f"cpu-{k}", **asked)
        with interrupted_after_a_shard():
            tmx.merge_checkpoints(files[0], files[1:], tmp_path / f"gpu-{k}", device="cuda", **asked)
        tmx.merge_checkpoints(files[0], files[1:], tmp_path / f"gpu-{k}", device="cuda", **asked)
        assert digests(tmp_path / f"gpu-{k}") == digests(tmp_path / f"cpu-{k}"), options
