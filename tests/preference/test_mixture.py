"""The posterior of the mixture: against exact enumeration, on data drawn from the model, and what may not matter."""

import itertools
import math

import numpy as np
import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.preference.base_features import TaskProbe
from tunable_magmax.preference.mixture import CLASS_GRID, FEW, WEIGHT_GRID, Groups, Mixture, infer_mixture


def log_rising(start: float, count: int) -> float:
    return math.lgamma(start + count) - math.lgamma(start)


def exact_weights(evidence: np.ndarray, groups: Groups) -> np.ndarray:
    """The posterior mean of the weights, by a sum over everything that is not known: only for tiny cases."""
    tasks, (samples, width) = groups.tasks, evidence.shape
    total, mean = 0.0, np.zeros(tasks)
    for z in itertools.product(range(width), repeat=samples):
        likelihood = math.prod(evidence[i, g] for i, g in enumerate(z))
        if not likelihood:
            continue
        counts = np.bincount(z, minlength=width)
        by_task = np.bincount(groups.owners[list(z)], minlength=tasks)
        inside = 0.0
        for b in CLASS_GRID:
            logs = sum(log_rising(b * q, n) for q, n in zip(groups.shares, counts, strict=True))
            inside += math.exp(logs - sum(log_rising(b, n) for n in by_task))
        for k in range(1, tasks + 1):
            for chosen in itertools.combinations(range(tasks), k):
                if any(by_task[t] for t in range(tasks) if t not in chosen):
                    continue
                for a in WEIGHT_GRID:
                    logs = sum(log_rising(a, by_task[t]) for t in chosen) - log_rising(k * a, samples)
                    chance = k**-FEW / math.comb(tasks, k) * math.exp(logs) * likelihood * inside
                    total += chance
                    mean[list(chosen)] += chance * (a + by_task[list(chosen)]) / (k * a + samples)
    return mean / total


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_that_of_the_exact_posterior(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = Groups.of([{"a": 3, "b": 1}, {"b": 2}, {"c": 1}])
    evidence = rng.random((4, 4)) ** 3
    found = np.mean([infer_mixture(evidence, groups, k).weights for k in range(4)], axis=0)
    np.testing.assert_allclose(found, exact_weights(evidence, groups), atol=0.05)


def drawn_from_the_model(rng: np.random.Generator, groups: Groups, samples: int) -> tuple[np.ndarray, np.ndarray]:
    tasks = groups.tasks
    sizes = np.arange(1, tasks + 1.0)
    k = rng.choice(tasks, p=sizes**-FEW / (sizes**-FEW).sum()) + 1
    weights = np.zeros(tasks)
    weights[rng.permutation(tasks)[:k]] = rng.dirichlet(np.full(k, rng.choice(WEIGHT_GRID)))
    b = rng.choice(CLASS_GRID)
    shares = rng.standard_gamma(b * groups.shares) + 1e-30
    shares *= (weights / np.bincount(groups.owners, shares))[groups.owners]
    z = rng.choice(len(shares), samples, p=shares / shares.sum())
    # Each group gives a number of its own, with noise of one: neighbours are confused.
    seen = z + rng.normal(size=samples)
    return weights, np.exp(-0.5 * (seen[:, None] - np.arange(len(shares))) ** 2)


def test_intervals_cover_and_the_expected_error_is_the_real_one_on_data_of_the_model() -> None:
    groups = Groups.of([{(t, c): c + 1 for c in range(t % 3 + 1)} for t in range(6)])
    covered, real, expected = [], [], []
    for k in range(150):
        weights, evidence = drawn_from_the_model(np.random.default_rng(k), groups, 20)
        found = infer_mixture(evidence, groups)
        low, high = found.intervals.T
        # Of a weight that is exactly 0 the posterior's lower end is a number as small as floats are.
        covered.append((low <= weights + 1e-9) & (weights <= high))
        real.append(np.abs(found.weights - weights).sum() / 2)
        expected.append(found.expected_error)
    assert 0.86 < np.mean(covered) < 0.99  # weights of 0 are covered more often than 90%
    assert abs(np.mean(real) - np.mean(expected)) < 0.02


def test_tasks_of_unequal_numbers_of_classes_count_by_their_labels() -> None:
    small, large = {f"s{k}": 10 for k in range(2)}, {f"l{k}": 10 for k in range(30)}
    labels = ["s0", "s1"] * 10 + [f"l{k}" for k in range(20)]
    groups = Groups.of([small, large])
    found = infer_mixture(groups.of_labels(labels), groups)
    assert found.weights[0] == pytest.approx(0.5, abs=0.03)
    assert found.intervals[0][0] < 0.45
    assert found.intervals[0][1] > 0.55


def test_a_label_of_several_tasks_is_divided_by_its_shares_in_them() -> None:
    groups = Groups.of([{"yes": 90, "no": 10}, {"yes": 10, "no": 90}])
    mostly = infer_mixture(groups.of_labels(["yes"] * 18 + ["no"] * 2), groups).weights
    assert mostly[0] > 0.65
    even = infer_mixture(groups.of_labels(["yes"] * 10 + ["no"] * 10), groups)
    assert even.weights[0] == pytest.approx(0.5, abs=0.15)
    assert even.intervals[0][1] - even.intervals[0][0] > 0.3


def test_a_label_that_names_a_task_says_the_task() -> None:
    groups = Groups.of([{"a": 1, "b": 1}, {"a": 1}])
    found = infer_mixture(groups.of_task_names(["bank"] * 9 + ["travel"], ["bank", "travel"]), groups)
    assert found.weights[0] == pytest.approx(0.8, abs=0.06)


def test_labels_that_use_half_of_the_classes_say_so_of_the_class_shares() -> None:
    groups = Groups.of([dict.fromkeys(range(8), 1), dict.fromkeys(range(8, 16), 1)])
    shares = infer_mixture(groups.of_labels([0, 1, 2, 3] * 10), groups).class_shares
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(shares[k] for k in range(4)) > 0.8
    assert min(shares.values()) > 0


def same(first: Mixture, second: Mixture) -> bool:
    return np.array_equal(first.weights, second.weights) and np.array_equal(first.intervals, second.intervals)


def test_one_seed_is_one_result_whatever_the_order_and_the_scale_of_samples() -> None:
    rng = np.random.default_rng(0)
    groups = Groups.of([{"a": 1, "b": 1}, {"c": 1}])
    evidence = rng.random((12, 3))
    found = infer_mixture(evidence, groups, seed=3)
    assert same(found, infer_mixture(evidence, groups, seed=3))
    assert same(found, infer_mixture(evidence[rng.permutation(12)], groups, seed=3))
    assert same(found, infer_mixture(evidence * 2.0 ** rng.integers(-9, 9, (12, 1)), groups, seed=3))
    assert not same(found, infer_mixture(evidence, groups, seed=4))


def test_evidence_that_says_nothing_leaves_the_tasks_alike() -> None:
    groups = Groups.of([{"a": 1}, {"b": 1}, {"c": 1}])
    found = infer_mixture(np.ones((20, 3)), groups)
    np.testing.assert_allclose(found.weights, 1 / 3, atol=0.08)
    assert (found.intervals[:, 1] - found.intervals[:, 0] > 0.5).all()
    sure = infer_mixture(groups.of_labels(["a"] * 200), groups)
    for each in (found, sure):
        assert ((each.intervals[:, 0] <= each.weights) & (each.weights <= each.intervals[:, 1])).all()


def test_more_samples_than_fit_at_once_and_many_tasks() -> None:
    groups = Groups.of([{t: 1} for t in range(50)])
    found = infer_mixture(groups.of_labels([0] * 300 + [1] * 100), groups)
    np.testing.assert_allclose(found.weights[:2], [0.75, 0.25], atol=0.02)
    assert (found.weights > 0).all()
    assert found.expected_error < 0.05
    assert found.mattering == pytest.approx(2, abs=0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_likelihoods_that_are_no_likelihoods_are_refused(value: float) -> None:
    groups = Groups.of([{"a": 1}, {"b": 1}])
    with pytest.raises(InputError, match="sample 2"):
        infer_mixture(np.array([[1.0, 0.5], [0.5, value]]), groups)


def test_samples_that_can_be_of_no_task_or_none_at_all_are_refused() -> None:
    groups = Groups.of([{"a": 1}, {"b": 1}])
    with pytest.raises(InputError, match="sample 2"):
        infer_mixture(groups.of_labels(["a", "bird"]), groups)
    with pytest.raises(InputError, match="at least one sample"):
        infer_mixture(np.ones((0, 2)), groups)
    with pytest.raises(InputError, match="count"):
        Groups.of([{"a": 1}, {"b": -1}])


def test_inputs_are_told_by_the_probe_also_of_classes_it_never_saw() -> None:
    rng = np.random.default_rng(0)
    centres = {name: rng.normal(size=8) for name in "abcd"}

    def around(names: str) -> np.ndarray:
        return np.array([centres[name] + 0.1 * rng.normal(size=8) for name in names])

    probe = TaskProbe.fit([around("aabb" * 5), around("cccc" * 5)], [list("aabb" * 5), list("cccc" * 5)])
    groups = Groups.of([{"a": 1, "b": 1, "unseen": 1}, {"c": 1}])
    evidence = probe.evidence(around("aaac" * 5), groups)
    assert evidence.shape == (20, 4)
    assert (evidence > 0).all()
    assert infer_mixture(evidence, groups).weights[0] == pytest.approx(0.7, abs=0.08)
