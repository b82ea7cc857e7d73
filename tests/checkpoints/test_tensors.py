from __future__ import annotations

import pytest
import torch

from tunable_magmax.checkpoints.tensors import BITS, FLOATS, TensorInfo, dtype_code, torch_dtype


@pytest.mark.parametrize("code", BITS)
def test_bits_are_those_of_the_torch_type(code: str) -> None:
    dtype = torch_dtype(code)
    if dtype is None:
        assert code in {"F4", "F6_E2M3", "F6_E3M2"}
    else:
        assert BITS[code] == 8 * dtype.itemsize
        assert dtype_code(dtype) == code


def test_types_that_the_format_lacks_have_no_code() -> None:
    assert dtype_code(torch.complex128) is None
    assert torch_dtype("nonsense") is None


@pytest.mark.parametrize("code", BITS)
def test_floats_are_those_of_torch(code: str) -> None:
    info = TensorInfo("w", code, (2,))
    dtype = torch_dtype(code)
    is_floating = dtype is None or dtype.is_floating_point
    assert info.is_float == (code in FLOATS)
    assert (info.is_float or info.is_unsupported_float) == is_floating
    assert not (info.is_float and info.is_unsupported_float)


@pytest.mark.parametrize(
    ("dtype", "shape", "numel", "nbytes"),
    [("F32", (), 1, 4), ("F64", (0, 3), 0, 0), ("BF16", (3, 5), 15, 30), ("F4", (2, 4), 8, 4), ("F6_E2M3", (4,), 4, 3)],
)
def test_sizes(dtype: str, shape: tuple[int, ...], numel: int, nbytes: int) -> None:
    info = TensorInfo("w", dtype, shape)
    assert (info.numel, info.nbytes) == (numel, nbytes)
