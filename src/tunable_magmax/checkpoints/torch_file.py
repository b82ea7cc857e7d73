"""Opens one file written by `torch.save`. Only tensors are loaded from it, never code.

torch's restricted unpickler makes the tensors on the device `meta`, without values, and says at which byte of the file
each storage begins; values are then read by position. Loaded whole are files in torch's old format (no zip archive),
files with transposed or sliced tensors, and all files where torch does not say where values are (before 2.11).
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.checkpoints.checkpoint import Checkpoint, PositionedFile
from tunable_magmax.checkpoints.tensors import LONGEST_NAME, MOST_DIMENSIONS, TensorInfo, dtype_code
from tunable_magmax.errors import InputError, shortened, some_of

if TYPE_CHECKING:
    import torch

WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Keys under which training scripts keep the state dict beside an optimizer, an epoch and the like."""


class TorchFile(Checkpoint):
    """A checkpoint in one file of `torch.save`: a state dict, or a dict that holds one under a key of `WRAPPERS`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._file = PositionedFile(path)
        self._streamed = _is_archive(path) and _tells_offsets()
        self._tensors, self.aliases = self._load()
        if absent := [name for name, tensor in self._tensors.items() if self._streamed and not self._has_data(tensor)]:
            raise InputError(f"{path}: has no data for {some_of(absent, 20, show=repr)}: save it again")
        views = sum(tensor.nbytes for tensor in self._tensors.values() if not tensor.is_contiguous())
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self._tensors.values())}
        if views > self._file.size or (not self._streamed and sum(storages.values()) > self._file.size):
            raise InputError(
                f"{path}: asks for memory that no data in it fills: save the tensors alone, as safetensors"
            )
        if views and self._streamed:
            self._streamed = False
            self._tensors, self.aliases = self._load()
        self.in_memory = 0 if self._streamed else self._file.size + views
        self._file.refuse_changed()  # torch opened it by its name
        self.tensors = {
            name: TensorInfo(name, dtype_code(tensor.dtype) or "", tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def _load(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Returns the distinct tensors, without values where these are read by position, and the names of others."""
        return _distinct(_state_dict(self.path, _load(self.path, "meta" if self._streamed else "cpu")))

    def _has_data(self, tensor: torch.Tensor) -> bool:
        """Whether the file has all values of a tensor, which may be transposed or sliced."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        size = (1 + sum((count - 1) * step for count, step in steps)) * tensor.element_size()
        begin = _begin(tensor)
        return not tensor.numel() or (begin is not None and 0 <= begin <= self._file.size - size)

    def _read(self, name: str, offset: int, target: memoryview) -> None:
        import torch

        tensor = self._tensors[name]
        if self._streamed:
            self._file.read_into((_begin(tensor) or 0) + offset, target)
            return
        if not tensor.is_contiguous():  # two threads that ask at once make it so twice
            tensor = self._tensors[name] = tensor.contiguous()
        values = tensor.reshape(-1).view(torch.uint8)[offset : offset + target.nbytes]
        torch.frombuffer(target, dtype=torch.uint8).copy_(values)

    def refuse_changed(self) -> None:
        self._file.refuse_changed()

    def close(self) -> None:
        self._tensors = {}


def _is_archive(path: Path) -> bool:
    """Returns whether this is a zip archive; refuses a compressed one, which could unpack to anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError):
        return False  # torch's old format, or damaged: torch says what is wrong
    if packed:
        raise InputError(f"{path}: is compressed, which torch.save never does: save it again with that")
    return True


@cache
def _tells_offsets() -> bool:
    """Whether this torch says where in a file the values of a tensor on the device `meta` are."""
    import torch

    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    return _begin(torch.load(file, map_location="meta", weights_only=True)) is not None


def _begin(tensor: torch.Tensor) -> int | None:
    """Returns the byte of the file at which a tensor begins; None if there is none."""
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return None if offset is None else offset + tensor.storage_offset() * tensor.element_size()


def _load(path: Path, device: str) -> object:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old pickles; what matters is an error or is not
            return torch.load(path, map_location=device, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        # torch's own text tells how to run the code after all, so none of it may reach the user.
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None and not isinstance(error, pickle.UnpicklingError) and "TorchScript" not in str(error):
            reason = shortened((str(error).strip() or type(error).__name__).splitlines()[0], limit=120)
            raise InputError(f"{path}: is damaged or cut short ({reason}): download or save it again") from None
        held = "more than tensors, or it is damaged" if code is None else f"the Python object {code[1]}, which is code"
        raise InputError(f"{path}: holds {held}. Nothing was run: have its author save safetensors") from None


def _state_dict(path: Path, loaded: object) -> dict[str, torch.Tensor]:
    """The one dict of tensors in what was loaded; anything that leaves a choice is refused, not guessed."""
    hint = f"expected tensors by name, at top level or under {', '.join(map(repr, WRAPPERS))}"
    if not isinstance(loaded, Mapping):
        raise InputError(f"{path}: holds a {type(loaded).__name__}, {hint}: save model.state_dict()")
    wrappers = [key for key in WRAPPERS if isinstance(loaded.get(key), Mapping) and _tensors_of(loaded[key])]
    loose = _tensors_of(loaded)
    if not wrappers and not loose:
        keys = some_of(loaded, 20, show=_shown) or "nothing"
        raise InputError(f"{path}: {hint}, found {keys}: save model.state_dict()")
    if len(wrappers) > 1 or (wrappers and loose):
        places = [f"under {key!r}" for key in wrappers] + [f"at top level ({_shown(key)})" for key in loose[:1]]
        raise InputError(f"{path}: holds tensors {' and '.join(places)}: save the model's state dict alone")
    chosen = loaded[wrappers[0]] if wrappers else loaded
    faults = [f"{_shown(key)} ({fault})" for key, value in chosen.items() if (fault := _fault(key, value))]
    if faults:
        raise InputError(f"{path}: cannot use {some_of(faults, limit=20)}: save plain dense tensors alone")
    return {name: tensor.detach() for name, tensor in chosen.items()}


def _tensors_of(values: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys whose values are tensors."""
    import torch

    return [key for key, value in values.items() if isinstance(value, torch.Tensor)]


def _shown(key: object) -> str:
    return shortened(repr(key), limit=200)


def _fault(key: object, value: object) -> str | None:
    import torch

    if not isinstance(key, str):
        return f"its name is a {type(key).__name__}, not a text"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}, not a tensor"
    assert isinstance(value, torch.Tensor)
    if len(key) > LONGEST_NAME or value.dim() > MOST_DIMENSIONS:
        return f"its name has {len(key):,} characters, and it has {value.dim():,} dimensions"
    if value.is_quantized or value.layout != torch.strided or value.is_nested or value.is_conj() or value.is_neg():
        return "a quantised, sparse, nested, conjugated or negated tensor"
    if dtype_code(value.dtype) is None:
        return f"dtype {value.dtype}, which safetensors has not"
    return None


def _distinct(state_dict: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns tensors under their first name, and the further names of those tied to them."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state_dict.items():
        place = (_begin(tensor) or tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        kept = first.setdefault(place, name) if tensor.numel() else name
        if kept == name:
            tensors[name] = tensor
        else:
            aliases[name] = kept
    return tensors, aliases
