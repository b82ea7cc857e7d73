"""The paper's estimators from inputs: Sinkhorn against POT and exact transport; transport, cosine and MMD by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.preference.distances import FeatureMethod, sinkhorn, squared_mmd
from tunable_magmax.preference.preference import Preference

METHODS: list[FeatureMethod] = ["ot", "cosine", "mmd"]
LONG = 20_000


def cost_of(seed: int, n: int = 30, m: int = 7) -> NDArray[np.float64]:
    """The paper's cost of two clouds, by the definition."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 3)), rng.normal(size=(m, 3)) + 0.5
    cost = np.square(x[:, None, :] - y[None, :, :]).sum(axis=2)
    return np.asarray(cost / cost.max())


def example(seed: int = 0, tasks: int = 4, rows: int = 40, samples: int = 25) -> tuple[list[Any], list[Any]]:
    """Tasks around different centres; the site mixes tasks 1 and 2."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(tasks, 6)) * 2 + 3
    own = [rng.normal(size=(rows, 6)) + centre for centre in centres]
    site = np.concatenate([rng.normal(size=(samples - 8, 6)) + centres[0], rng.normal(size=(8, 6)) + centres[1]])
    return own, [site] * tasks


@pytest.mark.parametrize("regularisation", [1.0, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("seed", [0, 1])
def test_cost_of_the_plan_equals_pot(regularisation: float, seed: int) -> None:
    import ot

    cost = cost_of(seed)
    plan = ot.sinkhorn([], [], cost, regularisation, method="sinkhorn_log", numItermax=LONG, stopThr=1e-9, warn=False)
    found, residual = sinkhorn(cost, regularisation, LONG, 1e-9)
    assert residual <= 1e-9
    assert found == pytest.approx(float((plan * cost).sum()), abs=1e-6)


def test_transport_by_hand() -> None:
    # One site's point at 0. Task 1 at 0, 2: costs 0, 4 over 4, mean 1/2. Task 2 at 1, 1: costs 1, 1 over 1, mean 1.
    own, site = [np.array([[0.0], [2.0]]), np.array([[1.0], [1.0]])], [np.array([[0.0]])] * 2
    found = Preference.from_features(own, site, raw=True)
    assert found.provenance["distances"] == pytest.approx([0.5, 1.0])
    assert found.weights == pytest.approx((1.0, math.exp(-50)), rel=1e-9)
    assert (found.intervals, found.expected_error, found.prior) == (None, None, None)


def test_transport_compares_directions_unless_raw() -> None:
    own, site = example()
    longer = [3.0 * rows for rows in site]
    plain = Preference.from_features(own, site).weights
    assert Preference.from_features(own, longer).weights == pytest.approx(plain, rel=1e-9)
    raw = Preference.from_features(own, site, raw=True).weights
    assert Preference.from_features(own, longer, raw=True).weights != pytest.approx(raw, rel=1e-3)
    unit = [[rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in side] for side in (own, site)]
    assert Preference.from_features(*unit, raw=True).weights == pytest.approx(plain, rel=1e-9)


def test_cosine_by_hand() -> None:
    # Mean of the site (1, 0); of task 1 (1, 1): cos = 1/sqrt 2; of task 2 (3, 0): cos = 1.
    own = [np.array([[0.0, 2.0], [2.0, 0.0]]), np.array([[3.0, 1.0], [3.0, -1.0]])]
    site = [np.array([[2.0, 0.0], [0.0, 0.0]])] * 2
    found = Preference.from_features(own, site, "cosine")
    assert found.provenance["distances"] == pytest.approx([1 - 1 / math.sqrt(2), 0], abs=1e-15)
    share = math.exp(-50 * (1 - 1 / math.sqrt(2)))
    assert found.weights == pytest.approx((share / (1 + share), 1 / (1 + share)), rel=1e-12)


def test_mmd_by_hand() -> None:
    # x = 0, 1; y = 1, 3. Distances: 1 | 2 | 1, 3, 0, 2: median 1.5, k(d) = exp(-d^2 / 4.5).
    # MMD^2 = k(1) + k(2) - 2 * (k(1) + k(3) + k(0) + k(2)) / 4.
    x, y = np.array([[0.0], [1.0]]), np.array([[1.0], [3.0]])

    def k(distance: float) -> float:
        return math.exp(-(distance**2) / (2 * 1.5**2))

    assert squared_mmd(x, y) == pytest.approx(k(1) + k(2) - (k(1) + k(3) + k(0) + k(2)) / 2, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_finds_the_tasks_of_the_site_whatever_the_order_and_the_kind_of_array(method: FeatureMethod) -> None:
    own, site = example()
    found = Preference.from_features(own, site, method)
    assert np.argmax(found.weights) == 0
    assert found.weights[0] > 0.5
    order = np.random.default_rng(1).permutation(len(site[0]))
    shuffled = Preference.from_features(own, [rows[order] for rows in site], method)
    assert shuffled.weights == pytest.approx(found.weights, abs=1e-9)
    turned = Preference.from_features(own[::-1], site, method)
    assert turned.weights[::-1] == pytest.approx(found.weights, abs=1e-12)
    tensors = Preference.from_features([torch.tensor(x) for x in own], [torch.tensor(x) for x in site], method)
    assert tensors.weights == found.weights


@pytest.mark.parametrize("method", METHODS)
def test_identical_features_give_equal_weights_and_a_warning(method: FeatureMethod) -> None:
    same = [np.full((3, 2), 0.1)] * 2
    with pytest.warns(UserWarning, match="they say nothing"):
        assert Preference.from_features(same, same, method).weights == (0.5, 0.5)


X = np.ones((3, 2))


@pytest.mark.parametrize(
    ("own", "site", "options", "message"),
    [
        ([], [], {}, "task features: expected a list of arrays [samples, width], one for each task"),
        ([X], [X, X], {}, "1 tasks, and site features of [3, 3] samples"),
        ([X], [X[:0]], {}, "site features of task 1: no samples, or features of width 0: found shape [0, "),
        ([X], [np.ones((3, 4))], {}, "width 2 and the site's have width 4"),
        ([X], [[[1, math.nan], [0, 0]]], {}, "1 of 2 rows hold NaN or infinity, first in row 0"),
        ([X], [X], {"method": "cosin"}, "not 'cosin' (did you mean 'cosine'?)"),
        ([X * [[1], [-1], [0]]], [X], {"method": "cosine"}, "the mean embedding of task 1 is zero"),
        ([X[:1]], [X + 1], {"method": "mmd"}, "task 1 has 1"),
    ],
)
def test_bad_input(own: Any, site: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.from_features(own, site, **options)
    assert message in str(error.value)
