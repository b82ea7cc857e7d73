"""Atomic writes and locks between processes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import acquire_lock, locked, read_json, write_atomic

HOLDER = """
import sys, time
from pathlib import Path
from tunable_magmax.files import acquire_lock
lock = acquire_lock(Path(sys.argv[1]), "taken")
print("held", flush=True)
time.sleep(60)
"""


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    for content in (b"{}", b'{"a": 1}'):
        write_atomic(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert read_json(path) == {"a": 1}


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"x: could not be written \(No space left on device\): free space and run"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_keeps_other_processes_out_until_its_owner_dies(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match="somebody else is at work"):
            acquire_lock(path, "somebody else is at work")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with locked(path, "somebody else is at work"), pytest.raises(InputError, match="again"), locked(path, "again"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_a_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    (tmp_path / "x.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        acquire_lock(tmp_path / "x.lock", "taken")
    assert (tmp_path / "precious").read_text() == "data"
