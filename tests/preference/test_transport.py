"""Sinkhorn against POT and against exact transport."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tunable_magmax.data.arrays import rescaled, squared_distances
from tunable_magmax.errors import InputError
from tunable_magmax.preference.transport import Sinkhorn, SinkhornResult, _solve, transports

LONG = 20_000


def sinkhorn(cost: NDArray[np.float64], solver: Sinkhorn) -> SinkhornResult:
    """Transport under a cost matrix, without bootstrap draws."""
    n, m = cost.shape
    return _solve(cost[None].copy(), solver, np.empty((0, n)), np.empty((0, m)))[0]


def clouds(seed: int, n: int = 30, m: int = 7, width: int = 3) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, width)), rng.normal(size=(m, width)) + 0.5


def cost_of(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The paper's cost, recomputed by the definition."""
    cost = np.square(x[:, None, :] - y[None, :, :]).sum(axis=2)
    return np.asarray(cost / cost.max())


@pytest.mark.parametrize("regularisation", [1.0, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cost_of_the_plan_equals_pot(regularisation: float, seed: int) -> None:
    ot = pytest.importorskip("ot")
    x, y = clouds(seed)
    cost = cost_of(x, y)
    plan = ot.sinkhorn([], [], cost, regularisation, method="sinkhorn_log", numItermax=LONG, stopThr=1e-9, warn=False)
    solver = Sinkhorn(regularisation, iterations=LONG, tolerance=1e-9)
    (found,) = transports([x], [y], solver)
    assert found.converged
    assert found.residual <= 1e-9
    assert found.cost == pytest.approx(float((plan * cost).sum()), abs=1e-6)
    assert sinkhorn(cost, solver).cost == pytest.approx(found.cost, abs=1e-9)


@pytest.mark.parametrize("regularisation", [1.0, 0.1, 0.01, 0.001])
def test_every_iteration_is_pots(regularisation: float) -> None:
    # POT updates columns first, so the transposed problem goes through the same plans, converged or not.
    ot = pytest.importorskip("ot")
    x, y = clouds(0, n=12, m=9)
    cost = cost_of(x, y)
    for iterations in (1, 2, 40):
        plan = ot.sinkhorn(
            [], [], cost.T, regularisation, method="sinkhorn_log", numItermax=iterations, stopThr=0, warn=False
        )
        found = sinkhorn(cost, Sinkhorn(regularisation, iterations=iterations, tolerance=0))
        assert found.iterations == iterations
        assert found.cost == pytest.approx(float((plan * cost.T).sum()), abs=1e-12)


def test_goes_to_exact_transport() -> None:
    ot = pytest.importorskip("ot")
    x, y = clouds(3)
    cost = cost_of(x, y)
    exact = float(ot.emd2([], [], cost))
    gaps = [sinkhorn(cost, Sinkhorn(r, iterations=LONG, tolerance=1e-9)).cost - exact for r in (0.1, 0.01, 1e-3, 1e-4)]
    assert gaps[0] > gaps[1] > gaps[2] > -1e-6
    assert abs(gaps[-1]) < 1e-6


def test_two_points_by_hand() -> None:
    # C = [[0, 1], [1, 0]]: by symmetry the scalings are equal, so P = K / sum(K), <P, C> = e^(-1/r) / (1 + e^(-1/r)).
    for regularisation in (1.0, 0.1):
        found = sinkhorn(np.array([[0.0, 1.0], [1.0, 0.0]]), Sinkhorn(regularisation))
        small = math.exp(-1 / regularisation)
        assert found.cost == pytest.approx(small / (1 + small), rel=1e-12)
        assert (found.converged, found.iterations) == (True, 1)


def test_one_point_on_a_side_has_one_plan() -> None:
    x, y = clouds(4, n=7, m=1)
    assert transports([x], [y])[0].cost == pytest.approx(cost_of(x, y).mean(), rel=1e-12)
    assert transports([y], [x])[0].cost == pytest.approx(cost_of(x, y).mean(), rel=1e-12)
    assert transports([y], [y])[0].cost == 0


@given(st.integers(0, 1000), st.floats(0.005, 1))
@settings(max_examples=25, deadline=None)
def test_invariances(seed: int, regularisation: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = clouds(seed)
    solver = Sinkhorn(regularisation, iterations=5000, tolerance=1e-9)
    found = transports([x, y], [y, y], solver)
    shuffled = transports([x[rng.permutation(len(x))]], [y[rng.permutation(len(y))]], solver)[0]
    assert shuffled.cost == pytest.approx(found[0].cost, abs=1e-8)
    assert transports([x * 1e3 + 7], [y * 1e3 + 7], solver)[0].cost == pytest.approx(found[0].cost, abs=1e-8)
    alone = transports([y], [y], solver)[0]
    assert alone.cost == pytest.approx(found[1].cost, abs=1e-13)
    assert alone.iterations == found[1].iterations


def test_tasks_of_different_sizes_share_a_call() -> None:
    pairs = [clouds(seed, n=5 + seed % 3, m=4) for seed in range(6)]
    together = transports([x for x, _ in pairs], [y for _, y in pairs])
    for result, (x, y) in zip(together, pairs, strict=True):
        assert result.cost == pytest.approx(transports([x], [y])[0].cost, abs=1e-13)


@pytest.mark.parametrize("regularisation", [0.5, 0.01])
@pytest.mark.parametrize("debias", [False, True])
def test_blocks_give_the_same(regularisation: float, debias: bool) -> None:
    x, y = clouds(5, n=20, m=33)
    whole = Sinkhorn(regularisation, iterations=50, tolerance=1e-9)
    tight = Sinkhorn(regularisation, iterations=50, tolerance=1e-9, memory=3 * 8 * 20 * 7)
    first, second = transports([x], [y], whole, debias=debias)[0], transports([x], [y], tight, debias=debias)[0]
    assert second.cost == pytest.approx(first.cost, abs=1e-12)
    assert second.residual == pytest.approx(first.residual, abs=1e-10)
    assert (second.iterations, second.converged) == (first.iterations, first.converged)


def test_debiased_is_zero_between_equal_samples_and_positive_between_others() -> None:
    x, y = clouds(6)
    solver = Sinkhorn(iterations=2000, tolerance=1e-9)
    same, other = transports([x, x], [x, x + 3], solver, debias=True)
    assert same.cost == pytest.approx(0, abs=1e-9)
    # Far apart, the squared distance of a shift is what remains: |shift|^2 over the largest squared distance.
    largest = np.square(x[:, None] - x[None] - 3).sum(axis=2).max()
    assert other.cost == pytest.approx(27 / largest, rel=1e-4)
    assert transports([x], [y], solver, debias=True)[0].cost < transports([x], [y], solver)[0].cost


@pytest.mark.parametrize("debias", [False, True])
def test_draws_are_the_costs_of_samples_drawn_again(debias: bool) -> None:
    x, y = clouds(7, n=40, m=30)
    rng = np.random.default_rng(0)
    draws = rng.multinomial(30, np.full(30, 1 / 30), size=4).astype(np.float64)
    solver = Sinkhorn(0.1, iterations=1000, tolerance=1e-9)
    (found,) = transports([x], [y], solver, debias=debias, draws=draws)
    largest = np.square(x[:, None] - y[None]).sum(axis=2).max()

    def cost(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
        return sinkhorn(np.square(first[:, None] - second[None]).sum(axis=2) / largest, solver).cost

    for drawn, row in zip(found.draws, draws, strict=True):
        sample = np.repeat(y, row.astype(int), axis=0)
        again = cost(x, sample) - (0.5 * cost(x, x) + 0.5 * cost(sample, sample) if debias else 0)
        assert drawn == pytest.approx(again, abs=1e-4)


@pytest.mark.parametrize("debias", [False, True])
def test_draws_to_first_order_for_large_samples(debias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clouds(7, n=40, m=30)
    draws = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=50).astype(np.float64)
    solver = Sinkhorn(0.02, iterations=1000)
    solved = transports([x], [y], solver, debias=debias, draws=draws)[0].draws
    monkeypatch.setattr("tunable_magmax.preference.transport.SOLVED_DRAWS", 0)
    foreseen = transports([x], [y], solver, debias=debias, draws=draws)[0].draws
    assert np.corrcoef(solved, foreseen)[0, 1] > 0.9
    tight = Sinkhorn(0.02, iterations=1000, memory=3 * 8 * 40 * 7)
    assert transports([x], [y], tight, debias=debias, draws=draws)[0].draws == pytest.approx(foreseen, abs=1e-6)


def test_says_when_it_did_not_converge() -> None:
    x, y = clouds(8)
    found = transports([x], [y], Sinkhorn(1e-3, iterations=3))[0]
    assert (found.converged, found.iterations) == (False, 3)
    assert found.residual > 1e-6


def test_large_and_tiny_features_do_not_overflow() -> None:
    x, y = clouds(9)
    plain = transports([x], [y])[0].cost
    for factor in (1e305, 1e-300):
        assert transports([x * factor], [y * factor])[0].cost == pytest.approx(plain, rel=1e-9)
    assert transports([x.astype(np.float16)], [y.astype(np.float16)])[0].cost == pytest.approx(plain, rel=1e-2)
    first, second = rescaled(np.full((2, 2), 0.1), np.full((3, 2), 0.1))
    assert not first.any()
    assert not second.any()


def test_squared_distances_by_definition() -> None:
    x, y = clouds(10)
    expected = np.square(x[:, None] - y[None]).sum(axis=2)
    np.testing.assert_allclose(squared_distances(x, y), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"regularisation": 0.0}, "regularisation=0.0"),
        ({"regularisation": math.nan}, "regularisation=nan"),
        ({"iterations": 0}, "iterations=0"),
        ({"tolerance": -1.0}, "tolerance=-1.0"),
        ({"memory": 0}, "memory=0"),
    ],
)
def test_bad_settings(setting: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as error:
        Sinkhorn(**setting)  # type: ignore[arg-type]
    assert message in str(error.value)
