"""An input that is written to while it is merged is noticed, whatever its times say, and there is no output."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sequences import StateDict, digests

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.workflows.convert import convert_checkpoint

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

    def overwrite_and_put_the_time_back(self) -> None:
        before = self.victim.stat()
        self.overwrite()
        os.utime(self.victim, ns=(before.st_atime_ns, before.st_mtime_ns))


def phases(folder: Path) -> list[str]:
    seen: dict[str, None] = {}
    place = Place(folder)
    merge_checkpoints(place.paths[0], place.paths[1:], place.out, progress=lambda phase, *_: seen.setdefault(phase))
    return list(seen)


@pytest.mark.parametrize("moment", [0, -1])
@pytest.mark.parametrize("kind", SAVERS)
def test_overwritten_in_place(tmp_path: Path, kind: str, moment: int) -> None:
    (tmp_path / "a").mkdir()
    phase = phases(tmp_path / "a")[moment]
    for number, how in enumerate((Place.overwrite, Place.overwrite_and_put_the_time_back)):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        place = Place(folder, SAVERS[kind])
        with pytest.raises(InputError, match=r"two: was changed after it was opened"):
            place.merge(phase, lambda place=place, how=how: how(place))
        assert not list(folder.glob("out*"))


def test_written_to_through_a_page_that_was_dirty_before(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with open(place.victim, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:] = view[:]  # from now on, writing to its pages need not show in any time
        with pytest.raises(InputError, match=r"two: was changed after it was opened"):
            place.merge("survey", lambda: view.__setitem__(slice(None), place.other.read_bytes()))
    assert not place.out.exists()


def test_replaced_by_another_file(tmp_path: Path) -> None:
    """The open file is the old one, and so are the values."""
    (tmp_path / "plain").mkdir()
    plain, place = Place(tmp_path / "plain"), Place(tmp_path)
    place.merge("survey", lambda: place.other.replace(place.victim))
    plain.merge("", lambda: None)
    assert digests(place.out) == digests(plain.out)


def test_other_rights_and_names_are_no_change(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.merge("survey", lambda: (place.victim.chmod(0o400), os.link(place.victim, tmp_path / "link")))
    place.merge("survey", lambda: place.victim.rename(tmp_path / "moved"), overwrite=True)


@pytest.mark.parametrize("kind", SAVERS)
def test_cut_short(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, SAVERS[kind])
    with pytest.raises(StorageError, match=r"two: .*cut short meanwhile"):
        place.merge("survey", lambda: os.truncate(place.victim, 4096))
    assert not place.out.exists()


def test_overwritten_while_it_is_converted(tmp_path: Path) -> None:
    place = Place(tmp_path, SAVERS["transposed"])
    happens = [place.overwrite_and_put_the_time_back]
    with pytest.raises(InputError, match=r"two: was changed after it was opened"):
        convert_checkpoint(place.victim, place.out, progress=lambda *_: happens and happens.pop()())
    assert not list(tmp_path.glob("out*"))
