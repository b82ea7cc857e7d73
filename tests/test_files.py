"""Atomic writes, bounded reads, and locks between processes."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import acquire_lock, locked, parse_json, parse_size, read_json, write_atomic, write_json

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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[" * 200_000, "nested more than 100 deep"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "nested more than 100 deep"),
        ('{"seed": ' + "9" * 5_000 + "}", "a number has 5,000 digits, at most 100 are read"),
        ('{"seed": -' + "9" * 101 + "}", "a number has 102 digits"),
        ('{"name": "\\ud800"}', r"\\ud800 is half of a character"),
        ('{"\\udfff": 1}', r"\\udfff is half of a character"),
        ("{", "Expecting"),
    ],
)
def test_json_made_to_do_harm_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json(text)
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(InputError, match=rf"file.json is not JSON \(.*{says}"):
        read_json(tmp_path / "file.json")


def test_only_regular_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate((32 << 20) + 1)
    for name, says in (("pipe", "not a regular file"), ("large", "more than 32.0 MiB"), ("", "Is a directory")):
        with pytest.raises(InputError, match=says):
            read_json(tmp_path / name)
    with pytest.raises(InputError, match="null"):
        read_json(tmp_path / "a\0b")


def test_names_that_no_file_can_hold_are_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        write_json(tmp_path / "run.json", {"data": "caf\udce9"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["9" * 5000, "1." + "9" * 5000 + "GiB", "9" * 31, "\u0661GiB", "-1", "1e9", True])
def test_sizes_that_are_none(size: str | bool) -> None:
    with pytest.raises(InputError, match=r"memory is .{1,70}, expected a size such as 512MiB"):
        parse_size(size, "memory")
