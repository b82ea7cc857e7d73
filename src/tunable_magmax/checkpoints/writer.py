"""Writes a checkpoint that appears whole or not at all.

All work is in the directory <out>.partial beside it:

  tmx.lock      locked by the process at work; a killed process releases it
  output/       finished files
  unfinished/   files being written
  scratch/      what the work needs and the output does not
  commit/       the finished files of an output in one file, once they take their places
  replaced      the directory that the output replaces, where the system can't swap two
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tunable_magmax.checkpoints.companions import is_module_folder
from tunable_magmax.checkpoints.safetensors_file import Shard
from tunable_magmax.checkpoints.source import WEIGHT_SUFFIXES
from tunable_magmax.errors import ExactnessError, InputError, StorageError
from tunable_magmax.files import acquire_lock, exchange, is_plain_name, refuse_link, remedy, sync_directory

if TYPE_CHECKING:
    from filelock import BaseFileLock

_BLOCK = 1 << 20
_MODEL = ".model"
"""The model among the files of a commit; no other file may have the name."""


def is_one_file(out: Path) -> bool:
    """Whether `out` is one file and not a directory. The name of a torch file, which is never written, is refused.

    >>> is_one_file(Path("merged.safetensors")), is_one_file(Path("merged-0.5"))
    (True, False)
    """
    if out.suffix.lower() in WEIGHT_SUFFIXES - {
        ".safetensors"
    }:  # whoever gives such a name would be surprised by a directory
        choices = f"-o {out.with_suffix('.safetensors')} or -o {out.with_suffix('')}, a directory"
        raise InputError(f"{out} looks like a torch file, which is never written: give {choices}")
    return out.name.endswith(".safetensors")


class Output:
    """A checkpoint being written: a directory, or one file if `out` ends in `.safetensors`.

    `commit` makes it visible by a rename; leaving the context without a commit removes all work. `overwrite` allows to
    replace an older output.

    >>> import tempfile
    >>> from tunable_magmax.checkpoints.safetensors_file import plan_shards
    >>> from tunable_magmax.checkpoints.tensors import TensorInfo
    >>> [shard] = plan_shards([TensorInfo("w", "U8", (3,))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Output(Path(folder) / "merged") as output:
    ...         sha256 = output.write_shard(shard, [b"abc"])
    ...         sha256 = output.write_file("report.json", b"{}")
    ...         output.commit()
    ...     sorted(path.name for path in Path(folder).glob("**/*"))
    ['merged', 'model.safetensors', 'report.json']
    """

    def __init__(self, out: str | Path, *, overwrite: bool = False) -> None:
        self.out = _absolute(Path(out))
        self.partial = _partial(self.out)
        self.folder = self.partial / "output"
        """The directory of the finished files, out of sight until the commit."""
        self.overwrite = overwrite
        self._is_file = self.out.name.endswith(".safetensors")
        self._shards: set[str] = set()
        self._lock: BaseFileLock | None = None
        self.recover(self.out)
        self.check(self.out, overwrite)
        with self._storing(self.partial):
            try:
                self.out.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise InputError(f"{self.out}: {self.out.parent} is not a directory: choose another output") from None
            self._lock = _lock(self.partial)
            try:
                for name in ("output", "unfinished", "scratch"):
                    (self.partial / name).mkdir()
            except BaseException:
                self._remove()
                raise

    @staticmethod
    def check(out: str | Path, overwrite: bool = False) -> None:
        """Raises what the constructor would about this place, without touching it."""
        place = _absolute(Path(out))
        _refuse_place(place)
        _refuse_existing(place, overwrite)
        above = next(folder for folder in place.parents if folder.exists())
        if above.is_dir() and not os.access(above, os.W_OK | os.X_OK):
            raise StorageError(f"{place}: {above} cannot be written to: make it writable, or choose another output")

    @staticmethod
    def recover(out: str | Path) -> bool:
        """Removes what a killed process left of its work; a commit that it had begun is completed, or undone.

        Returns whether there was any: then the work begins anew.
        """
        place = _absolute(Path(out))
        _refuse_place(place)
        partial = _partial(place)
        refuse_link(partial)
        if not partial.exists():
            return False
        with _storing(partial, partial):
            lock = _lock(partial)
            try:
                _settle(partial, place)
                _clear(partial)
            finally:
                lock.release()
        return True

    def write_shard(self, shard: Shard, chunks: Iterable[memoryview | bytes]) -> str:
        """Writes a shard from its data in order, in chunks of any size, and returns the sha256 of the file.

        A number of bytes that is not exactly `shard.data_size` is an `ExactnessError`, and the shard is not kept.
        """
        self._check_shard(shard.name)
        sha256 = self._store(shard.name, _exactly(shard, chunks))
        self._shards.add(shard.name)
        return sha256

    def begin_shard(self, shard: Shard) -> Path:
        """Makes a file of the shard's size with its header, for other processes to write the data into."""
        self._check_shard(shard.name)
        # What a process of an earlier, killed run may still write goes to another file.
        path = self.partial / "unfinished" / f"{secrets.token_hex(4)}.{shard.name}"
        with self._storing(path), open(path, "wb") as file:
            file.write(shard.header)
            file.truncate(shard.size)
            file.flush()
            os.fsync(file.fileno())
        return path

    def finish_shard(self, shard: Shard, path: Path) -> None:
        """Keeps a file of `begin_shard` whose data is complete and on disk."""
        self._check_shard(shard.name)
        with self._storing(path):
            path.replace(self.folder / shard.name)
        self._shards.add(shard.name)

    def write_file(self, name: str, content: bytes | Path) -> str:
        """Puts a file beside the shards (beside a single output file as `<stem>.<name>`) and returns its sha256.

        `content`: bytes, or the path of a file to be copied. In a directory, `folder/file` is a name as well.
        """
        self.check_sidecar(name)
        return self._store(name, _blocks(content) if isinstance(content, Path) else [content])

    def scratch(self, name: str) -> Path:
        """Returns a path for a file that the work needs and the output does not; it lasts until the commit."""
        self._check_name(name)
        return self.partial / "scratch" / name

    def commit(self) -> None:
        """Makes the output visible. A process killed at any moment leaves all of it or nothing of it.

        The model is there at every moment, the old one or the new one, unless it is a directory and the system can't
        swap two of them. What stands beside a single file is never the other one's: it is gone while a commit lasts.
        """
        if not self._shards:
            raise ExactnessError(f"{self.out}: nothing was written, so there is nothing to commit")
        with self._storing(self.out):
            _refuse_existing(self.out, self.overwrite)  # it may have appeared meanwhile
            sync_directory(self.folder)
            try:
                self._publish()
            except BaseException:
                with suppress(OSError):
                    _settle(self.partial, self.out)
                raise
            sync_directory(self.out.parent)
        with suppress(OSError):  # the output is complete; the next run removes what is left
            self._remove()

    def _publish(self) -> None:
        if self._is_file:
            [name] = self._shards
            (self.folder / name).rename(self.folder / _MODEL)
            self.folder.rename(self.partial / "commit")
            sync_directory(self.partial)
            _settle(self.partial, self.out)
        elif not self.out.exists():
            self.folder.rename(self.out)
        elif not exchange(self.folder, self.out):
            self.out.rename(self.partial / "replaced")
            self.folder.rename(self.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._remove()

    def _remove(self) -> None:
        """Removes all work in progress, and releases the lock."""
        if self._lock is not None:
            try:
                _clear(self.partial)
            finally:
                self._lock.release()
                self._lock = None

    def _storing(self, path: Path) -> AbstractContextManager[None]:
        return _storing(path, self.partial)

    def _check_name(self, name: str, depth: int = 1) -> None:
        if self._lock is None:
            raise ValueError(f"{self.out}: the output is already committed or discarded")
        if not is_plain_name(name, depth):
            raise InputError(f"{name!r} cannot be the name of an output file: expected a plain file name")

    def _check_shard(self, name: str) -> None:
        self._check_name(name)
        if self._is_file and self._shards - {name}:
            raise InputError(f"{self.out} is one file and cannot hold several shards: plan it without a shard size")

    def check_sidecar(self, name: str) -> None:
        """Raises what `write_file` would about this name, before work is spent on it."""
        self._check_name(name, depth=1 if self._is_file else 2)
        if name in self._shards:
            raise InputError(f"{name!r} is the name of a shard and cannot be that of another output file")
        if self._is_file and not self.overwrite and (place := _beside(self.out, name)).exists():
            raise InputError(f"{place} already exists: move it away, or pass overwrite (--overwrite) to replace it")

    def _store(self, name: str, chunks: Iterable[memoryview | bytes]) -> str:
        """Writes a file to the output, once it is complete, and returns its sha256."""
        unfinished, finished = self.partial / "unfinished" / name, self.folder / name
        digest = hashlib.sha256()
        with self._storing(finished):
            for folder in (unfinished.parent, finished.parent):
                folder.mkdir(exist_ok=True)
            file = open(unfinished, "wb", buffering=0)  # noqa: SIM115 - closed below, where errors are told apart
        with file, ThreadPoolExecutor(1) as hasher:
            for chunk in chunks:  # may itself fail, which is not about this file
                data = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
                hashing = hasher.submit(digest.update, data)
                with self._storing(finished):
                    while data:
                        data = data[os.write(file.fileno(), data) :]
                hashing.result()
            with self._storing(finished):
                os.fsync(file.fileno())
                unfinished.replace(finished)
                sync_directory(finished.parent)
        return digest.hexdigest()


def _exactly(shard: Shard, chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """Yields a shard's header and data; another number of bytes than its tensors have is an error."""
    yield shard.header
    size = 0
    for chunk in chunks:
        size += memoryview(chunk).nbytes
        if size > shard.data_size:
            break
        yield chunk
    if size != shard.data_size:
        made = f"more than {shard.data_size}" if size > shard.data_size else str(size)
        raise ExactnessError(f"{shard.name}: {made} bytes of data were made, but its tensors have {shard.data_size}")


def _blocks(source: Path) -> Iterator[bytes]:
    try:
        with open(source, "rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        raise StorageError(
            f"{source}: reading failed ({error.strerror or error}): restore it, and run again"
        ) from error


# -- places -----------------------------------------------------------------------------------------------------------


def _absolute(path: Path) -> Path:
    # The last name is not resolved: replacing a link is not replacing what it points to.
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _refuse_place(out: Path) -> None:
    """Raises an `InputError` for a place that no output may take, whatever is there."""
    here = []
    for place in (Path.cwd, Path.home):
        with suppress(OSError, RuntimeError):  # a removed working directory, a user without a home
            here.append(place().resolve())
    if any(out.resolve() in (place, *place.parents) for place in here):
        raise InputError(f"{out} is the current or home directory or one that these are in: choose another output")
    if out.is_symlink():
        raise InputError(f"{out} is a symbolic link: give the path it points to, or remove the link")


def _refuse_existing(out: Path, overwrite: bool) -> None:
    """Raises an `InputError` for something that is there and may not be replaced."""
    if not out.exists():
        return
    is_file = out.name.endswith(".safetensors")
    if not (out.is_file() if is_file else out.is_dir()):
        raise InputError(
            f"{out} is there, but is not what an output is: one file if its name ends in .safetensors, else a directory"
        )
    if not overwrite:
        raise InputError(f"{out} already exists: choose another output, or pass overwrite (--overwrite) to replace it")
    if is_file:
        return
    items = list(out.iterdir())
    folders = sorted(item.name for item in items if item.is_dir() and not is_module_folder(item))
    if items and (folders or not any(item.suffix == ".safetensors" for item in items)):
        why = f"it holds the folder {folders[0]!r}" if folders else "it holds files but no *.safetensors"
        raise InputError(f"{out} does not look like a checkpoint ({why}), and is never replaced: remove it yourself")


# -- the directory of work in progress --------------------------------------------------------------------------------


def _partial(out: Path) -> Path:
    return out.parent / f"{out.name}.partial"


def _beside(out: Path, name: str) -> Path:
    """Returns where a file beside an output in one file goes."""
    return out.with_name(f"{out.name.removesuffix('.safetensors')}.{name}")


@contextmanager
def _storing(path: Path, partial: Path) -> Iterator[None]:
    """Turns a failure to write `path` into a `StorageError` that says what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if not partial.exists():
            raise StorageError(
                f"{partial}: cannot be created ({error.strerror or error}): "
                f"make sure that {partial.parent} can be written to, or choose another output"
            ) from error
        why = error.strerror or error
        raise StorageError(f"{path}: writing failed ({why}): {remedy(error)} and run the same command again") from error


def _lock(partial: Path) -> BaseFileLock:
    """Creates the directory if need be, and locks it against other processes."""
    refusal = (
        f"another process is writing this output (it works in {partial}): wait until it is done, or choose "
        "another output"
    )
    while True:
        refuse_link(partial)
        try:
            partial.mkdir(exist_ok=True)
        except FileExistsError:
            raise InputError(f"{partial} is a file, but the work in progress goes there: move it away") from None
        with suppress(FileNotFoundError):  # its owner has just finished and removed the directory
            items = list(partial.iterdir())
            for item in items:
                refuse_link(item)
            if items and partial / "tmx.lock" not in items:
                raise InputError(f"{partial} exists and is not work in progress of a merge: move it away")
            return acquire_lock(partial / "tmx.lock", refusal)


def _settle(partial: Path, out: Path) -> None:
    """Ends a commit: puts the files of an output in one file into their places, or puts a directory back."""
    commit, replaced = partial / "commit", partial / "replaced"
    if replaced.is_dir() and not out.exists():
        replaced.rename(out)
    if (commit / _MODEL).exists():
        for sidecar in (item.name for item in commit.iterdir() if item.name != _MODEL):
            _beside(out, sidecar).unlink(missing_ok=True)
        (commit / _MODEL).replace(out)
    for item in commit.iterdir() if commit.is_dir() else ():
        item.replace(_beside(out, item.name))


def _clear(partial: Path) -> None:
    """Removes the directory with all that is in it, the lock file last."""
    for item in partial.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != "tmx.lock":
            item.unlink()
    (partial / "tmx.lock").unlink(missing_ok=True)
    with suppress(OSError):  # another process has already begun anew in it
        partial.rmdir()
