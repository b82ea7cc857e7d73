"""Values in the output's type: how they are rounded, and that they fit."""

from __future__ import annotations

import torch
from torch import Tensor

from tunable_magmax.errors import InputError


def cast_copied(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A copy of the base's values in the output type; a finite value that does not fit is an `InputError`."""
    cast = before_cast(values, dtype).to(dtype, copy=True)
    if bool((values.isfinite() & ~cast.isfinite()).any()):
        raise does_not_fit(name, "copied", dtype)
    return cast


def before_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 goes to 16-bit types through float32 on every device, as the specification says."""
    return values.float() if values.dtype == torch.float64 and dtype.itemsize == 2 else values


def does_not_fit(name: str, kind: str, dtype: torch.dtype) -> InputError:
    """The error for a value that the output type cannot hold."""
    return InputError(
        f"{name!r}: a {kind} value does not fit in {str(dtype).removeprefix('torch.')}; choose a wider out_dtype"
    )
