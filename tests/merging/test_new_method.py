"""A method is one class and one line in the table, on every device: numba's kernels, a GPU's, and files."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunable_magmax import Merged, MergeSession, merge_checkpoints, merge_state_dicts
from tunable_magmax.errors import InputError
from tunable_magmax.merging import state_dicts
from tunable_magmax.merging.methods import ENTRY_POINTS, METHODS, Method, load_method, method_class

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


def assert_same(ours: Merged, theirs: Merged) -> None:
    assert ours.report == theirs.report
    for name, tensor in theirs.state_dict.items():
        assert torch.equal(ours.state_dict[name], tensor)


class Median(Method):
    """The median of the task vectors."""

    def vector(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(vectors)).median(dim=0).values


class Middle(Method):
    """The mean of the first and the last task vector, by an operation of the kernels."""

    def combine(self, kernels: Any, chunk: Any, tensor: int, out: Any) -> None:
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
    merged = merge_state_dicts(states[0], states[1:], method=method, scale=0.5)
    wanted = by_hand(states, method)
    assert all(torch.equal(merged.state_dict[name], wanted[name]) for name in wanted)
    assert (merged.report.method, merged.report.counts) == (method, None)
    paths = [tmp_path / f"{k}.safetensors" for k in range(6)]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    merge_checkpoints(paths[0], paths[1:], tmp_path / "out.safetensors", method=method, scale=0.5)
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_on_a_gpu_and_in_a_session(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    base, *tasks = sequence(4)
    wanted = merge_state_dicts(base, tasks, **options)
    with MergeSession(base, tasks) as session:
        session.merge()
        assert_same(session.merge(**options), wanted)
    triton_ops = pytest.importorskip("tunable_magmax.merging.kernels.triton_ops")
    monkeypatch.setattr(state_dicts, "kernels_for", triton_ops.TritonKernels)
    assert_same(merge_state_dicts(base, tasks, **options), wanted)


OWN = """
import torch
from tunable_magmax.merging.methods import Method

class UpperMedian(Method):
    def vector(self, vectors):
        return torch.stack([-vector for vector in vectors]).median(dim=0).values.neg()

class Shares(Method):
    weights = "shares"

    def vector(self, vectors):
        return sum(float(share) * vector for share, vector in zip(self.shares(), vectors))

class Fails(Method):
    def vector(self, vectors):
        return unknown

class Total(Method):
    def vector(self, vectors):
        return vectors[0].sum()

class Empty(Method):
    pass

NUMBER = 3
"""


def test_a_class_and_a_class_in_a_file(tmp_path: Path, tmx: Any) -> None:
    """Python takes the class, the command line a file; the result is the same."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    states = sequence(4)
    paths = [tmp_path / f"{k}.safetensors" for k in range(5)]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    tasks = [word for path in paths[1:] for word in ("--task", path)]
    command = ["merge", "--base", paths[0], *tasks, "-o", tmp_path / "out.safetensors", "--scale", "0.5"]
    assert tmx(*command, "--method", f"{file}:UpperMedian").code == 0
    spec = load_method(f"{file}:UpperMedian")
    merged = merge_state_dicts(states[0], states[1:], method=method_class(spec), scale=0.5)
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], merged.state_dict[name]) for name in found)
    assert spec not in METHODS, "the table is the package's own"


def test_a_saved_merge_of_a_file_runs_again_where_the_file_is_named(
    tmp_path: Path, tmx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    spec = f"{tmp_path / 'own.py'}:UpperMedian"
    places = [tmp_path / f"{k}.safetensors" for k in range(3)]
    for k, place in enumerate(places):
        save_file({"w": torch.tensor([float(k), -2.0 * k])}, place)
    inputs = ["--base", places[0], "--task", places[1], "--task", places[2]]
    verify = ["inspect", tmp_path / "out", "--verify", *inputs]
    assert tmx("merge", *inputs, "-o", tmp_path / "out", "--method", spec).code == 0
    assert tmx("inspect", tmp_path / "out", "--verify").out.endswith(f"--method {spec}\n")
    again = ["merge", tmp_path / "out" / "tmx-config.yaml", "-o", tmp_path / "again"]
    monkeypatch.setattr("tunable_magmax.merging.methods._ADDED", {})
    for command, place in ((verify, tmp_path), (again, "FOLDER")):
        result = tmx(*command)
        assert result.code == 2
        assert f"--method {place}/own.py:UpperMedian" in result.err.replace("\n", " ")
        assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    assert tmx(*verify, "--method", spec).code == 0
    assert tmx(*again, "--method", spec).code == 0
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("out", "again"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [("Nobody", OWN), ("Empty", OWN), ("NUMBER", OWN), ("Own", "1 / 0"), ("Own", "class Own("), ("Own", None)],
)
def test_a_file_that_holds_no_method_is_refused(tmp_path: Path, name: str, content: str | None) -> None:
    file = tmp_path / "own.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=name):
        load_method(f"{file}:{name}")


def test_what_a_method_of_ones_own_does_wrong_is_said(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    base, *tasks = sequence(2)
    for name, says in (("Fails", "Fails fails .NameError"), ("Total", r"Total returns \[\] of vectors of shape")):
        with pytest.raises(InputError, match=says):
            merge_state_dicts(base, tasks, method=method_class(load_method(f"{file}:{name}")))
    own = method_class(load_method(f"{file}:Shares"))
    found, wanted = (merge_state_dicts(base, tasks, method=each, weights=[3, 1], scale=1) for each in (own, "average"))
    assert all(torch.allclose(found.state_dict[name], wanted.state_dict[name]) for name in base)
    with pytest.raises(InputError, match=r"--method own\.py:CLASS"):
        load_method("own.py")


def test_a_configuration_cannot_run_a_file(tmp_path: Path, tmx: Any) -> None:
    """Whoever writes a configuration must not decide which code runs."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n{OWN}")
    spec = f"{tmp_path / 'own.py'}:UpperMedian"
    for path in ("base", "task"):
        save_file({"w": torch.rand(3)}, tmp_path / f"{path}.safetensors")
    (tmp_path / "merge.yml").write_text(
        f"merge_method: {spec}\nbase_model: base.safetensors\nmodels: [{{model: task.safetensors}}]\n"
    )
    result = tmx("merge", tmp_path / "merge.yml", "-o", tmp_path / "out.safetensors")
    assert result.code == 2
    assert "own.py" in result.err
    with pytest.raises(InputError, match=r"own\.py"):
        merge_state_dicts({"w": torch.zeros(3)}, [{"w": torch.ones(3)}], method=spec)
    assert not ran.exists()


def test_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("lower_median", f"{__name__}:Median", ENTRY_POINTS)
    broken = EntryPoint("broken", f"{__name__}:Nothing", ENTRY_POINTS)
    monkeypatch.setattr("tunable_magmax.merging.methods.entry_points", lambda **given: [point, broken])
    base, *tasks = sequence(3)
    found = merge_state_dicts(base, tasks, method="lower_median")
    assert torch.equal(found.state_dict["a"], merge_state_dicts(base, tasks, method=Median).state_dict["a"])
    assert "lower_median" not in METHODS
    with pytest.raises(InputError, match="Nothing"):
        merge_state_dicts(base, tasks, method="broken")


def test_a_method_of_matrices_without_one_is_bad_input() -> None:
    class Bare(Median):
        merges_matrices = True

    states = [{"w": torch.full((4, 4), float(k))} for k in range(3)]
    with pytest.raises(InputError, match="Bare merges matrices and has no `matrix`"):
        merge_state_dicts(states[0], states[1:], method=Bare)
