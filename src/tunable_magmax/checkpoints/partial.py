"""Keeps work in progress in a directory of its own: locked, resumable, and made visible by renames.

<out>.partial/
  tmx.lock           locked by the process at work; a killed process releases it
  fingerprint.json   options and inputs of the work
  journal.jsonl      one line per finished shard
  output/            what is to become visible, finished files only
  unfinished/        files being written
  scratch/           what the work needs and the output does not
  commit.json        the moves of a commit, while it lasts
  replaced/          old files, while a commit lasts
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tunable_magmax.errors import InputError, StorageError, shortened
from tunable_magmax.files import (
    acquire_lock,
    exchange,
    is_plain_name,
    load_json,
    parse_json,
    read_whole,
    refuse_link,
    remedy,
    sync_directory,
    write_atomic,
)

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Partial:
    """A directory of work in progress. Its result goes into the directory that it is in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.output = path / "output"
        self.unfinished = path / "unfinished"
        self.scratch = path / "scratch"
        self.journal: dict[str, dict[str, Any]] = {}
        self._lock_file = path / "tmx.lock"
        self._fingerprint = path / "fingerprint.json"
        self._journal_file = path / "journal.jsonl"
        self._marker = path / "commit.json"
        self._replaced = path / "replaced"
        self._lock: BaseFileLock | None = None

    @classmethod
    def of(cls, out: Path) -> Self:
        """Returns the work in progress of an output, whether there is any or not."""
        return cls(out.with_name(f"{out.name}.partial"))

    @property
    def locked(self) -> bool:
        return self._lock is not None

    @contextmanager
    def storing(self, path: Path) -> Iterator[None]:
        """Turns a failure to write `path` into a `StorageError` that says how to continue."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            if not self.path.exists():
                raise StorageError(
                    f"{self.path}: cannot be created ({error.strerror or error}): "
                    f"make sure that {self.path.parent} can be written to, or choose another output"
                ) from error
            raise StorageError(
                f"{path}: writing failed ({error.strerror or error}). Finished shards are kept in {self.path}: "
                f"{remedy(error)} and run the same command again to continue"
            ) from error

    def lock(self) -> None:
        """Creates the directory if need be, and locks it against other processes."""
        refusal = (
            f"another process is writing this output (it works in {self.path}): wait until it is done, or choose "
            "another output"
        )
        while self._lock is None:
            refuse_link(self.path)
            try:
                self.path.mkdir(exist_ok=True)
            except FileExistsError:
                raise self._no_directory() from None
            with suppress(FileNotFoundError):  # its owner has just finished and removed the directory
                self._refuse_strange()
                self._lock = acquire_lock(self._lock_file, refusal)

    def check(self, fingerprint: Mapping[str, object], fresh: bool) -> None:
        """Raises what `lock` and `start` would, but for another process at work, without touching anything."""
        refuse_link(self.path)
        if self.path.is_file():
            raise self._no_directory()
        with suppress(FileNotFoundError):  # there is none, or its owner has just removed it
            self._refuse_strange()
        self._refuse_other(json.loads(json.dumps(fingerprint)), fresh)

    def bytes_on_disk(self) -> int:
        """Returns the bytes of finished files, and of those that the next run removes."""
        finished = sum(status.st_size for status in _statuses(self.output))
        # These may have holes, which take no room.
        return finished + sum(512 * s.st_blocks for s in (*_statuses(self.unfinished), *_statuses(self.scratch)))

    def _no_directory(self) -> InputError:
        return InputError(f"{self.path} is a file, but the work in progress goes there: move it away")

    def _refuse_strange(self) -> None:
        items = list(self.path.iterdir())
        for item in items:
            refuse_link(item)
        if items and self._lock_file not in items:
            raise InputError(f"{self.path} exists and is not work in progress of a merge: move it away")

    def _refuse_other(self, wanted: Mapping[str, Any], fresh: bool) -> None:
        stored = None if fresh else self.stored_fingerprint()
        if stored is not None and stored != wanted:
            raise InputError(
                f"{self.path} holds unfinished work of another merge; different are {_differences(stored, wanted)}. "
                "Run that merge to its end, choose another output, or discard the unfinished work with fresh (--fresh)"
            )

    def release(self) -> None:
        """Releases the lock; what is in the directory stays."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def leave(self) -> None:
        """Releases the lock, and removes the directory if there is no work in it."""
        try:
            if self.locked and self.stored_fingerprint() is None:
                self.remove()
        finally:
            self.release()

    def start(self, fingerprint: Mapping[str, object], fresh: bool) -> None:
        """Begins or continues the work of this fingerprint. Work of another one is an error unless `fresh`."""
        wanted = json.loads(json.dumps(fingerprint))
        self._refuse_other(wanted, fresh)
        if fresh or self.stored_fingerprint() is None:
            self._clear()
            write_atomic(self._fingerprint, json.dumps(wanted, indent=2).encode())
        shutil.rmtree(self.unfinished, ignore_errors=True)  # what a killed process was writing
        for folder in (self.output, self.unfinished, self.scratch):
            folder.mkdir(exist_ok=True)
        sync_directory(self.path)
        self.journal = self._read_journal()

    def stored_fingerprint(self) -> dict[str, Any] | None:
        try:
            content = load_json(self._fingerprint, odd_names=True)
        except (FileNotFoundError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def record(self, name: str, size: int, sha256: str) -> None:
        """Records durably that the shard `name` is finished."""
        entry = {"size": size, "sha256": sha256}
        with open(self._journal_file, "ab") as file:
            # The leading newline ends a line that a crash cut short.
            file.write(b"\n" + json.dumps({"name": name, **entry}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.journal[name] = entry

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        journal = {}
        try:
            lines = read_whole(self._journal_file).splitlines()
        except (FileNotFoundError, ValueError):
            return {}
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                entry = parse_json(line, odd_names=True)
                journal[str(entry["name"])] = {"size": entry["size"], "sha256": entry["sha256"]}
        return journal

    def publish(self, moves: Sequence[tuple[Path, Path]]) -> None:
        """Puts each source in here in the place of its target beside this directory; the last one, the model, commits.

        `settle`, here or in the next process, undoes what was interrupted before, and completes it after. The model is
        there at every moment, the old one or the new one, unless it is a directory and the system can't swap two of
        them. What stands beside it is never the other one's: an old report goes before, and its successor comes after.
        """
        *others, (model, out) = moves
        old = [target.name for _, target in moves if target.exists()]
        names = [[str(source.relative_to(self.path)), target.name] for source, target in moves]
        plan = {"moves": names, "old": old, "new": model.stat().st_ino}
        write_atomic(self._marker, json.dumps(plan).encode())
        try:
            self._replaced.mkdir()
            for source, target in others:
                if target.name in old:
                    target.rename(self._replaced / target.name)
                elif out.name not in old:
                    source.rename(target)
            if not model.is_dir():
                model.replace(out)
            elif out.name not in old:
                model.rename(out)
            elif not exchange(model, out):
                out.rename(self._replaced / out.name)
                model.rename(out)
            _complete(others)
            sync_directory(self.path.parent)
        except BaseException:
            with suppress(OSError):
                self.settle()
            raise

    def _move(self, source: str, target: str) -> tuple[Path, Path]:
        if not is_plain_name(source, depth=2) or not is_plain_name(target):
            raise ValueError("it names files that are elsewhere")
        return self.path / source, self.path.parent / target

    def settle(self) -> None:
        """Ends a commit that was interrupted: completes it if its last step was done, else undoes it."""
        try:
            plan = load_json(self._marker, odd_names=True)
            if not all(map(is_plain_name, plan["old"])):
                raise ValueError("it names files that are elsewhere")
            moves = [self._move(source, target) for source, target in plan["moves"]]
            moves[-1]
        except FileNotFoundError:
            return
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{self._marker} is damaged ({error}): move {self.path} away and merge again") from None
        model, out = moves[-1]
        if not model.exists() or (out.exists() and out.stat().st_ino == plan.get("new")):
            _complete(moves[:-1])
            self._clear()
            return
        for source, target in moves[:-1]:
            if not source.exists():
                target.rename(source)
        for name in plan["old"]:
            if (self._replaced / name).exists():
                (self._replaced / name).replace(self.path.parent / name)
        if self._replaced.exists():
            shutil.rmtree(self._replaced)
        self._marker.unlink()
        sync_directory(self.path.parent)

    def remove(self) -> None:
        """Removes the directory with all that is in it, and releases the lock."""
        if not self.locked:
            return
        try:
            self._clear()
            self._lock_file.unlink()
            with suppress(OSError):  # somebody else has already begun anew in it
                self.path.rmdir()
        finally:
            self.release()

    def discard(self) -> None:
        """Removes the directory, if there is one that no other process is at."""
        if self.path.is_dir():
            with suppress(InputError, OSError):
                self.lock()
                self.remove()

    def _clear(self) -> None:
        # First, so that a half-cleared directory is never continued: without a fingerprint nothing in it counts.
        if not self._fingerprint.is_dir():
            self._fingerprint.unlink(missing_ok=True)
        for item in self.path.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            elif item != self._lock_file:
                item.unlink()


def _complete(moves: Sequence[tuple[Path, Path]]) -> None:
    """Makes the moves that were not made yet."""
    for source, target in moves:
        if source.exists():
            source.replace(target)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # somebody is at work there
            if path.is_file():
                yield path.stat()


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    keys = [key for key in {**stored, **wanted} if stored.get(key, ...) != wanted.get(key, ...)]
    return ", ".join(f"{key} ({_short(stored, key)} there, {_short(wanted, key)} now)" for key in keys)


def _short(values: Mapping[str, Any], key: str) -> str:
    return shortened(json.dumps(values[key])) if key in values else "not given"
