"""The pickles of CIFAR's python distribution, read without running anything that they say.

Torch's weights-only unpickler calls nothing that is not on its list, to which NumPy's array is added here. It knows no
strings of python 2 longer than 255 bytes, which is what the pixels are kept in; those are first rewritten as unicode
strings of the same characters, which NumPy takes for bytes again.
"""

from __future__ import annotations

import io
import pickletools
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

from tunable_magmax.errors import InputError

INSTEAD = "use the binary distribution (cifar-100-binary.tar.gz) or the parquet files instead"
REBUILDS = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
"""NumPy's function that rebuilds arrays, in versions before and from 2.0."""


def read_cifar_pickle(content: bytes, origin: str) -> Mapping[str, Any]:
    """The dict that a file of the python distribution holds."""
    from torch._weights_only_unpickler import Unpickler

    try:
        with warnings.catch_warnings(), _arrays_allowed() as rebuild:
            warnings.simplefilter("error")
            reader: Any = Unpickler(io.BytesIO(_translated(content, rebuild)), encoding="latin1")
            found = reader.load()
    except UnpicklingError as error:
        said = str(error).split(". ")[0]
        raise InputError(
            f"{origin}: refused, a pickle of more than lists and NumPy arrays ({said}); {INSTEAD}"
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise InputError(
            f"{origin}: not a readable pickle of CIFAR's python distribution ({error}); {INSTEAD}"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(f"{origin}: holds a {type(found).__name__}, expected a dict with names as keys; {INSTEAD}")
    return found


@contextmanager
def _arrays_allowed() -> Iterator[Callable[..., Any]]:
    """Torch's list with what an array of bytes is rebuilt from, and as it was afterwards; gives NumPy's function."""
    import numpy as np
    from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

    rebuild: Callable[..., Any] = np.empty(0, np.uint8).__reduce__()[0]  # type: ignore[assignment]
    before = get_safe_globals()
    add_safe_globals([rebuild, np.ndarray, np.dtype, type(np.dtype(np.uint8))])
    try:
        yield rebuild
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _translated(content: bytes, rebuild: Callable[..., Any]) -> bytes:
    """The same pickle with long strings of python 2 as unicode, and `rebuild` under today's name. Nothing is run."""
    parts: list[bytes | memoryview] = []
    copied = 0
    source = memoryview(content)
    for opcode, value, position in pickletools.genops(content):
        assert position is not None
        if opcode.name == "BINSTRING":
            assert isinstance(value, str)
            text = value.encode("utf-8")  # its bytes as Latin-1 characters
            parts += [source[copied:position], b"X" + struct.pack("<I", len(text)), text]
            copied = position + 5 + len(value)
        elif opcode.name == "GLOBAL" and value in REBUILDS:
            assert isinstance(value, str)
            parts += [source[copied:position], f"c{rebuild.__module__}\n{rebuild.__name__}\n".encode()]
            copied = position + 1 + len(value) + 1  # the letter, both names, and the ends of their lines
    return b"".join([*parts, source[copied:]])
