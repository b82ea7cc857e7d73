"""Label-shift estimation: mixtures are found again, and by both solvers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tunable_magmax.errors import InputError
from tunable_magmax.preference.labels import class_shares
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.shift import closest_mixture, likeliest, log_likelihood, on_simplex
from tunable_magmax.preference.uncertainty import Resampling, half_l1

NO_DRAWS = Resampling(replicates=0)


def confusions(seed: int, tasks: int = 6, per_task: int = 3, accuracy: float = 0.6) -> NDArray[np.float64]:
    """What a classifier of this accuracy predicts on each task: [tasks, classes]."""
    rng = np.random.default_rng(seed)
    classes = tasks * per_task
    table = rng.dirichlet(np.full(classes, 0.3), size=classes) * (1 - accuracy) + np.eye(classes) * accuracy
    return table.reshape(tasks, per_task, classes).mean(axis=1)


def test_two_tasks_by_hand() -> None:
    # 0.9 w + 0.1 (1 - w) = 0.7 gives w = 0.75, where the mixture equals the histogram: both solvers must find it.
    tasks, seen = [{"a": 900, "b": 100}, {"a": 100, "b": 900}], ["a"] * 7 + ["b"] * 3
    for method in ("em", "least_squares", "shift"):
        found = Preference.from_predictions(tasks, seen, method, smoothing=0)
        assert found.weights == pytest.approx((0.75, 0.25), abs=1e-3)
        assert found.method == "shift"


def test_smoothing_by_hand() -> None:
    # Half a sample to each of two classes: (8 + 0.5) / 9. At most a fifth of the sample is added: 0.2 * 2 / 2 = 0.2.
    np.testing.assert_allclose(class_shares(np.array([[8.0, 0.0]]), 0.5), [[8.5 / 9, 0.5 / 9]])
    np.testing.assert_allclose(class_shares(np.array([[2.0, 0.0]]), 0.5), [[2.2 / 2.4, 0.2 / 2.4]])


def test_without_confusion_it_is_counting() -> None:
    tasks = [{0: 50, 1: 50}, {2: 100}]
    seen = [0, 1, 1, 2, 2]
    pseudo = Preference.from_predictions(tasks, seen, "pseudo", task_label_counts=tasks)
    assert pseudo.weights == (0.6, 0.4)
    assert pseudo.method == "pseudo"
    em = Preference.from_predictions(tasks, seen, "em", smoothing=0)
    assert em.weights == pytest.approx((0.6, 0.4), abs=1e-6)


@pytest.mark.parametrize("method", ["em", "least_squares", "shift"])
def test_error_falls_like_one_over_root_n(method: Any) -> None:
    table = confusions(0)
    counts = np.rint(table * 1e6)
    truth = np.array([0.5, 0.3, 0.2, 0, 0, 0])
    rng = np.random.default_rng(1)
    errors = []
    for samples in (100, 1600, 25600):
        found = [
            Preference.from_predictions(
                counts, np.repeat(np.arange(18), rng.multinomial(samples, truth @ table)), method, resampling=NO_DRAWS
            )
            for _ in range(12)
        ]
        errors.append(np.mean([half_l1(np.array(one.weights), truth) for one in found]))
    # Sixteen times the samples: a quarter of the error.
    assert errors[1] < errors[0] / 2.5
    assert errors[2] < errors[1] / 2.5
    assert errors[2] < 0.02


def test_beats_counting_when_the_classifier_errs() -> None:
    table = confusions(2, accuracy=0.3)
    counts = np.rint(table * 500)
    truth = np.array([0.6, 0.4, 0, 0, 0, 0])
    labels = [{3 * t + k: 1 for k in range(3)} for t in range(6)]
    rng = np.random.default_rng(3)
    shift, pseudo = [], []
    for _ in range(10):
        seen = np.repeat(np.arange(18), rng.multinomial(100, truth @ table))
        shift.append(Preference.from_predictions(counts, seen, resampling=NO_DRAWS).weights)
        pseudo.append(
            Preference.from_predictions(counts, seen, "pseudo", task_label_counts=labels, resampling=NO_DRAWS).weights
        )
    assert half_l1(np.array(shift), truth).mean() < 0.6 * half_l1(np.array(pseudo), truth).mean()


@given(st.integers(0, 10_000), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_stays_on_the_simplex_and_on_its_optimum(seed: int, samples: int) -> None:
    rng = np.random.default_rng(seed)
    table = class_shares(rng.multinomial(50, rng.dirichlet(np.full(8, 0.2)), size=5).astype(float), 0.5)
    counts = rng.multinomial(samples, rng.dirichlet(np.full(8, 0.5)))[None].astype(float)
    shares = counts / samples
    rivals = np.concatenate([rng.dirichlet(np.full(5, 0.5), size=200), np.eye(5)])
    for weights in (likeliest(table, counts, iterations=3000), closest_mixture(table, counts)):
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-9)
    best = log_likelihood(table, counts, likeliest(table, counts, iterations=3000))
    assert best >= log_likelihood(table, np.repeat(counts, len(rivals), 0), rivals).max() - samples * 1e-4
    nearest = np.square(closest_mixture(table, counts) @ table - shares).sum()
    assert nearest <= np.square(rivals @ table - shares).sum(axis=1).min() + 1e-8


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=5))
def test_projection_is_the_nearest_point(points: list[list[float]]) -> None:
    given_points = np.array(points)
    found = on_simplex(given_points)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-12)
    # Variational inequality: no corner of the simplex lies on the point's side of its projection.
    slack = np.einsum("bt,ct->bc", given_points - found, np.eye(4)) - ((given_points - found) * found).sum(1)[:, None]
    assert slack.max() <= 1e-9


def test_invariances() -> None:
    counts = np.rint(confusions(4) * 300)
    rng = np.random.default_rng(5)
    seen = rng.integers(0, 18, size=60)
    found = Preference.from_predictions(counts, seen)
    again = Preference.from_predictions(counts, rng.permutation(seen))
    assert (again.weights, again.intervals) == (found.weights, found.intervals)
    order = [3, 1, 5, 0, 4, 2]
    moved = Preference.from_predictions(counts[order], seen)
    assert moved.weights == pytest.approx([found.weights[t] for t in order], abs=1e-9)
    classes = rng.permutation(18)
    renamed = Preference.from_predictions(counts[:, classes], np.argsort(classes)[seen])
    assert renamed.weights == pytest.approx(found.weights, abs=1e-9)
    named = [{f"c{c}": n for c, n in enumerate(row)} for row in counts]
    assert Preference.from_predictions(named, [f"c{c}" for c in seen]).weights == pytest.approx(
        found.weights, abs=1e-12
    )


def test_evidence_is_in_the_provenance_and_decides() -> None:
    counts = np.rint(confusions(6) * 500)
    found = Preference.from_predictions(counts, np.random.default_rng(0).integers(0, 18, size=50))
    evidence, solver = found.provenance["evidence"], found.provenance["solver"]
    assert isinstance(evidence, dict)
    assert isinstance(solver, str)
    assert set(evidence) == {"em", "least_squares"}
    assert evidence[solver] == max(evidence.values())
    by_hand = Preference.from_predictions(counts, np.random.default_rng(0).integers(0, 18, size=50), solver)  # type: ignore[arg-type]
    assert by_hand.weights == found.weights


def test_evidence_by_hand() -> None:
    # Two tasks that never err; predictions a, a, b. Leaving out an a: fit (1/2, 1/2), score log 1/2; leaving out b:
    # fit (1, 0), so b is impossible for least squares and nearly so for EM after its last round.
    tasks = [{"a": 10}, {"b": 10}]
    found = Preference.from_predictions(tasks, ["a", "a", "b", "b"], smoothing=0)
    # Leaving one of four out leaves shares 1/3 for its own class: log 1/3 each time, whatever the solver.
    assert found.provenance["evidence"] == pytest.approx(
        {"em": math.log(1 / 3), "least_squares": math.log(1 / 3)}, abs=1e-4
    )


def test_labels_and_predictions_share_a_likelihood() -> None:
    counts, labels = [{"a": 60, "b": 40}, {"a": 40, "b": 60}], [{"a": 10}, {"b": 10}]
    alone = Preference.from_predictions(counts, ["a"] * 5 + ["b"] * 5, "em")
    joint = Preference.from_predictions(
        counts, ["a"] * 5 + ["b"] * 5, task_label_counts=labels, labels=["a"] * 9 + ["b"]
    )
    assert alone.weights == pytest.approx((0.5, 0.5), abs=1e-3)
    assert 0.75 < joint.weights[0] < 0.95
    assert joint.method == "shift+label"
    assert joint.provenance["labels"] == {"used": 10, "unknown": 0}
    assert joint.provenance["samples"] == 20


def test_few_samples_and_one_task() -> None:
    counts = np.rint(confusions(7) * 500)
    one = Preference.from_predictions(counts, [0])
    assert np.argmax(one.weights) == 0
    assert one.intervals == ((0, 1),) * 6
    assert Preference.from_predictions(counts[:1], [0, 1, 2]).weights == (1,)


def test_predictions_that_no_task_shows_are_left_out() -> None:
    found = Preference.from_predictions([{"a": 5}, {"b": 5}], ["a", "b", "z"])
    assert found.provenance["predictions"] == {"used": 2, "unknown": 1}
    with pytest.raises(InputError, match="none of the 1 predictions is a class that any task shows"):
        Preference.from_predictions([{"a": 5}, {"b": 5}], ["z"])


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (
            [{"a": 1}],
            {"method": "shfit"},
            "method must be one of shift, em, least_squares, pseudo, not 'shfit' (did you",
        ),
        ([{"a": 1}], {"smoothing": -1}, "smoothing must be a number >= 0, not -1"),
        ([{"a": 1}], {"method": "pseudo"}, "task_label_counts is missing"),
        ([{"a": 1}], {"labels": ["a"]}, "task_label_counts is missing"),
        (
            [{"a": 1}],
            {"method": "pseudo", "labels": ["a"], "task_label_counts": [{"a": 1}]},
            "labels join a likelihood, which pseudo does not use; choose method='em'",
        ),
        (
            [{"a": 1}],
            {"method": "least_squares", "labels": ["a"], "task_label_counts": [{"a": 1}]},
            "choose method='em'",
        ),
        ([{"a": 1}], {"labels": ["a"], "task_label_counts": [{"a": 1}] * 2}, "task_predictions has 1 tasks and"),
        ([{"a": 1}, {"b": 0}], {}, "no counts for task 2: every task needs a sample that the classifier has seen"),
    ],
)
def test_bad_input(tasks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.from_predictions(tasks, ["a"], **options)
    assert message in str(error.value)
