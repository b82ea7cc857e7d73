"""Disks that are too small: refused before values are read, and interrupted work is counted as there."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sequences import digests, save_sequence, sequence

from tunable_magmax.engines import local
from tunable_magmax.engines.inputs import FileSource
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError
from tunable_magmax.merging.walker import MemoryPlan

SHAPES = {f"layer.{k}.weight": (40 + 7 * k, 31) for k in range(7)} | {"layer.0.bias": (65,)}
OPTIONS = {"shard_size": 10_000, "threads": 1}
FULL = "would be written, but only .* are free at .*: make room"

Files = tuple[Path, list[Path]]
Disk = Callable[[int], None]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return save_sequence(tmp_path / "in", *sequence(3, SHAPES))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Pretends that so many bytes of the disk are free."""

    def set_free(free: int, total: int = 10**9) -> None:
        usage = SimpleNamespace(free=free, used=0, total=total)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)

    return set_free


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refused(files: Files, out: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    """The merge is refused, reads nothing and leaves everything as it was."""
    before = {path: path.stat().st_mtime_ns for path in out.parent.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(FileSource, "read", lambda *given: pytest.fail("values were read"))
        with pytest.raises(InputError, match=FULL):
            merge_checkpoints(*files, out, **{**OPTIONS, **options})
    assert {path: path.stat().st_mtime_ns for path in out.parent.rglob("*")} == before


@pytest.mark.parametrize("name", ["out", "out.safetensors", "new/folder/out"])
def test_a_merge_needs_room_for_its_weights_and_not_a_byte_more(files, tmp_path, monkeypatch, disk, name) -> None:
    merge_checkpoints(*files, tmp_path / "plain" / name, **OPTIONS)
    plain = tmp_path / "plain" / name
    size = plain.stat().st_size if plain.is_file() else weights(plain)
    disk(size - 1)
    refused(files, tmp_path / name, monkeypatch)
    disk(size)
    merge_checkpoints(*files, tmp_path / name, **OPTIONS)
    assert digests(tmp_path / name) == digests(plain)


def test_planes_on_disk_need_room_too(files, tmp_path, monkeypatch, disk) -> None:
    merge_checkpoints(*files, tmp_path / "plain", **OPTIONS)
    planes: set[int] = set()
    plan = local.plan_memory

    def spilled(*given: Any, **named: Any) -> MemoryPlan:
        found = replace(plan(*given, **named), mapped=1)
        planes.add(found.planes)
        return found

    monkeypatch.setattr(local, "plan_memory", spilled)
    disk(weights(tmp_path / "plain"))
    refused(files, tmp_path / "out", monkeypatch)
    [size] = planes
    disk(weights(tmp_path / "plain") + size)
    merge_checkpoints(*files, tmp_path / "out", **OPTIONS)
    assert size
