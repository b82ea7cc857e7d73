"""Describes tensors in files: names, types and shapes. Types go by their safetensors codes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Bits per element, and torch's name if it has one: importing torch takes a second, and an older torch lacks some types.
_TYPES: dict[str, tuple[int, str]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "F4": (4, ""),
}
_CODES = {f"torch.{name}": code for code, (_, name) in _TYPES.items() if name}

BITS: dict[str, int] = {code: bits for code, (bits, _) in _TYPES.items()}
"""Bits per element of every type that a file may hold."""

FLOATS = {code: _TYPES[code][1] for code in ("F64", "F32", "F16", "BF16")}
"""The types that merges compute in, with torch's names; all others can only be copied or refused."""


@cache
def torch_dtype(code: str) -> torch.dtype | None:
    """Returns the torch type of a safetensors code, or None if this torch has no such type (all sub-byte types).

    >>> torch_dtype("BF16"), torch_dtype("F4")
    (torch.bfloat16, None)
    """
    import torch

    dtype = getattr(torch, _TYPES.get(code, (0, ""))[1], None)
    return dtype if isinstance(dtype, torch.dtype) else None


@cache
def dtype_code(dtype: torch.dtype) -> str | None:
    """Returns the safetensors code of a torch type, or None if the format has none, as for complex128.

    >>> import torch
    >>> dtype_code(torch.float16), dtype_code(torch.complex128)
    ('F16', None)
    """
    return _CODES.get(str(dtype))


FORMAT_KEY = "format"
"""What a header says of itself, beside the other names of tied tensors: a tensor of that name is written apart."""
MOST_DIMENSIONS = 64
"""A tensor of more is no weight of a model; numpy allows as many."""
LONGEST_NAME = 4096
"""Characters of a tensor's name."""


def widest(infos: Iterable[TensorInfo]) -> str:
    """Returns the narrowest type that holds every value of some floating-point tensors exactly.

    >>> widest([TensorInfo("w", "F16", (2,)), TensorInfo("w", "BF16", (2,))])
    'F32'
    """
    kinds = {info.dtype for info in infos}
    return "F32" if kinds == {"F16", "BF16"} else max(kinds, key=BITS.__getitem__)


def names_by_tensor(aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the other names of each tied tensor, by the name that is kept.

    >>> names_by_tensor({"head.weight": "embed.weight"})
    {'embed.weight': ['head.weight']}
    """
    names: dict[str, list[str]] = {}
    for alias, kept in aliases.items():
        names.setdefault(kept, []).append(alias)
    return names


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, safetensors type code and shape of one tensor: all that is known before any data is read.

    >>> info = TensorInfo("head.weight", "BF16", (10, 4))
    >>> info.numel, info.nbytes, info.is_float
    (40, 80, True)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file. Sub-byte types are packed; a shape that does not fill its last byte is never opened."""
        return self.numel * BITS[self.dtype] // 8

    @property
    def is_float(self) -> bool:
        """Whether merges compute in this type."""
        return self.dtype in FLOATS

    @property
    def is_unsupported_float(self) -> bool:
        """Whether this is a floating-point type too narrow to compute in: float8 and smaller."""
        return self.dtype.startswith("F") and self.dtype not in FLOATS


@dataclass(frozen=True, slots=True)
class Signature:
    """A model's tensors by name, and the other names of tied tensors, each with the name that is kept."""

    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]

    def name_of(self, name: str) -> str | None:
        """Returns the name under which the tensor `name` is stored, or None if there is no such tensor."""
        return name if name in self.tensors else self.aliases.get(name)


@dataclass(frozen=True, slots=True)
class Renaming:
    """How a task's names become the base's: a prefix dropped, or one added."""

    drop: str = ""
    add: str = ""

    def __call__(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)

    def words(self) -> str:
        return f"dropping {self.drop!r}" if self.drop else f"adding {self.add!r}"


def find_renaming(names: Iterable[str], base: Signature) -> Renaming:
    """Returns the one prefix that, dropped or added, makes most of a task's names the base's; none if there is no one.

    A model with a head holds the bare model under a prefix: adapters of one are used on checkpoints of the other. Other
    names stay unknown to the base, and are refused as such.

    >>> base = Signature({"h.0.w": TensorInfo("h.0.w", "F32", (1,))}, {})
    >>> find_renaming(["transformer.h.0.w"], base)
    Renaming(drop='transformer.', add='')
    """
    names = list(names)
    if any(base.name_of(name) for name in names):
        return Renaming()
    sample = names[:: 1 + len(names) // 16]  # thousands of experts would make as many choices
    choices = {Renaming(drop=name[: dot.end()]) for name in sample for dot in re.finditer(r"\.", name)}
    choices |= {
        Renaming(add=known.removesuffix(name))
        for name in sample
        for known in (*base.tensors, *base.aliases)
        if known.endswith(f".{name}")
    }
    matches = {
        choice: sum(name.startswith(choice.drop) and base.name_of(choice(name)) is not None for name in names)
        for choice in choices
    }
    most = max(matches.values(), default=0)
    best = [choice for choice, count in matches.items() if count == most]
    return best[0] if most and len(best) == 1 else Renaming()
