"""The programs of the GPU: run by Triton's interpreter on the CPU, and compiled for a GPU without one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sequences import TINY, raw, sequence

from tunable_magmax.merging import state_dicts
from tunable_magmax.merging.kernels import SLOTS, Runs
from tunable_magmax.merging.kernels.numba_ops import NumbaKernels
from tunable_magmax.merging.kernels.torch_ops import TorchKernels

pytest.importorskip("triton", reason="triton is for Linux")
triton_ops = pytest.importorskip("tunable_magmax.merging.kernels.triton_ops")

CPU = torch.device("cpu")
WEIGHTS = [3, 0, 0.5, 2, 1]
CASES: list[dict[str, Any]] = [
    {"weights": WEIGHTS},
    {"weights": WEIGHTS, "scope": "tensor", "compare": "active", "scale": 0.3},
    {"method": "magmax"},
    {"method": "average", "weights": WEIGHTS},
    {"method": "task_arithmetic", "scale": 0.3},
    {"method": "ties", "density": 0.4},
    {"method": "random_mix", "weights": WEIGHTS, "scale": 0.3},
]


@pytest.mark.parametrize("types", ["f32", "f32+f64"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_same_bits_as_on_the_cpu(options: dict[str, Any], types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = sequence(5, TINY, types)
    kernels = triton_ops.TritonKernels(CPU)
    kernels.chunk, kernels.span = 512, 1 << 10
    wanted = state_dicts.merge_state_dicts(*models, **options)
    monkeypatch.setattr(state_dicts, "kernels_for", lambda device: kernels)
    found = state_dicts.merge_state_dicts(*models, **options)
    assert raw(found.state_dict) == raw(wanted.state_dict)
    assert found.report == wanted.report


def test_a_scan_that_finds_more_keys_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and slots come in any order; those of every backend are the same."""
    monkeypatch.setattr(triton_ops, "ROOM", 8)
    size = 5 * SLOTS
    runs = Runs(np.array([0, 2 * SLOTS]), np.array([2 * SLOTS, size]), np.array([7, 1 << 40], np.uint64))
    found = []
    for kernels in (NumbaKernels(), TorchKernels(CPU), triton_ops.TritonKernels(CPU)):
        planes = kernels.planes(3, size, None)
        plane, free, won = (planes.part(row, 0, size) for row in range(3))
        kernels.fill(plane, size)
        kernels.fill(free, size - 3)
        below, keys, slots = kernels.scan_keys(plane, free, won, runs, 2**63 + 5, 2**62, 2**64 - 1)
        assert len(keys) == size - 3 - below > 8
        found.append((below, kernels.count_common(won, plane), sorted(zip(keys.tolist(), slots.tolist(), strict=True))))
    assert found[0] == found[1] == found[2]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(("scale", "finite"), [(0.1, True), (1e38, False)], ids=str)
def test_a_step_rounds_twice_and_says_whether_all_is_finite(scale: float, finite: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    base, tau = (torch.randn(3000, generator=generator) * 10 for _ in range(2))
    out = torch.empty(3000)
    assert triton_ops.TritonKernels(CPU).step(base, tau, scale, out) == finite
    assert torch.equal(out, base + tau * torch.tensor(scale))


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tunable_magmax.merging.kernels import triton_ops as ops

number, table = "i64", "*i64"
planes = {"planes": "*i8", "row_slots": number, "slot": number}
for real in ("*fp32", "*fp64"):
    common = {"base": real, "addresses": table, "tasks": number, "size": number, "out": real}
    for program, others in {
        ops._survey: {**planes, "compared": table, "rows": table, "flags": "*i32"},
        ops._count_common: {"plane": "*i8", "other": "*i8", "count": table},
        ops._gather: {**planes, "rows": table, "counts": table},
        ops._largest: {"counts": table},
        ops._weighted_sum: {"factors": "*fp64"},
        ops._step: {"tau": real, "scale": real, "flag": table},
    }.items():
        given = {**common, **others, "BLOCK": "constexpr"}
        source = ASTSource(program, {name: given[name] for name in program.arg_names}, {"BLOCK": ops.BLOCK})
        code = compile(source, target=GPUTarget("cuda", 90, 32), options=ops.COMPILED).asm
        assert code["cubin"], program
        assert "fma." not in code["ptx"], program
        assert ".ftz" not in code["ptx"], program
"""


def test_compiled_programs_never_fuse_and_keep_small_numbers(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
