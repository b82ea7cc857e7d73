"""A method is one class and one line in the table, on every device: numba's kernels, torch's, and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tunable_magmax as tmx
from tunable_magmax.merging import state_dicts
from tunable_magmax.merging.kernels.torch_ops import TorchKernels
from tunable_magmax.merging.methods import METHODS, Method

TYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.float16}


def sequence(tasks: int) -> list[dict[str, torch.Tensor]]:
    """Base and tasks of four types."""
    generator = torch.Generator().manual_seed(tasks)
    shapes = zip(TYPES.items(), [(40, 9), (65,), (1,), (2, 7, 3)], strict=True)
    found = [{name: torch.randn(shape, generator=generator).to(dtype) for (name, dtype), shape in shapes}]
    for _ in range(tasks):
        steps = {name: 0.1 * torch.randn(old.shape, generator=generator) for name, old in found[-1].items()}
        found.append({name: (old.double() + steps[name]).to(old.dtype) for name, old in found[-1].items()})
    return found


def assert_same(ours: tmx.Merged, theirs: tmx.Merged) -> None:
    assert ours.report == theirs.report
    for name, tensor in theirs.state_dict.items():
        assert torch.equal(ours.state_dict[name], tensor)


class Median(Method):
    """The median of the task vectors."""

    def vector(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(vectors)).median(dim=0).values


class Middle(Method):
    """The mean of the first and the last task vector, by an operation of the kernels."""

    def combine(self, kernels: Any, chunk: Any, tensor: int, planes: Any, out: Any) -> None:
        kernels.weighted_sum(chunk, [0, self.tasks - 1], [0.5, 0.5], out)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "median", Median)
    monkeypatch.setitem(METHODS, "middle", Middle)


CASES = [{"method": name, "scale": scale} for name in ("median", "middle") for scale in (0.5, "matched")]


def by_hand(states: list[dict[str, torch.Tensor]], method: str) -> dict[str, torch.Tensor]:
    """Base plus half of what the method makes of the task vectors."""
    result = {}
    for name, base in states[0].items():
        working = torch.float64 if base.dtype == torch.float64 else torch.float32
        vectors = [state[name].to(working) - base.to(working) for state in states[1:]]
        median = torch.stack(vectors).median(dim=0).values
        tau = median if method == "median" else (0.5 * vectors[0].double() + 0.5 * vectors[-1].double()).to(working)
        result[name] = (base.to(working) + 0.5 * tau).to(base.dtype)
    return result


@pytest.mark.parametrize("method", ["median", "middle"])
def test_in_memory_and_on_files(method: str, tmp_path: Path) -> None:
    states = sequence(5)
    merged = tmx.merge_state_dicts(states[0], states[1:], method=method, scale=0.5)
    wanted = by_hand(states, method)
    assert all(torch.equal(merged.state_dict[name], wanted[name]) for name in wanted)
    assert (merged.report.method, merged.report.counts) == (method, None)
    paths = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    tmx.merge_checkpoints(paths[0], paths[1:], tmp_path / "out.safetensors", method=method, scale=0.5)
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_on_torch_operations_and_in_a_session(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    base, *tasks = sequence(4)
    wanted = tmx.merge_state_dicts(base, tasks, **options)
    with tmx.MergeSession(base, tasks) as session:
        session.merge()
        assert_same(session.merge(**options), wanted)
    monkeypatch.setattr(state_dicts, "kernels_for", TorchKernels)
    assert_same(tmx.merge_state_dicts(base, tasks, **options), wanted)


def test_a_method_without_a_formula_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "nothing", type("Nothing", (Method,), {}))
    with pytest.raises(NotImplementedError, match="Nothing has neither `vector` nor `combine`"):
        tmx.merge_state_dicts({"w": torch.zeros(3)}, [{"w": torch.ones(3)}], method="nothing")
