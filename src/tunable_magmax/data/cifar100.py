"""Opens CIFAR-100: as parquet, or as the official python distribution, in a folder or packed."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.images import pillow
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import Split, open_samples, open_split
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import show_size

_SIDE = 32
_FILES = ("train", "test", "meta")
_ARCHIVE, _FOLDER = "cifar-100-python.tar.gz", "cifar-100-python"
# The largest file of CIFAR-100 has 155 MB; a small archive may unpack to anything.
_MEMBER_BYTES = 1 << 30
_PICKLED_ARRAYS = frozenset(
    {
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",  # from version 2.0 on
        "numpy.ndarray",
        "numpy.dtype",
    }
)
_BYTES = (3, "|", None, None, None, -1, -1, 0)  # a version, byte order, no parts, sizes by default, no flags
_INSTEAD = "download it again, or use the parquet files"
_FORMS = (
    "expected CIFAR-100 as parquet files (train-*.parquet, test-*.parquet), or as the python distribution "
    f"({', '.join(_FILES)}, or {_ARCHIVE}); image folders are read by name: images"
)


def open_cifar100(path: Path) -> Split:
    """Opens CIFAR-100 in whichever form is there. Labels are the fine ones."""
    if path.is_file():
        return _archive(path)
    split = open_split(path, lambda part: open_samples(path, part))
    if split is not None:
        return replace(split, facts={"form": "parquet", "split": "as found"})
    if (path / _ARCHIVE).is_file():
        return _archive(path / _ARCHIVE)
    folder = next((place for place in (path, path / _FOLDER) if (place / "meta").is_file()), None)
    if folder is not None and all((folder / name).is_file() for name in _FILES):
        return _python(folder, {name: (folder / name).read_bytes() for name in _FILES})
    present = some_of(sorted(item.name for item in path.iterdir()), limit=8)
    raise InputError(f"{path}: {_FORMS}; found {present or 'an empty folder'}")


def _archive(path: Path) -> Split:
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as packed:
            for member in packed:
                name = member.name.rsplit("/", 1)[-1]
                if member.isfile() and name in _FILES:
                    if member.size > _MEMBER_BYTES:
                        raise InputError(
                            f"{path}: {member.name} unpacks to {show_size(member.size)}, more than any file of "
                            f"CIFAR-100 has (at most {show_size(_MEMBER_BYTES)} are read); download it again"
                        )
                    opened = packed.extractfile(member)
                    assert opened is not None
                    members[name] = opened.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        said = str(error).split(":")[0]
        raise InputError(f"{path}: not a readable archive ({said}); {_FORMS}") from None
    if len(members) < len(_FILES):
        raise InputError(f"{path}: {_FORMS}; the archive holds {', '.join(sorted(members)) or 'none of these files'}")
    return _python(path, members)


def _python(root: Path, files: Mapping[str, bytes]) -> Split:
    """Opens the python distribution from the contents of its files."""
    meta = root / "meta"
    classes = read_cifar_pickle(files["meta"], str(meta)).get("fine_label_names")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise InputError(f"{meta}: no list of names under 'fine_label_names'; {_INSTEAD}")
    parts = [_samples(str(root / name), files[name], tuple(classes)) for name in ("train", "test")]
    return Split(parts[0], parts[1], {"form": "python", "split": "as found"})


def read_cifar_pickle(content: bytes, origin: str) -> dict[str, Any]:
    """Reads the dict that a file of the python distribution holds; its arrays must be of bytes.

    The names by which NumPy's arrays are pickled stand for a class that only records what it is given. A pickle that
    names anything else is refused, so that it can neither call nor change any code.
    """

    class Recorded:  # made anew for each file, so that a pickle that changes it changes nothing else
        state: tuple[Any, ...] = ()

        def __init__(self, *args: Any) -> None:
            self.args = args

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            self.state = state

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" in _PICKLED_ARRAYS:
                return Recorded
            raise ValueError(f"refused, a pickle of more than lists and NumPy arrays ({module}.{name})")

    try:
        values = Reader(io.BytesIO(content), encoding="latin1").load()
        return {key: _array(value) if isinstance(value, Recorded) else value for key, value in dict(values).items()}
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(
            f"{origin}: not a readable pickle of CIFAR's python distribution ({error}); {_INSTEAD}"
        ) from None


def _array(recorded: Any) -> NDArray[np.uint8]:
    """Makes an array from its pickled state: a version, the shape, type, whether by columns, and the bytes."""
    _, shape, kind, by_columns, data = recorded.state
    if kind.args not in (("u1",), ("u1", 0, 1)) or kind.state not in ((), _BYTES):
        raise ValueError("an array whose type is more than bytes")
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"an array of the shape {shape!r}")
    if type(data) not in (bytes, str):
        raise ValueError(f"an array made from a {type(data).__name__}")
    values = np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8)
    return values.reshape(shape, order="F" if by_columns else "C")


def _samples(origin: str, content: bytes, classes: tuple[str, ...]) -> Samples:
    """Makes samples of a file of labels and raw pixels [n, 3 * side * side], one colour after the other."""
    values = read_cifar_pickle(content, origin)
    labels, pixels = values.get("fine_labels"), values.get("data")
    if not isinstance(labels, list) or not labels or not all(type(label) is int for label in labels):
        raise InputError(f"{origin}: 'fine_labels' is no list of numbers; {_INSTEAD}")
    if not isinstance(pixels, np.ndarray) or pixels.shape != (len(labels), 3 * _SIDE * _SIDE):
        raise InputError(f"{origin}: 'data' is not {3 * _SIDE * _SIDE} bytes for each of {len(labels)} labels")
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise InputError(f"{origin}: a label is outside the {len(classes)} class names: {min(labels)} to {max(labels)}")

    def load(positions: Sequence[int]) -> Iterator[Any]:
        module = pillow()
        for position in positions:
            planes = pixels[position].reshape(3, _SIDE, _SIDE)
            yield module.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    return Samples(origin, "image", len(labels), load, classes, tuple(labels))
