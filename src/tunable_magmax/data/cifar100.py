"""Opens CIFAR-100: as parquet, or as the official python distribution, in a folder or packed."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.images import pillow
from tunable_magmax.data.options import DataOptions, Split
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import show_size

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_FILES = ("train", "test", "meta")
_ARCHIVE = "cifar-100-python.tar.gz"
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


def open_cifar100(options: DataOptions) -> Split:
    """Opens CIFAR-100 in whichever form is there. Labels are the fine ones."""
    path = options.path
    if path.is_file():
        return _archive(path)
    folders = [path / name for name in ("", "data", "cifar100", "cifar-100-python")]
    for folder in folders:
        if any(folder.glob("train*.parquet")) and any(folder.glob("test*.parquet")):
            return Split(
                open_samples(folder, "train"), open_samples(folder, "test"), {"form": "parquet", "split": "as found"}
            )
    for folder in folders:
        if all((folder / name).is_file() for name in _FILES):
            return _python(folder, {name: (folder / name).read_bytes() for name in _FILES})
    if (path / _ARCHIVE).is_file():
        return _archive(path / _ARCHIVE)
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
            raise InputError(f"{origin}: refused, a pickle of more than lists and NumPy arrays ({module}.{name})")

    try:
        values = Reader(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise InputError(f"{origin}: holds a {type(values).__name__}, expected a dict with names as keys")
        arrays = {key: _array(value) if isinstance(value, Recorded) else value for key, value in values.items()}
        for key, value in arrays.items():
            plain = value if isinstance(value, list) else [value]
            if not isinstance(value, np.ndarray) and not all(type(item) in (int, str, bytes) for item in plain):
                raise InputError(f"{origin}: {key!r} is neither an array of bytes nor a list of numbers or names")
        return arrays
    except InputError as error:
        raise InputError(f"{error}; {_INSTEAD}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(
            f"{origin}: not a readable pickle of CIFAR's python distribution ({error}); {_INSTEAD}"
        ) from None


def _array(recorded: Any) -> NDArray[np.uint8]:
    """Makes an array from its pickled state: a version, the shape, type, whether by columns, and the bytes."""
    _, shape, kind, by_columns, data = recorded.state
    if kind.args[0] != "u1":
        raise ValueError(f"an array of {kind.args[0]!r}, expected bytes")
    if kind.args not in (("u1",), ("u1", 0, 1)) or kind.state not in ((), _BYTES):
        raise ValueError("an array whose type is more than bytes")
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"an array of the shape {shape!r}")
    if type(data) not in (bytes, str):
        raise ValueError(f"an array made from a {type(data).__name__}")
    values = np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8)
    return values.reshape(shape, order="F" if by_columns else "C")


def _samples(origin: str, content: bytes, classes: Sequence[str]) -> Samples:
    """Makes samples of a file of labels and raw pixels [n, 3 * side * side], one colour after the other."""
    values = read_cifar_pickle(content, origin)
    labels, pixels = values.get("fine_labels"), values.get("data")
    numbers = isinstance(labels, list) and bool(labels) and all(type(label) is int for label in labels)
    if labels is None or not numbers or not isinstance(pixels, np.ndarray):
        raise InputError(f"{origin}: expected 'fine_labels' (a list) and 'data' (bytes); found {', '.join(values)}")
    if pixels.shape != (len(labels), _PIXELS):
        raise InputError(
            f"{origin}: 'data' is {list(pixels.shape)}, but there are {len(labels)} labels, and a sample is "
            f"{_PIXELS} bytes"
        )
    outside = [k for k, label in enumerate(labels) if not 0 <= label < len(classes)]
    if outside:
        raise InputError(
            f"{origin}: {len(outside)} labels are outside the {len(classes)} class names, the first is "
            f"{labels[outside[0]]} (sample {outside[0] + 1}); the files must come from one distribution"
        )

    def load(positions: Sequence[int]) -> Iterator[Any]:
        module = pillow()
        for position in positions:
            planes = pixels[position].reshape(3, _SIDE, _SIDE)
            yield module.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    return Samples(origin, "image", len(labels), load, tuple(classes), tuple(labels))
