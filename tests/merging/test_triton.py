"""The programs of the GPU: run by Triton's interpreter on the CPU, and compiled for a GPU without one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sequences import TINY, raw, sequence

from tunable_magmax.merging import state_dicts

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
    {"method": "ties", "density": 0.613, "scope": "tensor", "normalize": True, "weights": WEIGHTS},
    {"method": "last_task"},
    {"method": "random_mix", "weights": WEIGHTS, "scale": 0.3},
]


@pytest.mark.parametrize("types", ["f32", "f32+f64"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_same_bits_as_on_the_cpu(options: dict[str, Any], types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = sequence(5, TINY, types)
    kernels = triton_ops.TritonKernels(CPU)
    kernels.chunk = 256
    wanted = state_dicts.merge_state_dicts(*models, **options)
    monkeypatch.setattr(state_dicts, "kernels_for", lambda device: kernels)
    found = state_dicts.merge_state_dicts(*models, **options)
    assert raw(found.state_dict) == raw(wanted.state_dict)
    assert found.report == wanted.report


@pytest.mark.parametrize("narrow", [1e-3, 1e3], ids=["too narrow", "too wide"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_windows_of_any_width_find_the_same_keys(narrow: float, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a window has too few keys, or more than there is room for, the keys are scanned again."""
    models = sequence(5, TINY, "f32")
    wanted = state_dicts.merge_state_dicts(*models, weights=WEIGHTS, scope=scope)
    kernels = triton_ops.TritonKernels(CPU)
    monkeypatch.setattr(state_dicts, "kernels_for", lambda device: kernels)
    monkeypatch.setattr(triton_ops, "windows", lambda n, c: _windows(n, c, narrow))
    monkeypatch.setattr(triton_ops, "sqrt", lambda expected: -expected / 8)
    found = state_dicts.merge_state_dicts(*models, weights=WEIGHTS, scope=scope)
    assert raw(found.state_dict) == raw(wanted.state_dict)


def _windows(n: int, candidates: int, width: float) -> Iterator[tuple[int, int]]:
    while True:
        yield max(0, int((n / candidates - width) * 2**64)), min(2**64 - 1, int((n / candidates + width) * 2**64))
        width *= 16


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(("scale", "finite"), [(0.1, True), (1e38, False)], ids=str)
def test_a_step_rounds_twice_and_says_whether_all_is_finite(scale: float, finite: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    base, tau = (torch.randn(3000, generator=generator) * 10 for _ in range(2))
    out = torch.empty(3000)
    assert triton_ops.TritonKernels(CPU).step([base], [tau], scale, [out]) == [finite]
    assert torch.equal(out, base + tau * torch.tensor(scale))


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tunable_magmax.merging.kernels import programs as ops

number, table, bits = "i64", "*i64", "*i8"
for real in ("*fp32", "*fp64"):
    given = dict.fromkeys(["columns", "tensors", "tasks", "size", "row_slots", "room"], number)
    given |= dict.fromkeys(["table", "addresses", "counts", "windows", "found"], table)
    given |= dict.fromkeys(["planes", "plane", "other", "free", "won"], bits)
    given |= dict.fromkeys(["base", "out", "like", "scale"], real)
    given |= {"factors": "*fp64", "squares": "*fp64", "sums": "*fp64", "BLOCK": "constexpr"}
    for program in (
        ops.survey, ops.count_common, ops.scan_keys, ops.gather, ops.largest, ops.weighted_sum, ops.squares, ops.step,
    ):
        types = {**given, "flags": "*i32" if program is ops.survey else table}
        source = ASTSource(program, {name: types[name] for name in program.arg_names}, {"BLOCK": ops.BLOCK})
        code = compile(source, target=GPUTarget("cuda", 90, 32), options=ops.COMPILED).asm
        assert code["cubin"], program
        assert "fma." not in code["ptx"], program
        assert ".ftz" not in code["ptx"], program
"""


def test_compiled_programs_never_fuse_and_keep_small_numbers(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
