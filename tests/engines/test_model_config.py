"""config.json beside merged weights says the type that they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tunable_magmax import merge_checkpoints


def checkpoint(folder: Path, dtype: torch.dtype, value: float, named: str | None = None) -> Path:
    folder.mkdir()
    tensors = {"w": torch.full((4, 4), value, dtype=dtype), "norm": torch.ones(4, dtype=torch.float32)}
    if dtype == torch.float32:
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    if named is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "toy", "dtype": named}))
    return folder


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_bfloat16_base_with_float32_tasks_is_float32(tmp_path: Path, key: str) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, 0.0)
    (base / "config.json").write_text(json.dumps({"model_type": "toy", key: "bfloat16"}))
    task = checkpoint(tmp_path / "task", torch.float32, 1.0)
    report = merge_checkpoints(base, [task], tmp_path / "out", scale=1)
    assert report.tensors["w"].dtype == "F32"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "toy", key: "float32"}
    assert not report.warnings


def test_mixed_types_are_told(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, 0.0, "bfloat16")
    task = checkpoint(tmp_path / "task", torch.bfloat16, 1.0)
    report = merge_checkpoints(base, [task], tmp_path / "out", scale=1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"  # of 16 elements against 4
    (warning,) = report.warnings
    assert warning == (
        "the output has tensors of several types (bfloat16, float32); loaded by its config.json, all are bfloat16"
    )
    asked = merge_checkpoints(base, [task], tmp_path / "half", scale=1, out_dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not asked.warnings
