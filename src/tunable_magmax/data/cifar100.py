"""Opens CIFAR-100: as parquet, as the python or binary distribution (also packed), or as image folders."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.images import pillow
from tunable_magmax.data.samples import Samples
from tunable_magmax.data.source import open_samples
from tunable_magmax.data.splits import DataOptions, Split
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import show_size

_SIDE = 32
PIXELS = 3 * _SIDE * _SIDE
ROW = 2 + PIXELS  # coarse label, fine label, pixels

BINARY = ("train.bin", "test.bin", "fine_label_names.txt")
PYTHON = ("train", "test", "meta")
# The largest file of CIFAR-100 has 155 MB; a small archive may unpack to anything.
MEMBER_BYTES = 1 << 30
ARCHIVES = ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz")
_PICKLED_ARRAYS = frozenset(
    {
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",  # from version 2.0 on
        "numpy.ndarray",
        "numpy.dtype",
    }
)
_BYTES = (3, "|", None, None, None, -1, -1, 0)  # a version, byte order, no parts, sizes by default, no flags
_INSTEAD = "use the binary distribution (cifar-100-binary.tar.gz) or the parquet files instead"
_FORMS = (
    "expected CIFAR-100 as parquet files (train-*.parquet, test-*.parquet), as the binary distribution (train.bin, "
    "test.bin, fine_label_names.txt), as the python distribution (train, test, meta), as one of their .tar.gz files, "
    "or as image folders (train/CLASS, test/CLASS)"
)


def open_cifar100(options: DataOptions) -> Split:
    """Opens CIFAR-100 in whichever form is there. Labels are the fine ones."""
    path = options.path
    if path.is_file():
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            return _archive(path)
        raise InputError(f"{path}: {_FORMS}")
    inner = ("", "data", "cifar100", "cifar-100-binary", "cifar-100-python")
    folders = [folder for folder in (path / name for name in inner) if folder.is_dir()]
    for folder in folders:
        if any(folder.glob("train*.parquet")) and any(folder.glob("test*.parquet")):
            train, test = (open_samples(folder, split) for split in ("train", "test"))
            return _split(train, test, "parquet")
    for names, form in ((BINARY, "binary"), (PYTHON, "python")):
        for folder in folders:
            if all((folder / name).is_file() for name in names):
                return _distribution(str(folder), names, partial(_file, folder), form)
    for folder in folders:
        if all((folder / name).is_dir() for name in ("train", "test")):
            return _split(open_samples(folder / "train"), open_samples(folder / "test"), "image folders")
    for name in ARCHIVES:
        if (path / name).is_file():
            return _archive(path / name)
    present = some_of(sorted(item.name for item in path.iterdir()), limit=8)
    raise InputError(f"{path}: {_FORMS}; found {present or 'an empty folder'}")


def _file(folder: Path, name: str) -> Any:
    path = folder / name
    # Mapped, so that pixels are read from the disk when they are asked for.
    return np.memmap(path, np.uint8, "r") if path.suffix == ".bin" and path.stat().st_size else path.read_bytes()


def _split(train: Samples, test: Samples, form: str) -> Split:
    return Split(train, test, {"form": form, "split": "as found"})


def _archive(path: Path) -> Split:
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as packed:
            for member in packed:
                name = member.name.rsplit("/", 1)[-1]
                if member.isfile() and name in {*BINARY, *PYTHON}:
                    if member.size > MEMBER_BYTES:
                        raise InputError(
                            f"{path}: {member.name} unpacks to {show_size(member.size)}, more than any file of "
                            f"CIFAR-100 has (at most {show_size(MEMBER_BYTES)} are read); download it again"
                        )
                    opened = packed.extractfile(member)
                    assert opened is not None
                    members[name] = opened.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        said = str(error).split(":")[0]
        raise InputError(f"{path}: not a readable archive ({said}); download it again") from None
    for names, form in ((BINARY, "binary"), (PYTHON, "python")):
        if all(name in members for name in names):
            return _distribution(str(path), names, lambda name: members[name], form)
    raise InputError(f"{path}: {_FORMS}; the archive holds {', '.join(sorted(members)) or 'none of these files'}")


def _distribution(origin: str, names: Sequence[str], read: Callable[[str], Any], form: str) -> Split:
    """Opens the python or binary distribution. `read` returns the bytes of a file by its name, one of `names`."""
    last = f"{origin}/{names[2]}"
    if form == "binary":
        lines = bytes(read(names[2])).decode("utf-8", "replace").split("\n")
        classes: Any = [line.strip() for line in lines if line.strip()]
    else:
        classes = read_cifar_pickle(read(names[2]), last).get("fine_label_names")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise InputError(f"{last}: no list of names under 'fine_label_names'; download it again")
    samples_of = _binary if form == "binary" else _python
    parts = [samples_of(f"{origin}/{name}", read(name)) for name in names[:2]]
    train, test = (
        pixel_samples(f"{origin}/{name}", pixels, labels, tuple(classes))
        for name, (labels, pixels) in zip(names[:2], parts, strict=True)
    )
    return _split(train, test, form)


def _binary(origin: str, content: Any) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    values = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
    if not values.size or values.size % ROW:
        raise InputError(
            f"{origin}: {values.size} bytes are no whole number of samples of {ROW} bytes; download it again"
        )
    rows = values.reshape(-1, ROW)
    return np.array(rows[:, 1]), rows[:, 2:]


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


def _python(origin: str, content: bytes) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    values = read_cifar_pickle(content, origin)
    labels, pixels = values.get("fine_labels"), values.get("data")
    if not isinstance(labels, list) or not labels or not all(type(label) is int for label in labels):
        labels = None
    if labels is None or not isinstance(pixels, np.ndarray):
        raise InputError(f"{origin}: expected 'fine_labels' (a list) and 'data' (bytes); found {', '.join(values)}")
    if pixels.shape != (len(labels), PIXELS):
        raise InputError(
            f"{origin}: 'data' is {list(pixels.shape)}, but there are {len(labels)} labels, and a sample is "
            f"{PIXELS} bytes"
        )
    return np.array(labels), pixels


def pixel_samples(origin: str, pixels: NDArray[np.uint8], labels: NDArray[Any], classes: tuple[str, ...]) -> Samples:
    """Makes samples of raw pixels [n, 3 * side * side]: one colour after the other."""
    outside = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if outside.size:
        raise InputError(
            f"{origin}: {outside.size} labels are outside the {len(classes)} class names, the first is "
            f"{int(labels[outside[0]])} (sample {int(outside[0]) + 1}); the files must come from one distribution"
        )

    def load(positions: Sequence[int]) -> Iterator[Any]:
        module = pillow()
        for position in positions:
            planes = np.asarray(pixels[position]).reshape(3, _SIDE, _SIDE)
            yield module.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))

    return Samples(origin, "image", len(labels), load, classes, tuple(labels.tolist()))
