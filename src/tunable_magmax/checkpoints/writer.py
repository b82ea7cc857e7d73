"""Writes a checkpoint that appears whole or not at all, and continues interrupted work."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tunable_magmax.checkpoints.companions import is_module_folder
from tunable_magmax.checkpoints.partial import Partial
from tunable_magmax.checkpoints.shards import Shard
from tunable_magmax.errors import ExactnessError, InputError, StorageError
from tunable_magmax.files import is_plain_name, sync_directory

_TORCH_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})


def is_one_file(out: Path) -> bool:
    """Whether `out` is one file and not a directory. The name of a torch file, which is never written, is refused.

    >>> is_one_file(Path("merged.safetensors")), is_one_file(Path("merged-0.5"))
    (True, False)
    """
    if looks_like_torch(out):
        raise InputError(
            f"{out} looks like a torch file, but an output is a directory, or one file if its name ends in "
            f".safetensors: give -o {out.with_suffix('.safetensors')} or -o {out.with_suffix('')}"
        )
    return out.name.endswith(".safetensors")


def looks_like_torch(out: Path) -> bool:
    """Whether somebody who gives this name expects a torch file, and would be surprised by a directory."""
    return out.suffix.lower() in _TORCH_SUFFIXES


def absolute(path: Path) -> Path:
    """Returns the path from the root."""
    # The last name is not resolved: replacing a link is not replacing what it points to.
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def refuse_place(out: Path) -> None:
    """Raises an `InputError` for a place that no output may take, whatever is there."""
    here = []
    for place in (Path.cwd, Path.home):
        with suppress(OSError, RuntimeError):  # a removed working directory, a user without a home
            here.append(place().resolve())
    if any(out.resolve() in (place, *place.parents) for place in here):
        raise InputError(
            f"{out} is the current or home directory or one that these are in, which no output may replace: "
            "choose another output"
        )
    if out.is_symlink():
        raise InputError(f"{out} is a symbolic link: give the path it points to, or remove the link")


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raises an `InputError` for something that is there and may not be replaced."""
    if not out.exists():
        return
    is_file = out.name.endswith(".safetensors")
    if is_file and not out.is_file():
        raise InputError(
            f"{out} is a directory, but a name that ends in .safetensors means one file: choose another output"
        )
    if not is_file and not out.is_dir():
        raise InputError(
            f"{out} is a file, but the output is a directory unless its name ends in .safetensors: choose another"
        )
    if not overwrite:
        raise InputError(f"{out} already exists: choose another output, or pass overwrite (--overwrite) to replace it")
    if is_file:
        return
    items = list(out.iterdir())
    folders = sorted(item.name for item in items if item.is_dir() and not is_module_folder(item))
    if items and (folders or not any(item.suffix == ".safetensors" for item in items)):
        why = f"it holds the folder {folders[0]!r}" if folders else "it holds files but no *.safetensors"
        raise InputError(
            f"{out} does not look like a checkpoint ({why}), so it is not replaced even with overwrite (--overwrite): "
            "choose another output, or remove it yourself"
        )


_BLOCK = 1 << 20


class Output:
    """A checkpoint being written: a directory, or one file if `out` ends in `.safetensors`.

    All work happens in the directory `<out>.partial` beside it; `commit` makes it visible by a rename. Leaving the
    context without a commit keeps finished shards there, and an `Output` of the same `fingerprint` (JSON: options and
    what identifies the inputs) goes on from them. `fresh` discards them, `overwrite` allows to replace an older output.

    >>> import tempfile
    >>> from tunable_magmax.checkpoints.shards import plan_shards
    >>> from tunable_magmax.checkpoints.tensors import TensorInfo
    >>> [shard] = plan_shards([TensorInfo("w", "U8", (3,))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Output(Path(folder) / "merged", {"seed": 0}) as output:
    ...         sha256 = output.finished(shard) or output.write_shard(shard, [b"abc"])
    ...         sha256 = output.write_file("report.json", b"{}")
    ...         output.commit()
    ...     sorted(path.name for path in Path(folder).glob("**/*"))
    ['merged', 'model.safetensors', 'report.json']
    """

    def __init__(
        self, out: str | Path, fingerprint: Mapping[str, object], *, overwrite: bool = False, fresh: bool = False
    ) -> None:
        self.out = absolute(Path(out))
        self.overwrite = overwrite
        self._is_file = self.out.name.endswith(".safetensors")
        self._shards: dict[str, str] = {}
        self._sidecars: dict[str, str] = {}
        refuse_place(self.out)
        self._partial = Partial.of(self.out)
        try:
            with self._partial.storing(self._partial.path):
                if self._partial.path.exists():
                    # An interrupted commit may have left the old output aside: without this it would seem not to exist.
                    self._partial.lock()
                    self._partial.settle()
                refuse_existing(self.out, overwrite)
                self._create_parent()
                self._partial.lock()
                self._partial.start(fingerprint, fresh)
        except BaseException:
            with suppress(OSError):
                self._partial.leave()
            raise

    @staticmethod
    def check(out: str | Path, overwrite: bool = False) -> None:
        """Raises what the constructor would about this place, without touching it."""
        place = absolute(Path(out))
        refuse_place(place)
        refuse_existing(place, overwrite)

    @staticmethod
    def check_unfinished(out: str | Path, fingerprint: Mapping[str, object], fresh: bool = False) -> None:
        """Raises what the constructor would about unfinished work beside this place, without touching it."""
        Partial.of(absolute(Path(out))).check(fingerprint, fresh)

    @staticmethod
    def has_unfinished(out: str | Path) -> bool:
        """Says whether there is unfinished work beside this place, or what a commit that was killed left there."""
        return Partial.of(absolute(Path(out))).path.exists()

    @staticmethod
    def unfinished_bytes(out: str | Path) -> int:
        """Returns the bytes of unfinished work beside this place, for which the next run needs no more room."""
        return Partial.of(absolute(Path(out))).bytes_on_disk()

    @property
    def partial(self) -> Path:
        """The directory of the work in progress."""
        return self._partial.path

    @property
    def folder(self) -> Path:
        """The directory of the finished files, out of sight until the commit."""
        return self._partial.output

    def finished(self, shard: Shard) -> str | None:
        """Returns the sha256 of a shard that was completed before, or None if it has to be written (again)."""
        self._check_shard(shard.name)
        entry = self._partial.journal.get(shard.name)
        if entry is None:
            return None
        try:
            with open(self._partial.output / shard.name, "rb") as file:
                if file.read(len(shard.header)) != shard.header:
                    return None
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return None
        if entry != {"size": shard.size, "sha256": sha256}:
            return None
        self._shards[shard.name] = sha256
        return sha256

    def write_shard(self, shard: Shard, chunks: Iterable[memoryview | bytes]) -> str:
        """Writes a shard from its data in order, in chunks of any size, and returns the sha256 of the file.

        A number of bytes that is not exactly `shard.data_size` is an `ExactnessError`, and the shard is not kept.
        """
        self._check_shard(shard.name)
        sha256 = self._store(shard.name, _exactly(shard, chunks))
        with self._partial.storing(self._partial.path):
            self._partial.record(shard.name, shard.size, sha256)
        self._shards[shard.name] = sha256
        return sha256

    def begin_shard(self, shard: Shard, attempt: str) -> Path:
        """Makes a file of the shard's size with its header, for other processes to write the data into.

        `attempt` is in its name: what a process of an earlier attempt may still write goes to another file.
        """
        self._check_shard(shard.name)
        path = self._partial.unfinished / f"{attempt}.{shard.name}"
        with self._partial.storing(path), open(path, "wb") as file:
            file.write(shard.header)
            file.truncate(shard.size)
            file.flush()
            os.fsync(file.fileno())
        return path

    def finish_shard(self, shard: Shard, path: Path, sha256: str) -> None:
        """Keeps a file of `begin_shard` whose data is complete and on disk."""
        self._check_shard(shard.name)
        with self._partial.storing(path):
            path.replace(self._partial.output / shard.name)
            sync_directory(self._partial.output)
            self._partial.record(shard.name, shard.size, sha256)
        self._shards[shard.name] = sha256

    def write_file(self, name: str, data: bytes) -> str:
        """Puts a file beside the shards (beside a single output file as `<stem>.<name>`) and returns its sha256.

        In a directory, `folder/file` is a name as well.
        """
        self.check_sidecar(name)
        self._sidecars[name] = self._store(name, [data])
        return self._sidecars[name]

    def copy_file(self, name: str, source: Path) -> str:
        """Like `write_file`, with the content of another file."""
        self.check_sidecar(name)
        self._sidecars[name] = self._store(name, _content(source))
        return self._sidecars[name]

    def scratch(self, name: str) -> Path:
        """Returns a path for a file that the work needs and the output does not; it lasts until the commit."""
        self._check_name(name)
        return self._partial.scratch / name

    def commit(self) -> None:
        """Makes the output visible. A process killed at any moment leaves all of it or nothing of it."""
        if not self._shards:
            raise ExactnessError(f"{self.out}: nothing was written, so there is nothing to commit")
        with self._partial.storing(self.out):
            self._remove_unknown()
            sync_directory(self._partial.output)
            refuse_existing(self.out, self.overwrite)  # it may have appeared meanwhile
            self._partial.publish(self._moves())
        with suppress(OSError):  # the output is complete; the next run removes what is left
            self._partial.remove()

    def _remove_unknown(self) -> None:
        """Removes what an earlier run left that this one has not made."""
        known = {*self._shards, *self._sidecars}
        folders = {name.partition("/")[0] for name in known if "/" in name}
        for item in self._partial.output.iterdir():
            if not item.is_dir():
                if item.name not in known:
                    item.unlink()
            elif item.name not in folders:
                shutil.rmtree(item)
            else:
                for file in item.iterdir():
                    if f"{item.name}/{file.name}" not in known:
                        file.unlink()
                sync_directory(item)

    def discard(self) -> None:
        """Removes all work in progress, for input that proved bad."""
        with self._partial.storing(self._partial.path):
            self._partial.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._partial.release()

    def _create_parent(self) -> None:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InputError(f"{self.out}: {self.out.parent} is not a directory: choose another output") from None

    def _moves(self) -> list[tuple[Path, Path]]:
        """Returns sources and targets of the renames that make the output visible, the model last."""
        if not self._is_file:
            return [(self._partial.output, self.out)]
        [model] = self._shards
        sidecars = [(self._partial.output / name, self._beside(name)) for name in self._sidecars]
        return [*sidecars, (self._partial.output / model, self.out)]

    def _beside(self, name: str) -> Path:
        return self.out.with_name(f"{self.out.name.removesuffix('.safetensors')}.{name}")

    def _check_name(self, name: str, depth: int = 1) -> None:
        if not self._partial.locked:
            raise ValueError(f"{self.out}: the output is already committed or discarded")
        if not is_plain_name(name, depth):
            raise InputError(f"{name!r} cannot be the name of an output file: expected a plain file name")

    def _check_shard(self, name: str) -> None:
        self._check_name(name)
        if self._is_file and self._shards.keys() - {name}:
            raise InputError(f"{self.out} is one file and cannot hold several shards: plan it without a shard size")

    def check_sidecar(self, name: str) -> None:
        """Raises what `write_file` would about this name, before work is spent on it."""
        self._check_name(name, depth=1 if self._is_file else 2)
        if name in self._shards:
            raise InputError(f"{name!r} is the name of a shard and cannot be that of another output file")
        if self._is_file and not self.overwrite and self._beside(name).exists():
            raise InputError(
                f"{self._beside(name)} already exists: move it away, or pass overwrite (--overwrite) to replace it"
            )

    def _store(self, name: str, chunks: Iterable[memoryview | bytes]) -> str:
        """Writes a file to the output, once it is complete, and returns its sha256."""
        unfinished, finished = self._partial.unfinished / name, self._partial.output / name
        digest = hashlib.sha256()
        try:
            with self._partial.storing(finished):
                for folder in {unfinished.parent, finished.parent}:
                    folder.mkdir(exist_ok=True)
                file = open(unfinished, "wb", buffering=0)  # noqa: SIM115 - closed below, where errors are told apart
            with file, ThreadPoolExecutor(1) as hasher:
                for chunk in chunks:  # may itself fail, which is not about this file
                    data = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
                    hashing = hasher.submit(digest.update, data)
                    with self._partial.storing(finished):
                        _write_all(file.fileno(), data)
                    hashing.result()
                with self._partial.storing(finished):
                    os.fsync(file.fileno())
            with self._partial.storing(finished):
                unfinished.replace(finished)
                sync_directory(finished.parent)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        return digest.hexdigest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


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


def _content(source: Path) -> Iterator[bytes]:
    try:
        with open(source, "rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        raise StorageError(
            f"{source}: reading failed ({error.strerror or error}): restore it and run the same command again"
        ) from error
