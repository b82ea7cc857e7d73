"""Compiled loops are kept for the next run; a directory or file that is damaged or somebody else's is not used."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("numba")

from tunable_magmax.merging.kernels import loop_cache
from tunable_magmax.merging.kernels.loops import compiled


def add(a, b):
    return a + b


class Notes:
    """A cache directory of the test's own, and what was said about it."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.folder = folder
        self._caplog = caplog

    def run(self) -> tuple[bool, str]:
        """Returns whether the loop came from the directory, and the notes; it works in any case."""
        loop_cache._told.clear()
        self._caplog.clear()
        loop = compiled()(add)
        assert loop(1.5, 2.5) == 4.0
        return bool(loop.stats.cache_hits), self._caplog.text

    @property
    def kept(self) -> Path:
        [file] = self.folder.iterdir()
        return file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Notes:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return Notes(tmp_path / loop_cache.FOLDER, caplog)


def test_a_loop_is_kept_for_the_user_alone(place: Notes) -> None:
    assert place.run() == (False, "")
    assert place.run() == (True, "")
    assert place.folder.stat().st_mode & 0o777 == 0o700


def flip(content: bytes) -> bytes:
    return content[:-200] + bytes([content[-200] ^ 1]) + content[-199:]


@pytest.mark.parametrize("damage", [lambda _: b"", lambda content: content[:500], flip])
def test_a_damaged_file_is_made_again(place: Notes, damage: Callable[[bytes], bytes]) -> None:
    place.run()
    place.kept.write_bytes(damage(place.kept.read_bytes()))
    used, notes = place.run()
    assert not used
    assert notes.count("note:") == 1
    assert "is damaged" in notes
    assert place.run() == (True, "")


def test_nothing_of_a_directory_that_others_may_write_to_is_run(place: Notes, tmp_path: Path) -> None:
    place.run()
    head = place.kept.read_bytes()[:32]
    payload = pickle.dumps(Foreign(tmp_path / "ran"))
    place.kept.write_bytes(head + loop_cache._digest(payload) + payload)
    place.folder.chmod(0o777)
    used, notes = place.run()
    assert not used
    assert "chmod 700" in notes
    assert not (tmp_path / "ran").exists()
    place.folder.chmod(0o700)
    place.run()
    assert (tmp_path / "ran").exists()  # so the trap was a good one


class Foreign:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_of_somebody_else_is_run(place: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    used, notes = place.run()
    assert not used
    assert "note:" in notes


def test_a_link_is_not_followed(place: Notes, tmp_path: Path) -> None:
    place.run()
    place.folder.rename(tmp_path / "elsewhere")
    place.folder.symlink_to(tmp_path / "elsewhere")
    assert not place.run()[0]


def test_a_full_disk(place: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    used, notes = place.run()
    assert "No space left" in notes
    assert not used
    assert not list(place.folder.iterdir())


def test_no_place_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    used, notes = Notes(tmp_path, caplog).run()
    assert not used
    assert notes.count("note:") == 1
