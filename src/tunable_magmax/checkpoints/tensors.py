"""What a tensor in a file is: its name, its type and its shape. Types go by their safetensors codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BITS: dict[str, int] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits per element of every type that a file may hold."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The types that merges compute in; all others can only be copied or refused."""

# By attribute name, not by object: importing torch takes a second, and an older torch lacks some of them.
_TORCH_NAMES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_CODES = {f"torch.{name}": code for code, name in _TORCH_NAMES.items()}


@cache
def torch_dtype(code: str) -> torch.dtype | None:
    """The torch type of a safetensors code, or None if this torch has no such type (all sub-byte types).

    >>> torch_dtype("BF16"), torch_dtype("F4")
    (torch.bfloat16, None)
    """
    import torch

    found = getattr(torch, _TORCH_NAMES.get(code, ""), None)
    return found if isinstance(found, torch.dtype) else None


@cache
def dtype_code(dtype: torch.dtype) -> str | None:
    """The safetensors code of a torch type, or None if the format has none, as for complex128.

    >>> import torch
    >>> dtype_code(torch.float16), dtype_code(torch.complex128)
    ('F16', None)
    """
    return _CODES.get(str(dtype))


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
    """What a checkpoint holds: its tensors by name, and which other names stand for them (tied tensors)."""

    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]

    def name_of(self, name: str) -> str | None:
        """The name under which this checkpoint stores `name`, or None if it does not hold it."""
        return name if name in self.tensors else self.aliases.get(name)
