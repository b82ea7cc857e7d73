"""The emulator refuses what a GPU would hang on, or do in silence."""

from __future__ import annotations

import pytest
import torch

import emulated
from emulated import EmulatedModule

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
KERNELS = """
extern "C" __global__ void sum(const int *values, long long *total) {
    int value = values[blockIdx.x * 64 + threadIdx.x];
    for (int step = 16; step; step >>= 1) value += __shfl_down_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 == 0) atomicAdd(total, (long long)value);
}
extern "C" __global__ void barrier(int *values) { if (threadIdx.x) __syncthreads(); }
extern "C" __global__ void two_barriers(int *values) { if (threadIdx.x) __syncthreads();
    else __syncthreads(); }
extern "C" __global__ void vote(int *values) { if (threadIdx.x % 2) __ballot_sync(0xffffffffu, true); }
extern "C" __global__ void few(int *values) { __ballot_sync(0xffu, true); }
extern "C" __global__ void unaligned(int *values) { __ldg((const uint4 *)(values + 1)); }
extern "C" __global__ void beyond(int *values) { extern __shared__ unsigned noted[]; noted[threadIdx.x] = 0; }
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    return EmulatedModule(emulated.compiled(KERNELS, tmp_path_factory.mktemp("kernels")))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("barrier", "barrier: line .*: a barrier that 1 of 64 threads do not come to"),
        ("two_barriers", "a barrier that (1|63) of 64 threads do not come to"),
        ("vote", "vote: line .*: a vote that 16 of a warp's 32 lanes do not come to"),
        ("few", "a vote of some lanes only"),
        ("unaligned", "a load of 16 bytes at .*, which is not aligned"),
        ("beyond", "a write to byte 128 of 128 of shared memory"),
        ("sum", "the kernel takes 2 arguments, not 1"),
    ],
)
def test_what_is_wrong_is_said_and_the_next_launch_works(module: EmulatedModule, kernel: str, message: str) -> None:
    values, total = torch.arange(128, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=message):
        module.launch(kernel, (1, 1), 64, 0, values, shared=128)
    module.launch("sum", (2, 1), 64, 0, values, total)
    assert int(total) == sum(range(128))
