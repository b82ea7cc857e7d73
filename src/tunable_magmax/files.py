"""What any module needs of the disk: atomic writes, bounded reads, locks between processes, and sizes."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from tunable_magmax.errors import InputError, StorageError, shortened

if TYPE_CHECKING:
    from filelock import BaseFileLock

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as progress(phase, done, total) in the course of long work."""

_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}

_UNFINISHED = re.compile(r"\..+\.(json|jsonl|safetensors|yaml)\.[0-9a-f]{8}")


def parse_size(size: int | str, what: str) -> int:
    """Returns a size in bytes, given as a number or as text: "512MiB" (binary), "5GB" (decimal) or "2g" (binary).

    >>> parse_size("512MiB", "memory"), parse_size("5GB", "shard size"), parse_size(1024, "memory")
    (536870912, 5000000000, 1024)
    """
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{what} is {shortened(repr(size))}, expected a size such as 512MiB, 5GB or a number of bytes")
    amount = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if amount <= 0:
        raise InputError(f"{what} is {size!r}, but must be greater than 0")
    return amount


def show_size(amount: float) -> str:
    """Formats bytes for people.

    >>> show_size(345_000_000), show_size(12)
    ('329.0 MiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file so that readers, also after a crash, see the old content or the new."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        why = error.strerror or error
        raise StorageError(f"{path}: could not be written ({why}): {remedy(error)} and run again") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Makes a folder whose files `fill` writes, so that it appears complete or not at all; one of its name goes."""
    scratch = path.with_name(f".{path.name}.saving")
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of a save that was killed
        scratch.mkdir(parents=True)
        fill(scratch)
        for file in scratch.rglob("*"):
            if file.is_file():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
        if path.exists():
            shutil.rmtree(path)
        scratch.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise StorageError(f"{path}: could not be written ({error.strerror or error})") from error


def is_unfinished(path: Path) -> bool:
    """Whether a file is what a killed process left of `write_atomic`."""
    return _UNFINISHED.fullmatch(path.name) is not None and path.is_file()


def remove_unfinished(paths: Iterable[Path]) -> None:
    """Removes those files that a killed process had not finished; no other process may be writing them."""
    for path in filter(is_unfinished, list(paths)):
        path.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two files or directories in one step; returns False where the system can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))


def refuse_link(path: Path) -> None:
    """Raises an `InputError` for a symbolic link where something is to be written: it could lead anywhere."""
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link, but is to be written: remove the link, or choose another output")


def identities(files: Iterable[Path]) -> list[list[Any]]:
    """Returns path, size and time of each file, by which work on the same files is recognised."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [[str(path), status.st_size, status.st_mtime_ns] for path, status in stats]


def append_line(path: Path, text: str) -> None:
    """Appends a line to a regular file; links are not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(f"{text}\n")


def remedy(error: OSError) -> str:
    """Returns what a user can do about a failed write.

    >>> remedy(OSError(errno.ENOSPC, "No space left on device"))
    'free space'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free space"
    if error.errno == errno.ENAMETOOLONG:
        return "choose a shorter name"
    return "make it writable" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "fix that"


def sync_directory(path: Path) -> None:
    """Makes renames in a directory outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file with `write_atomic`."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        refuse_half_characters(text)
    except ValueError as error:
        raise InputError(f"{path} cannot hold a name that is not UTF-8 ({error}): rename the file") from None
    write_atomic(path, text.encode())


def is_plain_name(name: str, depth: int = 1) -> bool:
    """Whether this names a file in a directory, at most `depth` deep, and nothing outside of it.

    >>> is_plain_name("config.json"), is_plain_name("1_Pooling/config.json"), is_plain_name("../config.json", depth=2)
    (True, False, False)
    """
    parts = name.split("/")
    return len(parts) <= depth and "\0" not in name and not {"", ".", ".."} & set(parts)


LARGEST_TEXT = 32 << 20
"""Bytes of the largest JSON file that is read: parsed it may take 30 times as much memory."""
DEEPEST = 100
"""How deep the values of a file may be nested: whoever walks over them may call itself for each level."""
MOST_DIGITS = 100
"""Digits of the longest whole number in a file; longer ones are an attack, and most arithmetic fails on them."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; anything else is a ValueError."""
    # Not blocking, because a named pipe that nobody writes to would let us wait for ever.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - closed by the caller
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is not a regular file")
    return file


def read_whole(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes; else raises an OSError or a ValueError."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {show_size(limit)}, too many for such a file")
    return content


def parse_json(
    content: bytes | bytearray | str,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    odd_names: bool = False,
) -> Any:
    """Returns what a JSON text holds; one that is broken or made to do harm is a ValueError that says why.

    All JSON of others goes through here. `pairs` is json's object_pairs_hook; `odd_names` is for logs of ours, whose
    names of files may not be UTF-8.

    >>> parse_json('{"weights": [3, 1]}')
    {'weights': [3, 1]}
    >>> parse_json("[" * 1000 + "]" * 1000)
    Traceback (most recent call last):
    ...
    ValueError: its values are nested more than 100 deep
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        # A function of ours for each number would double the time.
        parse_int = _whole_number if _MANY_DIGITS.search(text) else None
        parsed = json.loads(text, parse_int=parse_int, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [parsed] if type(parsed) in (dict, list) else []
    for _ in range(DEEPEST):
        values = chain.from_iterable(outer.values() if type(outer) is dict else outer for outer in level)
        level = [inner for inner in values if type(inner) in (dict, list)]
        if not level:
            break
    else:
        raise ValueError(TOO_DEEP)
    if "\\u" in text and not odd_names:
        refuse_half_characters(json.dumps(parsed, ensure_ascii=False))
    return parsed


_MANY_DIGITS = re.compile(rf"[0-9]{{{MOST_DIGITS + 1}}}")


TOO_DEEP = f"its values are nested more than {DEEPEST} deep"


def refuse_half_characters(text: str) -> None:
    """Raises a ValueError for a text with lone surrogates, which no file can hold and no terminal can show."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{half} is half of a character, without its other half") from None


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits, at most {MOST_DIGITS} are read")
    return int(digits)


def load_json(path: Path) -> Any:
    """Returns what a JSON file holds; a broken or unreadable one is an OSError or a ValueError. See `parse_json`."""
    return parse_json(read_whole(path))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object. One that is missing, unreadable or something else is an `InputError`."""
    try:
        content = load_json(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): download or save it again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object, found a {type(content).__name__}: download or save it again")
    return content


def acquire_lock(path: Path, refusal: str) -> BaseFileLock:
    """Takes the lock file `path`, which is made if need be, and returns the lock, to be released by the caller.

    If another process has it, raises an `InputError` with the text `refusal`. A process that dies releases its locks.
    Whoever removes the file does it before the release.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    try:
        # Not at once: a file that its owner has just removed is tried again.
        lock.acquire(timeout=0.1, poll_interval=0.02)
    except Timeout:
        raise InputError(refusal) from None
    return lock


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file `path` while the block runs, and removes it afterwards. See `acquire_lock`."""
    lock = acquire_lock(path, refusal)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
