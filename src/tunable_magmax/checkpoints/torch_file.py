"""One file written by `torch.save`: only tensors are loaded from it, never code.

The file is mapped by torch, which costs no memory until pages are touched. Where the operating system tells at which
bytes of the file a tensor lies, they are read by position and the mapping stays untouched: touching it after the file
was cut short would kill the process.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.descriptors import PositionedFile
from tunable_magmax.checkpoints.tensors import LONGEST_NAME, MOST_DIMENSIONS, TensorInfo, dtype_code
from tunable_magmax.errors import InputError, shortened, some_of
from tunable_magmax.files import show_size

if TYPE_CHECKING:
    import torch

WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Keys under which training scripts keep the state dict beside an optimizer, an epoch and the like."""

_GATHER = 1 << 18  # elements of a non-contiguous tensor gathered at once
_PIECE = 1 << 20  # bytes read for them at once
_MOST_PACKED = 16  # times that a compressed file may grow in memory
# Constructors of byte arrays; where tensors are not looked up in the file, those of tensors, too.
_AMPLIFIERS = {True: re.compile(rb"bytearray"), False: re.compile(rb"bytearray|torch\n\w*Tensor\n|UntypedStorage\n")}
_GAP = 1 << 15  # bytes between two of them that are read along, since another read would take longer


class TorchFile(Checkpoint):
    """A checkpoint in one file of `torch.save`: a state dict, or a dict that holds one under a key of `WRAPPERS`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._file = PositionedFile(path)
        try:
            mapped = _can_be_mapped(path)
            _refuse_amplifiers(path, mapped)
            state_dict = _state_dict(path, _load(path, mapped))
            self._tensors, aliases = _distinct(state_dict)
            self._mapping = _FileMapping(path) if mapped else None
            self._refuse_without_data()
            self._file.refuse_changed()  # torch opened it by its name
        except BaseException:
            self._file.close()
            raise
        self.aliases: Mapping[str, str] = MappingProxyType(aliases)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                name: TensorInfo(name, dtype_code(tensor.dtype) or "", tuple(tensor.shape))
                for name, tensor in self._tensors.items()
            }
        )

    def _refuse_without_data(self) -> None:
        """Raises an `InputError` for tensors that are not in the file: they would be whatever was in memory."""
        if self._mapping is None or not self._mapping.known:
            return
        strange = [
            name
            for name, tensor in self._tensors.items()
            if tensor.numel() and not tensor.is_complex()  # which may have been resolved to memory
            if self._mapping.position(tensor.data_ptr(), _span(tensor)) is None
        ]
        if strange:
            raise InputError(f"{self.path}: has no data for {some_of(strange, 20, show=repr)}: save it again")

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        target = self._target(name, offset, buffer)
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.path}: the checkpoint is closed")
        if target.nbytes == 0:
            return
        span = _span(tensor)
        position = None if self._mapping is None else self._mapping.position(tensor.data_ptr(), span)
        if position is None:
            _gather(tensor, offset, target)
        elif tensor.is_contiguous():
            self._file.read_into(position + offset, target)
        else:
            _gather_from(self._file, position, tensor, offset, target)

    def refuse_changed(self) -> None:
        self._file.refuse_changed()

    def digests(self) -> dict[Path, str]:
        return {self.path: self._file.sha256()}

    def close(self) -> None:
        self._tensors = {}
        self._file.close()


def _can_be_mapped(path: Path) -> bool:
    """Whether torch can map the file: a zip archive, none of it compressed (torch would map the compressed bytes)."""
    unpacked, size = unpacked_size(path), path.stat().st_size
    if unpacked is None:
        return True
    if unpacked > _MOST_PACKED * size + _GAP:
        raise InputError(
            f"{path}: is compressed and would take {show_size(unpacked)} of memory for a file of {show_size(size)}, "
            "which no weights do: refused; have it saved without compression, as torch.save does"
        )
    return False


def unpacked_size(path: Path) -> int | None:
    """Returns the bytes that an archive's files have unpacked: None if none is compressed, 0 if it is no archive."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return 0
        with zipfile.ZipFile(path) as archive:
            items = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return 0
    plain = all(item.compress_type == zipfile.ZIP_STORED for item in items)
    return None if plain else sum(item.file_size for item in items)


def _refuse_amplifiers(path: Path, mapped: bool) -> None:
    """Raises an `InputError` for objects that need no data in the file for any amount of memory.

    torch's loader makes them, and no state dict has one. Their names are looked for in the pickle, which holds them in
    clear; where it is not known which part of the file that is, in all of it.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                pickles = [item for item in archive.infolist() if item.filename.endswith("data.pkl")]
                found = any(_AMPLIFIERS[mapped].search(archive.read(item)) for item in pickles)
        else:
            with open(path, "rb") as file:
                found, tail = False, b""
                while not found and (block := file.read(_PIECE)):
                    found, tail = _AMPLIFIERS[mapped].search(tail + block) is not None, block[-64:]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError, zlib.error):
        return  # torch says what is wrong
    if found:
        raise InputError(
            f"{path}: asks for memory that no data in it fills. It was refused: save the tensors alone, as a state "
            "dict or better as safetensors"
        )


def _load(path: Path, mapped: bool) -> object:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old pickles; what matters is an error or is not
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        # torch's own text tells how to run the code after all, so none of it may reach the user.
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is not None:
            raise InputError(
                f"{path}: holds the Python object {code[1]}, which runs code when it is loaded. It was refused and "
                "nothing was run: have its author save the tensors alone, as a state dict or better as safetensors"
            ) from None
        if isinstance(error, pickle.UnpicklingError) or "TorchScript" in str(error):
            raise InputError(
                f"{path}: is not a plain torch checkpoint of tensors, or it is damaged. It was refused and nothing was "
                "run: save the tensors alone, as a state dict or better as safetensors"
            ) from None
        raise InputError(
            f"{path}: the torch file is damaged or cut short ({_first_line(error)}): download or save it again"
        ) from None


def _quoted(key: object) -> str:
    return shortened(repr(key), limit=200)


def _first_line(error: Exception) -> str:
    return shortened((str(error).strip() or type(error).__name__).splitlines()[0], limit=120)


def _state_dict(path: Path, loaded: object) -> dict[str, torch.Tensor]:
    """The one dict of tensors in what was loaded; anything that leaves a choice is refused, not guessed."""
    import torch

    hint = f"expected tensors by name, at top level or under {', '.join(map(repr, WRAPPERS))}"
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path}: holds a {type(loaded).__name__}, {hint}: save model.state_dict()")
    wrappers = [key for key in WRAPPERS if isinstance(loaded.get(key), Mapping) and _has_tensors(loaded[key])]
    loose = [key for key, value in loaded.items() if isinstance(value, torch.Tensor)]
    if not wrappers and not loose:
        keys = some_of(loaded, 20, show=_quoted) or "nothing"
        raise InputError(f"{path}: {hint}, found {keys}: save model.state_dict()")
    if len(wrappers) > 1 or (wrappers and loose):
        places = [f"under {key!r}" for key in wrappers] + [f"at top level ({_quoted(key)})" for key in loose[:1]]
        raise InputError(
            f"{path}: holds tensors {' and '.join(places)}: which are the model's is not for us to guess, "
            "save its state dict alone"
        )
    chosen = loaded[wrappers[0]] if wrappers else loaded
    faults = [f"{_quoted(key)} ({fault})" for key, value in chosen.items() if (fault := _fault(key, value))]
    if faults:
        raise InputError(
            f"{path}: cannot use {some_of(faults, limit=20)}: save these as plain dense tensors or leave them out"
        )
    return {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in chosen.items()}


def _has_tensors(values: Mapping[Any, Any]) -> bool:
    import torch

    return any(isinstance(value, torch.Tensor) for value in values.values())


def _fault(key: object, value: object) -> str | None:
    import torch

    if not isinstance(key, str):
        return f"its name is a {type(key).__name__}, not a text"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}, not a tensor"
    assert isinstance(value, torch.Tensor)
    if len(key) > LONGEST_NAME:
        return f"its name has {len(key):,} characters"
    if value.dim() > MOST_DIMENSIONS:
        return f"it has {value.dim():,} dimensions"
    if value.is_quantized:
        return "a quantised tensor"
    if value.layout != torch.strided or value.is_nested:
        return "a sparse tensor"
    if value.is_meta:
        return "a tensor without data"
    if dtype_code(value.dtype) is None:
        return f"dtype {value.dtype}, which safetensors has not"
    return None


def _distinct(state_dict: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors under their first name, and the further names of those tied to them."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state_dict.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        kept = first.setdefault(place, name) if tensor.numel() else name
        if kept == name:
            tensors[name] = tensor
        else:
            aliases[name] = kept
    return tensors, aliases


def _gather(tensor: torch.Tensor, offset: int, target: memoryview) -> None:
    """Copies bytes of a tensor, counted in row-major order; of a transposed or sliced one some elements at a time."""
    import torch

    width, stop = tensor.element_size(), offset + target.nbytes
    if tensor.is_contiguous():
        # The stride of a dimension of size 1 can be anything, which `view` to another type does not forgive.
        _copy(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[offset:stop], target)
        return
    # Integers of the same size, since `take` does not know all types.
    numbers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    done = 0
    for start in range(offset // width, -(-stop // width), _GATHER):
        elements = torch.take(numbers, torch.arange(start, min(start + _GATHER, tensor.numel())))
        data = elements.view(torch.uint8)[max(0, offset - start * width) : stop - start * width]
        _copy(data, target[done : done + data.numel()])
        done += data.numel()


def _copy(source: torch.Tensor, target: memoryview) -> None:
    import torch

    torch.frombuffer(target, dtype=torch.uint8).copy_(source)


def _span(tensor: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to its last; it must have one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


def _gather_from(file: PositionedFile, position: int, tensor: torch.Tensor, offset: int, target: memoryview) -> None:
    """Like `_gather`, from the bytes of the file that begin at `position`: elements close to each other in one read."""
    width, stop = tensor.element_size(), offset + target.nbytes
    kind, piece, done = np.dtype(f"u{width}"), np.empty(_PIECE + width, np.uint8), 0
    for start in range(offset // width, -(-stop // width), _GATHER):
        indices = np.unravel_index(np.arange(start, min(start + _GATHER, tensor.numel())), tuple(tensor.shape))
        steps = [stride * width for stride in tensor.stride()]
        places = np.sum([index * step for index, step in zip(indices, steps, strict=True)], axis=0)
        order = np.argsort(places, kind="stable")
        places = places[order]
        elements = np.empty(len(order), kind)
        cuts = np.flatnonzero((np.diff(places) > _GAP) | (np.diff(places // _PIECE) > 0)) + 1
        for first, last in itertools.pairwise((0, *cuts.tolist(), len(order))):
            begin, end = int(places[first]), int(places[last - 1]) + width
            file.read_into(position + begin, piece[: end - begin].data)
            elements[order[first:last]] = piece[: end - begin].view(kind)[(places[first:last] - begin) // width]
        data = elements.view(np.uint8)[max(0, offset - start * width) : stop - start * width]
        target[done : done + data.size] = data.data
        done += data.size


class _FileMapping:
    """The mappings of one file into this process, as Linux lists them; none are known on other systems."""

    def __init__(self, path: Path) -> None:
        self._ranges = _mapped_ranges(path) if sys.platform == "linux" else []

    @property
    def known(self) -> bool:
        return bool(self._ranges)

    def position(self, address: int, size: int) -> int | None:
        """Returns where in the file the `size` bytes at `address` are; None if they are not known to be mapped."""
        for start, stop, offset in self._ranges:
            if start <= address and address + size <= stop:
                return offset + address - start
        return None


def _mapped_ranges(path: Path) -> list[tuple[int, int, int]]:
    """Returns (start, stop, position in the file) of each mapping of the file."""
    status = path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    name = str(path.resolve())
    ranges = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, offset, on, inode, *rest = line.rstrip("\n").split(maxsplit=5)
            # Some file systems (btrfs) show another device here than to stat; then the name must be the same.
            if int(inode) == status.st_ino and (on == device or rest == [name]):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                ranges.append((start, stop, int(offset, 16)))
    return ranges
