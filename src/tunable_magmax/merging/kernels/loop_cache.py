"""Keeps compiled loops on disk between runs, in a directory that belongs to the user alone.

What is kept is machine code in a pickle: whoever can write there has code run as the user. So nothing is read from a
directory, or a file, that somebody else owns or may write to, nor what is not exactly what was written. Whatever is
wrong costs a note and the time to compile again, never a merge.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pickle
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

FOLDER = "tunable-magmax"
"""The directory's name, in the user's cache directory or in NUMBA_CACHE_DIR."""
_DIGEST = hashlib.sha256().digest_size


class LoopCache(NullCache):
    """The compiled forms of one function: a file for each, with the digests of its sources and of its content."""

    def __init__(self, function):
        self._name = f"{Path(inspect.getfile(function)).stem}.{function.__qualname__}"
        self._sources = _sources(inspect.getfile(function))

    def load_overload(self, sig, target_context):
        target_context.refresh()
        try:
            with _opened_folder() as folder:
                payload = self._read(folder, self._file(sig, target_context.codegen()))
            return None if payload is None else CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception as error:  # whatever it is, compiling helps
            _note(error)
            return None

    def save_overload(self, sig, data):
        try:
            payload = dumps(data._reduce())
            with _opened_folder() as folder:
                _write(folder, self._file(sig, data.codegen), self._sources + _digest(payload) + payload)
        except Exception as error:  # it is compiled, which is what matters
            _note(error)

    def _file(self, sig: Any, codegen: Any) -> str:
        key = sig, codegen.magic_tuple(), sys.version, numba.__version__
        return f"{self._name}-{_digest(repr(key).encode()).hex()[:32]}"

    def _read(self, folder: int, name: str) -> bytes | None:
        """Returns what was kept for these sources, if anything was."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise _DoubtfulError(f"{name} belongs to somebody else")
            sources, digest, payload = file.read(_DIGEST), file.read(_DIGEST), file.read()
        if sources != self._sources and len(sources) == _DIGEST:
            return None
        if digest != _digest(payload):
            raise _DoubtfulError(f"{name} is damaged")
        return payload


class _DoubtfulError(Exception):
    """Says why something kept is not used."""


def _write(folder: int, name: str, content: bytes) -> None:
    unfinished = f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


@contextmanager
def _opened_folder() -> Iterator[int]:
    """Yields a descriptor of the directory, which is made if need be, and is refused if it is not the user's alone."""
    place = cache_folder()
    with suppress(FileExistsError):
        place.mkdir(mode=0o700, parents=True)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise _DoubtfulError("others may write to it or read it: remove it, or give it to you alone (chmod 700)")
        yield descriptor
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Returns where compiled loops are kept."""
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / FOLDER


@cache
def _sources(file: str) -> bytes:
    """Returns a digest of what the loops of a file are compiled from: the file, and the loops that they call."""
    files = [Path(file), *(Path(__file__).with_name(name) for name in ("loops.py", "value_loops.py"))]
    return _digest(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


_told: list[bool] = []


def _note(error: Exception) -> None:
    """Says once that loops are compiled again, and why."""
    if _told:
        return
    _told.append(True)
    try:
        place = str(cache_folder())
    except RuntimeError:  # a user without a home
        place = "the user's cache directory"
    logging.getLogger(__name__).warning(
        "note: the compiled loops kept in %s are not used, so that this takes some seconds longer (%s)", place, error
    )
