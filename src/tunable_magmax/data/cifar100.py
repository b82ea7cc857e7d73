"""Opens the official python archive of CIFAR-100, whose pickles are read without running anything in them."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.memory import memory_samples
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size

SIDE = 32
ARCHIVE = "cifar-100-python.tar.gz"
FILES = ("train", "test", "meta")
# The largest file of CIFAR-100 has 155 MB; a small archive may unpack to anything.
MEMBER_BYTES = 1 << 30
PICKLED_ARRAYS = frozenset(
    {
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",  # from version 2.0 on
        "numpy.ndarray",
        "numpy.dtype",
    }
)
INSTEAD = "download it again, or use the parquet files"


def find_archive(path: Path) -> Path | None:
    """Returns the archive that a path is, or that lies in a folder."""
    archive = path / ARCHIVE if path.is_dir() else path
    return archive if archive.is_file() and archive.suffix != ".parquet" else None


def open_archive(path: Path) -> tuple[Samples, Samples]:
    """Opens the training and the test samples of the archive. Labels are the fine ones."""
    members: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(path) as packed:
            for member in packed:
                name = member.name.rsplit("/", 1)[-1]
                opened = packed.extractfile(member) if name in FILES else None
                if opened is None:
                    continue
                if member.size > MEMBER_BYTES:
                    raise InputError(
                        f"{path}: {member.name} unpacks to {show_size(member.size)}, more than any file of CIFAR-100 "
                        f"has (at most {show_size(MEMBER_BYTES)} are read); {INSTEAD}"
                    )
                members[name] = read_cifar_pickle(opened.read(), f"{path}/{name}")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(f"{path}: not a readable archive ({str(error).split(':')[0]}); {INSTEAD}") from None
    classes = members.get("meta", {}).get("fine_label_names")
    if len(members) < len(FILES) or not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise InputError(
            f"{path}: expected the files {', '.join(FILES)}, with a list of names under 'fine_label_names'; {INSTEAD}"
        )
    train, test = (_samples(f"{path}/{name}", members[name], tuple(classes)) for name in ("train", "test"))
    return train, test


def read_cifar_pickle(content: bytes, origin: str) -> dict[str, Any]:
    """Reads the dict that a file of the archive holds, with the raw bytes of each array.

    The names by which NumPy's arrays are pickled stand for a class that only records what it is given. A pickle that
    names anything else is refused, so that it can neither call nor change any code.
    """

    class Recorded:  # made anew for each file, so that a pickle that changes it changes nothing else
        state: tuple[Any, ...] = ()

        def __init__(self, *args: Any) -> None:
            pass

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            self.state = state

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" in PICKLED_ARRAYS:
                return Recorded
            raise ValueError(f"refused, a pickle of more than lists and NumPy arrays ({module}.{name})")

    try:
        values = dict(Reader(io.BytesIO(content), encoding="latin1").load())
        return {key: _bytes(value.state) if isinstance(value, Recorded) else value for key, value in values.items()}
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(f"{origin}: not a readable pickle of CIFAR-100 ({error}); {INSTEAD}") from None


def _bytes(state: tuple[Any, ...]) -> NDArray[np.uint8]:
    """Returns the bytes of an array: the last of a version, the shape, type, whether by columns, and the bytes."""
    by_columns, data = state[-2:]
    if by_columns or type(data) not in (bytes, str):
        raise ValueError("an array that is not of bytes by rows")
    return np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8)


def _samples(origin: str, values: dict[str, Any], classes: tuple[str, ...]) -> Samples:
    """Makes samples of labels and raw pixels, one colour of an image after the other."""
    labels, data = values.get("fine_labels"), values.get("data")
    valid = isinstance(labels, list) and all(type(label) is int and 0 <= label < len(classes) for label in labels)
    if not labels or not valid or not isinstance(data, np.ndarray) or data.size != len(labels) * 3 * SIDE * SIDE:
        raise InputError(
            f"{origin}: expected 'fine_labels', numbers of the {len(classes)} class names, and 'data', "
            f"{3 * SIDE * SIDE} bytes for each; {INSTEAD}"
        )
    pixels: Any = data.reshape(len(labels), 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    samples = memory_samples(pixels, "image")
    return replace(samples, origin=origin, classes=classes, labels=tuple(labels))
