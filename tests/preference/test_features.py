"""Preferences from embedded inputs: transport, cosine, MMD."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.preference.features import FeatureMethod, squared_mmd, weights_from_distances
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.transport import Sinkhorn, SinkhornResult, _solve
from tunable_magmax.preference.uncertainty import Resampling, sample_replicates

METHODS: list[FeatureMethod] = ["ot", "cosine", "mmd"]


def sinkhorn(cost: NDArray[np.float64], solver: Sinkhorn = Sinkhorn()) -> SinkhornResult:  # noqa: B008
    """Transport under a cost matrix, without bootstrap draws."""
    n, m = cost.shape
    return _solve(cost[None].copy(), solver, np.empty((0, n)), np.empty((0, m)))[0]


def example(seed: int = 0, tasks: int = 4, rows: int = 40, samples: int = 25) -> tuple[list[Any], list[Any]]:
    """Tasks around different centres; the target mixes tasks 1 and 2."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(tasks, 6)) * 2 + 3
    own = [rng.normal(size=(rows, 6)) + centre for centre in centres]
    target = np.concatenate([rng.normal(size=(samples - 8, 6)) + centres[0], rng.normal(size=(8, 6)) + centres[1]])
    return own, [target] * tasks


def test_transport_by_hand() -> None:
    # One target point at 0. Task 1 at 0, 2: costs 0, 4 over 4, mean 1/2. Task 2 at 1, 1: costs 1, 1 over 1, mean 1.
    own, target = [np.array([[0.0], [2.0]]), np.array([[1.0], [1.0]])], [np.array([[0.0]])] * 2
    found = Preference.from_features(own, target)
    assert found.provenance["distances"] == pytest.approx([0.5, 1.0])
    assert found.weights == pytest.approx((1.0, math.exp(-50)), rel=1e-9)
    assert Preference.from_features(own, target, gamma=2).weights[1] == pytest.approx(1 / (1 + math.e))
    assert Preference.from_features(own, target, gamma=0).weights == (0.5, 0.5)


def test_transport_is_the_softmax_of_the_distances() -> None:
    own, target = example()
    found = Preference.from_features(own, target, raw=True)
    costs = [np.square(x[:, None] - y[None]).sum(axis=2) for x, y in zip(own, target, strict=True)]
    distances = np.array([sinkhorn(cost / cost.max()).cost for cost in costs])
    similarity = np.exp(-100 * distances)
    assert found.weights == pytest.approx(similarity / similarity.sum(), rel=1e-6)
    assert found.provenance["converged"] is True


def test_transport_compares_directions_unless_raw() -> None:
    own, target = example()
    longer = [3.0 * rows for rows in target]
    assert Preference.from_features(own, longer).weights == pytest.approx(
        Preference.from_features(own, target).weights, rel=1e-9
    )
    assert Preference.from_features(own, longer, raw=True).weights != pytest.approx(
        Preference.from_features(own, target, raw=True).weights, rel=1e-3
    )
    unit = [[rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in side] for side in (own, target)]
    assert Preference.from_features(*unit, raw=True).weights == pytest.approx(
        Preference.from_features(own, target).weights, rel=1e-9
    )


def test_cosine_by_hand() -> None:
    # Mean of the target (1, 0); of task 1 (1, 1): cos = 1/sqrt 2; of task 2 (3, 0): cos = 1.
    own = [np.array([[0.0, 2.0], [2.0, 0.0]]), np.array([[3.0, 1.0], [3.0, -1.0]])]
    target = [np.array([[2.0, 0.0], [0.0, 0.0]])] * 2
    found = Preference.from_features(own, target, "cosine")
    assert found.provenance["distances"] == pytest.approx([1 - 1 / math.sqrt(2), 0], abs=1e-15)
    share = math.exp(-50 * (1 - 1 / math.sqrt(2)))
    assert found.weights == pytest.approx((share / (1 + share), 1 / (1 + share)), rel=1e-12)


def test_mmd_by_hand() -> None:
    # x = 0, 1; y = 1, 3. Pooled distances: 1 | 2 | 1, 3, 0, 2: median 1.5, k(d) = exp(-d^2 / 4.5).
    # MMD^2 = k(1) + k(2) - 2 * (k(1) + k(3) + k(0) + k(2)) / 4.
    x, y = np.array([[0.0], [1.0]]), np.array([[1.0], [3.0]])

    def k(distance: float, scale: float = 1.5) -> float:
        return math.exp(-(distance**2) / (2 * scale**2))

    pooled = k(1) + k(2) - (k(1) + k(3) + k(0) + k(2)) / 2
    assert squared_mmd(x, y, np.ones((1, 2)))[0] == pytest.approx(pooled, abs=1e-12)
    # The authors' form: scale 1 (inside x) for the first two terms, 2 (inside y) for the third.
    authors = k(1, 1) + k(2, 2) - (k(1, 1) + k(3, 1) + k(0, 1) + k(2, 1)) / 2
    assert squared_mmd(x, y, np.ones((1, 2)), bandwidth="authors")[0] == pytest.approx(authors, abs=1e-12)
    found = Preference.from_features([x, y], [y, y], "mmd")
    other = float(squared_mmd(y, y, np.ones((1, 2)))[0])
    assert found.weights == pytest.approx(weights_from_distances(np.array([pooled, other]), 100), abs=1e-12)


def test_mmd_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    values = [squared_mmd(rng.normal(size=(8, 2)), rng.normal(size=(8, 2)), np.ones((1, 8)))[0] for _ in range(600)]
    assert abs(np.mean(values)) < 4 * np.std(values) / math.sqrt(600)


@pytest.mark.parametrize("method", METHODS)
def test_finds_the_tasks_of_the_target(method: FeatureMethod) -> None:
    own, target = example()
    weights = Preference.from_features(own, target, method).weights
    assert np.argmax(weights) == 0
    assert weights[0] > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_invariances(method: FeatureMethod) -> None:
    own, target = example(1)
    found = Preference.from_features(own, target, method, gamma=5)
    rng = np.random.default_rng(0)
    shuffle = rng.permutation(len(target[0]))
    other = Preference.from_features(
        [x[rng.permutation(len(x))] for x in own], [y[shuffle] for y in target], method, gamma=5
    )
    assert other.weights == pytest.approx(found.weights, abs=1e-7)
    order = [2, 0, 3, 1]
    moved = Preference.from_features([own[t] for t in order], [target[t] for t in order], method, gamma=5)
    assert moved.weights == pytest.approx([found.weights[t] for t in order], abs=1e-9)
    columns = rng.permutation(6)
    turned = Preference.from_features([x[:, columns] for x in own], [y[:, columns] for y in target], method, gamma=5)
    assert turned.weights == pytest.approx(found.weights, abs=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_torch_and_numpy_and_types(method: FeatureMethod) -> None:
    own, target = example(2)
    found = Preference.from_features(own, target, method)
    tensors = Preference.from_features([torch.tensor(x) for x in own], [torch.tensor(y) for y in target], method)
    assert tensors.weights == found.weights
    half = [torch.tensor(x, dtype=torch.bfloat16) for x in own], [torch.tensor(y, dtype=torch.bfloat16) for y in target]
    assert Preference.from_features(*half, method).weights == pytest.approx(found.weights, abs=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_distances_so_large_that_exp_underflows(method: FeatureMethod) -> None:
    own, target = example()
    weights = Preference.from_features(own, target, method, gamma=1e9).weights
    assert weights == (1.0, 0.0, 0.0, 0.0)
    huge = Preference.from_features([x * 1e150 for x in own], [y * 1e150 for y in target], method)
    assert huge.weights == pytest.approx(Preference.from_features(own, target, method).weights, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_one_task(method: FeatureMethod) -> None:
    own, target = example()
    assert Preference.from_features(own[:1], target[:1], method).weights == (1,)


def test_one_sample() -> None:
    own, target = example()
    one = [y[:1] for y in target]
    for method in ("ot", "cosine"):
        found = Preference.from_features(own, one, method)  # type: ignore[arg-type]
        assert np.argmax(found.weights) == 0
        assert found.intervals == ((0, 1),) * 4
    with pytest.raises(
        InputError, match="mmd needs at least 2 samples on each side and the target has 1; give more, or"
    ):
        Preference.from_features(own, one, "mmd")
    with pytest.raises(InputError, match="mmd needs at least 2 samples on each side and task 1 has 1"):
        Preference.from_features([x[:1] for x in own], target, "mmd")


@pytest.mark.parametrize("method", METHODS)
def test_identical_features_everywhere(method: FeatureMethod) -> None:
    same = [np.full((5, 3), 0.1)] * 3
    with pytest.warns(
        UserWarning, match="all features are identical, in every task and in the target: they say nothing"
    ):
        found = Preference.from_features(same, [x[:4] for x in same], method)
    assert found.weights == pytest.approx((1 / 3,) * 3)


@pytest.mark.parametrize("method", METHODS)
def test_identical_features_in_one_task_only(method: FeatureMethod) -> None:
    own, target = example()
    own[3] = np.tile(own[3][:1], (5, 1))
    assert all(map(math.isfinite, Preference.from_features(own, target, method).weights))
    own[3] = np.tile(target[3][:1], (5, 1))
    assert all(map(math.isfinite, Preference.from_features(own, target, method).weights))


@pytest.mark.parametrize("method", METHODS)
def test_intervals_are_deterministic_and_around_the_weights(method: FeatureMethod) -> None:
    own, target = example(3)
    found = Preference.from_features(own, target, method, gamma=5)
    assert Preference.from_features(own, target, method, gamma=5) == found
    other = Preference.from_features(own, target, method, gamma=5, resampling=Resampling(seed=1))
    assert other.weights == found.weights
    assert other.intervals != found.intervals
    assert found.intervals is not None
    for weight, (low, high) in zip(found.weights, found.intervals, strict=True):
        assert low - 0.02 <= weight <= high + 0.02
        assert low < high


def test_transport_intervals_are_those_of_solving_every_draw_anew() -> None:
    own, target = example(4, tasks=3)
    solver = Sinkhorn(0.1, iterations=1000)
    found = Preference.from_features(own, target, "ot", gamma=20, solver=solver, raw=True)
    costs = [np.square(x[:, None] - y[None]).sum(axis=2) for x, y in zip(own, target, strict=True)]
    weights = []
    for row in np.concatenate(list(sample_replicates(25, Resampling()))):
        drawn = np.repeat(np.arange(25), row.astype(int))
        distances = np.array([sinkhorn(cost[:, drawn] / cost.max(), solver).cost for cost in costs])
        weights.append(weights_from_distances(distances, 20))
    anew = np.quantile(weights, [0.05, 0.95], axis=0).T
    assert found.intervals is not None
    np.testing.assert_allclose(found.intervals, anew, atol=1e-3)


def test_debiased_and_its_provenance() -> None:
    own, target = example()
    found = Preference.from_features(own, target, debias=True)
    assert found.provenance["debiased"] is True
    assert np.argmax(found.weights) == 0


def test_many_samples_are_drawn_from() -> None:
    own, target = example(samples=60)
    found = Preference.from_features(own, target, max_samples=20)
    assert (found.provenance["samples"], found.provenance["given_samples"]) == (20, 60)
    assert found == Preference.from_features(own, target, max_samples=20)
    assert Preference.from_features(own, target, max_samples=None).provenance["samples"] == 60


def test_non_convergence_is_a_warning_that_names_the_remedy() -> None:
    own, target = example()
    message = (
        r"transport did not converge within 2 iterations for 4 of 4 tasks \(largest residual .*, tolerance 1e-06\); "
        r"raise iterations, or the regularisation above 0.001"
    )
    with pytest.warns(UserWarning, match=message):
        found = Preference.from_features(own, target, solver=Sinkhorn(1e-3, iterations=2))
    assert found.provenance["converged"] is False


X = np.ones((3, 2))


@pytest.mark.parametrize(
    ("own", "target", "options", "message"),
    [
        ([], [], {}, "task features: expected a list of arrays [samples, width], one for each task"),
        ([X], [X, X], {}, "1 tasks, and target features of [3, 3] samples"),
        (
            [X],
            X,
            {},
            "target features: expected a list of arrays [samples, width], one for each task",
        ),
        ("ab", [X], {}, "task features: expected a list of arrays [samples, width], one for each task"),
        ([X], [X[:0]], {}, "target features of task 1: no samples, or features of width 0: found shape [0, "),
        ([X[:0]], [X], {}, "task features of task 1: no samples, or features of width 0: found shape [0, "),
        ([X[:, :0]], [X], {}, "task features of task 1: no samples, or features of width 0: found shape [3, 0]"),
        ([X], [X[0]], {}, "target features of task 1: expected a matrix [samples, width], found shape [2]"),
        (
            [X],
            [np.ones((3, 4))],
            {},
            "task 1: its features have width 2 and the target's have width 4; embed both with",
        ),
        (
            [X, X],
            [X, X[:2]],
            {},
            "2 tasks, and target features of [3, 2] samples: the target's samples must be embedded once",
        ),
        (
            [X],
            [[[1, math.nan], [0, 0]]],
            {},
            "target features of task 1: 1 of 2 rows hold NaN or infinity, first in row 0",
        ),
        ([X * math.inf], [X], {}, "task features of task 1: 3 of 3 rows hold NaN or infinity"),
        ([[["a"]]], [X], {}, "task features of task 1: expected numbers, found <U1"),
        ([[[1], [1, 2]]], [X], {}, "task features of task 1: the rows differ in length; give one array"),
        ([X], [X], {"method": "cosin"}, "method must be one of ot, cosine, mmd, not 'cosin' (did you mean 'cosine'?)"),
        ([X], [X], {"gamma": -1}, "gamma must be a finite number >= 0, not -1"),
        ([X], [X], {"max_samples": 0}, "of which 0 are to be used: both must be at least 1"),
        ([X], [X + 1], {"method": "mmd", "bandwidth": "x"}, "bandwidth must be 'pooled' or 'authors', not 'x'"),
        (
            [X * [[1], [-1], [0]]],
            [X],
            {"method": "cosine"},
            "the mean embedding of task 1 is zero, so it has no direction",
        ),
        ([X], [X[:2] * [[1], [-1]]], {"method": "cosine"}, "the target's under task 1 is zero"),
    ],
)
def test_bad_input(own: Any, target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.from_features(own, target, **options)
    assert message in str(error.value)
