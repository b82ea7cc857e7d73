"""`tsv` against numpy's own singular value decomposition, its limits, and that it is the same wherever it runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import tunable_magmax as tmx
from tunable_magmax.errors import InputError
from tunable_magmax.merging import singular
from tunable_magmax.merging.methods import TaskSingularVectors, read_options
from tunable_magmax.workflows.verify import verify_checkpoint

State = dict[str, torch.Tensor]
SHAPES = {"wide": (12, 30), "tall": (25, 9), "square": (16, 16), "row": (1, 8), "bias": (11,), "conv": (3, 4, 5)}
NOTE = (
    "tsv works with singular vectors, which differ in their last bits between devices and libraries: another machine "
    "gives this result within a tolerance, not to the bit"
)


def sequence(tasks: int, seed: int = 0, dtype: torch.dtype = torch.float32, step: float = 0.1) -> list[State]:
    random = torch.Generator().manual_seed(seed)
    states = [{name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in SHAPES.items()}]
    for _ in range(tasks):
        last = states[-1]
        states.append(
            {n: v + step * torch.randn(v.shape, generator=random, dtype=torch.float64) for n, v in last.items()}
        )
    return [{name: values.to(dtype) for name, values in state.items()} for state in states]


def naive(vectors: Sequence[NDArray[np.float64]], weights: Sequence[object]) -> NDArray[np.float64]:
    """Section 7 of docs/method.md with numpy's decomposition; a tensor that is no matrix has its weighted mean."""
    if vectors[0].ndim != 2:
        shares = np.array([float(str(w)) for w in weights])
        return np.tensordot(shares / shares.sum(), np.stack(list(vectors)), 1)
    left, values, right = [], [], []
    for vector, rank in zip(vectors, tmx.budget(weights, min(vectors[0].shape)), strict=True):
        u, s, vt = np.linalg.svd(vector, full_matrices=False)
        left.append(u[:, :rank])
        values.append(s[:rank])
        right.append(vt[:rank].T)

    def polar(factor: NDArray[np.float64]) -> NDArray[np.float64]:
        u, _, vt = np.linalg.svd(factor, full_matrices=False)
        return u @ vt

    return (polar(np.hstack(left)) * np.concatenate(values)) @ polar(np.hstack(right)).T


def vectors_of(states: list[State], name: str) -> list[NDArray[np.float64]]:
    return [(state[name] - states[0][name]).double().numpy() for state in states[1:]]


def largest_difference(one: State, other: State) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("weights", [None, [1, 1, 1, 1], [0.1, 0.5, 0.3, 0.1], [3, 0, 1, 0], [0, 0, 0, 2]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-8)], ids=str)
def test_it_is_what_numpy_makes_of_the_definition(weights, dtype, tolerance) -> None:
    states = sequence(4, dtype=dtype)
    merged = tmx.merge_state_dicts(states[0], states[1:], method="tsv", weights=weights)
    assert merged.report.scale == 1
    for name, base in states[0].items():
        wanted = base.double().numpy() + naive(vectors_of(states, name), weights or [1] * 4)
        assert merged.state_dict[name].dtype == dtype
        np.testing.assert_allclose(merged.state_dict[name].double().numpy(), wanted, rtol=0, atol=tolerance)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 1000), st.data())
def test_one_hot_weights_give_that_task(tasks, seed, data) -> None:
    states = sequence(tasks, seed)
    hot = data.draw(st.integers(0, tasks - 1))
    weights = [float(t == hot) for t in range(tasks)]
    merged = tmx.merge_state_dicts(states[0], states[1:], method="tsv", weights=weights)
    assert largest_difference(merged.state_dict, states[hot + 1]) < 1e-6


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_identical_tasks_stay_finite_and_bounded(noise, dtype) -> None:
    random = torch.Generator().manual_seed(3)
    base, shared = torch.zeros(20, 30, dtype=dtype), torch.randn(20, 30, generator=random, dtype=dtype)
    tasks = [{"w": shared + noise * torch.randn(20, 30, generator=random, dtype=dtype)} for _ in range(4)]
    merged = tmx.merge_state_dicts({"w": base}, tasks, method="tsv").state_dict["w"]
    assert bool(merged.isfinite().all())
    bound = max(float(torch.linalg.matrix_norm(task["w"], 2)) for task in tasks)
    assert float(torch.linalg.matrix_norm(merged, 2)) <= bound * (1 + 1e-5)
    if noise <= 1e-7:  # the tasks share their top five directions, and nothing else is left
        wanted = naive([shared.double().numpy()] * 4, [1, 0, 0, 0])
        u, s, vt = np.linalg.svd(wanted)
        top = (u[:, :5] * s[:5]) @ vt[:5]
        np.testing.assert_allclose(merged.double().numpy(), top, atol=1e-4)


def test_ranks_follow_the_budget() -> None:
    """Tasks on directions of their own: each gives as many of its largest as its share of the rank."""
    base = {"w": torch.zeros(12, 20)}
    values = torch.arange(12.0, 0.0, -1.0)
    tasks = []
    for t in range(3):  # task t has the rows 4 t .. 4 t + 3, so that no two share a direction
        own = torch.zeros(12, 20)
        rows = torch.arange(4 * t, 4 * t + 4)
        own[rows, rows] = values[rows]
        tasks.append({"w": own})
    weights = [0.25, 0.6, 0.15]
    ranks = tmx.budget(weights, 12)
    assert ranks == [4, 7, 1]
    merged = tmx.merge_state_dicts(base, tasks, method="tsv", weights=weights).state_dict["w"]
    kept = [int((merged[4 * t : 4 * t + 4].abs() > 1e-6).sum()) for t in range(3)]
    assert kept == [min(rank, 4) for rank in ranks]  # a task of rank 4 has no more to give
    assert merged[8, 8] == pytest.approx(4.0)
    method = TaskSingularVectors(read_options(3, method="tsv", weights=weights), 3)
    assert method.ranks((12, 20)) == method.ranks((20, 12)) == ranks


def test_values_that_count_as_zero_are_dropped() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1e-3, 2e-6, 5e-7, 0.0], dtype=torch.float64))
    assert singular.triples_of(matrix).values.tolist() == pytest.approx([1.0, 1e-3, 2e-6], rel=1e-3)
    tiny = singular.triples_of(matrix * 1e-300)  # whose squares are 0 in float64
    assert tiny.values.tolist() == pytest.approx([1e-300, 1e-303, 2e-306], rel=1e-3)
    assert singular.triples_of(torch.zeros(3, 4, dtype=torch.float64)).short.shape == (3, 0)


def test_an_active_task_that_did_not_change_the_matrix_gives_nothing() -> None:
    base, still = {"w": torch.ones(4, 6), "b": torch.zeros(2)}, {"w": torch.ones(4, 6), "b": torch.ones(2)}
    moved = {"w": torch.ones(4, 6) + torch.eye(4, 6), "b": torch.zeros(2)}
    merged = tmx.merge_state_dicts(base, [still, moved], method="tsv", weights=[1, 0])
    assert torch.equal(merged.state_dict["w"], base["w"])
    assert torch.equal(merged.state_dict["b"], still["b"])


def test_scale_and_report() -> None:
    states = sequence(3)
    base, tasks = states[0], states[1:]
    default = tmx.merge_state_dicts(base, tasks, method="tsv")
    assert (default.report.scale, default.report.options["scale"]) == (1.0, 1.0)
    assert (default.report.counts, default.report.budget, default.report.leftovers) == (None, None, None)
    assert default.report.warnings == (NOTE,)
    assert tmx.MergeReport.from_json(default.report.to_json()) == default.report
    matched = tmx.merge_state_dicts(base, tasks, method="tsv", scale="matched").report
    assert matched.scale == pytest.approx(matched.last_length / matched.merged_length, rel=1e-5)
    half = tmx.merge_state_dicts(base, tasks, method="tsv", scale=0.5)
    whole = {name: base[name] + 2 * (half.state_dict[name] - base[name]) for name in base}
    assert largest_difference(whole, default.state_dict) < 1e-5
    for method in set(tmx.METHODS) - {"tsv"}:
        assert read_options(3, method=method, scale=None) == read_options(3, method=method, scale="matched")


def test_without_matrices_it_is_the_average_to_the_bit() -> None:
    states = [{name: state[name] for name in ("bias", "conv")} for state in sequence(3)]
    merged = tmx.merge_state_dicts(states[0], states[1:], method="tsv", weights=[1, 2, 3])
    mean = tmx.merge_state_dicts(states[0], states[1:], method="average", weights=[1, 2, 3], scale=1)
    assert all(torch.equal(merged.state_dict[name], mean.state_dict[name]) for name in states[0])
    assert merged.report.warnings == ()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{k}.safetensors" for k in range(4)]
    for path, state in zip(paths, sequence(3), strict=True):
        save_file(state, path)
    return paths


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"memory": "20MiB", "threads": 1}),
        ({"weights": [3, 1, 0]}, {"shard_size": "1KB"}),
        ({"scale": "matched", "out_dtype": "bfloat16"}, {}),
    ],
    ids=str,
)
def test_files_give_what_memory_gives(files, tmp_path, options, settings) -> None:
    states = [load_file(path) for path in files]
    wanted = tmx.merge_state_dicts(states[0], states[1:], method="tsv", **options)
    out = tmp_path / "out"
    report = tmx.merge_checkpoints(files[0], files[1:], out, method="tsv", **options, **settings)
    assert (report.scale, report.warnings) == (wanted.report.scale, wanted.report.warnings)
    found: State = {}
    for shard in out.glob("*.safetensors"):
        found |= load_file(shard)
    assert largest_difference(found, wanted.state_dict) <= (0.02 if "out_dtype" in options else 1e-6)
    assert report.merged_length == pytest.approx(wanted.report.merged_length, rel=1e-5)
    verified = verify_checkpoint(out, files[0], files[1:])
    assert verified.ok, [check for check in verified.checks if not check.ok]
    assert any("merged ones within" in check.detail for check in verified.checks)


@pytest.mark.parametrize(("name", "by"), [("wide", 1e-2), ("bias", 1e-2), ("square", float("nan")), ("still", 1e-6)])
def test_verify_finds_a_change(files, tmp_path, name, by) -> None:
    for path in files:  # a tensor that nobody changes is copied, to the bit
        save_file(load_file(path) | {"still": torch.ones(3)}, path)
    out = tmp_path / "out.safetensors"
    tmx.merge_checkpoints(files[0], files[1:], out, method="tsv")
    tensors = load_file(out)
    tensors[name].view(-1)[2] += by
    save_file(tensors, out)
    failed = [check for check in verify_checkpoint(out, files[0], files[1:]).checks if not check.ok]
    assert [check.what for check in failed] == ["SHA-256 of the files", "values, derived again"]
    assert repr(name) in failed[1].detail


def test_verify_allows_for_last_bits_and_not_for_another_method(files, tmp_path) -> None:
    out = tmp_path / "out.safetensors"
    tmx.merge_checkpoints(files[0], files[1:], out, method="tsv")
    tensors = load_file(out)
    tensors["wide"] = tensors["wide"] + 1e-6
    save_file(tensors, out)
    failed = [check.what for check in verify_checkpoint(out, files[0], files[1:]).checks if not check.ok]
    assert failed == ["SHA-256 of the files"]
    failed = [check.what for check in verify_checkpoint(out, files[0], files[:0:-1]).checks if not check.ok]
    assert "values, derived again" in failed


def test_too_little_memory(tmp_path) -> None:
    for k in range(3):
        save_file(
            {"large": torch.full((500, 2000), float(k)), "b": torch.full((3,), float(k))}, tmp_path / f"{k}.safetensors"
        )
    base, *tasks = (tmp_path / f"{k}.safetensors" for k in range(3))
    needed = singular.working_bytes((500, 2000), 4)
    assert needed == 1_000_000 * 56 + 64 * 250_000
    with pytest.raises(InputError, match=r"give at least \d+ MiB; 69 of them are for the largest matrix") as error:
        tmx.merge_checkpoints(base, tasks, tmp_path / "out", method="tsv", memory="32MiB")
    enough = str(error.value).split("give at least ")[1].split(" MiB")[0]
    tmx.merge_checkpoints(base, tasks, tmp_path / "out", method="tsv", memory=f"{enough}MiB")
    tmx.merge_checkpoints(base, tasks, tmp_path / "less", method="tsv", memory="32MiB", exclude=["large"])


@pytest.mark.parametrize(("width", "tasks"), [(64, 3), (192, 10), (12, 1)])
def test_the_root_by_products_is_the_one_by_a_decomposition(width, tasks) -> None:
    generator = torch.Generator().manual_seed(width)
    parts = [torch.randn(width, width // tasks, generator=generator).double() for _ in range(tasks)]
    gram = (factor := torch.cat([torch.linalg.qr(part)[0] for part in parts], dim=1)).mT @ factor
    root = singular.iterated_inverse_root(gram)
    assert root is not None
    torch.testing.assert_close(root @ gram @ root, torch.eye(len(gram), dtype=torch.float64), atol=1e-8, rtol=0)


def test_dependent_directions_have_no_root_by_products() -> None:
    factor = torch.eye(6, dtype=torch.float64)[:, [0, 1, 1]]
    assert singular.iterated_inverse_root(factor.mT @ factor) is None
