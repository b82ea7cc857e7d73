"""Opens the official python archive of CIFAR-100, whose pickles are read without running anything in them."""

from __future__ import annotations

import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import memory_samples
from tunable_magmax.errors import InputError

ARCHIVE = "cifar-100-python.tar.gz"
FILES = ("train", "test", "meta")
SHAPE = (3, 32, 32)
LARGEST_FILE = 1 << 30
"""Bytes; the largest of CIFAR-100 has 155 MB. A small archive may unpack to anything."""
ARRAYS = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"}
"""The names by which versions of NumPy pickle arrays."""


def find_archive(path: Path) -> Path | None:
    """Returns the archive that a path is, or that lies in a folder."""
    archive = path / ARCHIVE if path.is_dir() else path
    return archive if archive.is_file() and archive.suffix != ".parquet" else None


def open_archive(path: Path) -> tuple[Samples, Samples]:
    """Opens the training and the test samples of the archive. Labels are the fine ones."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(path) as packed:
            for member in packed:
                name = Path(member.name).name
                if name in FILES and (file := packed.extractfile(member)) is not None:
                    if member.size > LARGEST_FILE:
                        raise ValueError(f"{name} has {member.size:,} bytes, more than any file of CIFAR-100")
                    found[name] = _unpickled(name, file.read())
        classes = tuple(map(str, found["meta"]["fine_label_names"]))
        train, test = (_samples(f"{path}/{name}", found[name], classes) for name in ("train", "test"))
        return train, test
    except Exception as error:  # a damaged archive or pickle can fail in any way
        raise InputError(
            f"{path}: not a readable archive of CIFAR-100 ({error!r}); download it again, or use the parquet files"
        ) from None


class _Recorded:
    """What stands for an array of a pickle: it only records the state that it is given."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


def _unpickled(name: str, content: bytes) -> dict[str, Any]:
    """Reads the dict that a file of the archive holds, with the raw bytes of each array.

    NumPy's names stand for a function, each time a new one, so that a pickle that changes it changes nothing else. One
    that names anything else is refused, so that it can neither call nor change any code.
    """

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, own: str) -> Any:
            if f"{module}.{own}" in ARRAYS:
                return lambda *_: _Recorded()
            raise ValueError(f"{name} is refused, a pickle of more than lists and NumPy arrays ({module}.{own})")

    def raw(value: Any) -> Any:
        if not isinstance(value, _Recorded):
            return value
        *_, by_columns, data = value.state
        if by_columns or type(data) not in (bytes, str):
            raise ValueError(f"{name} has an array that is not of bytes by rows")
        return np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8)

    return {key: raw(value) for key, value in Reader(io.BytesIO(content), encoding="latin1").load().items()}


def _samples(origin: str, values: dict[str, Any], classes: tuple[str, ...]) -> Samples:
    """Makes samples of labels and raw pixels, one colour of an image after the other."""
    labels, pixels = values["fine_labels"], values["data"].reshape(-1, *SHAPE).transpose(0, 2, 3, 1)
    if len(pixels) != len(labels) or not all(type(label) is int and 0 <= label < len(classes) for label in labels):
        raise ValueError(f"{origin} has {len(labels)} labels, of {len(classes)} classes, for {len(pixels)} pictures")
    samples = memory_samples(pixels, "image")
    return replace(samples, origin=origin, classes=classes, labels=tuple(labels))
