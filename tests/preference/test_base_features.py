"""Preferences from the base's embeddings: mixtures are found again, and the error that is expected is the error."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tunable_magmax.preference.base_features import TaskProbe, ood_share
from tunable_magmax.preference.mixture import Groups
from tunable_magmax.preference.preference import Preference

Floats = NDArray[np.float64]
WIDTH = 24


class World:
    """Tasks of some classes each, as clouds in the base's space. `gap`: how far apart classes are, in their spread."""

    def __init__(self, seed: int, tasks: int = 4, each: int = 3, gap: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.tasks, self.each = tasks, each
        self.means = gap * self.rng.normal(size=(tasks, each, WIDTH))

    def draw(self, task: int, rows: int) -> tuple[Floats, list[str]]:
        classes = self.rng.integers(0, self.each, rows)
        points = self.means[task][classes] + self.rng.normal(size=(rows, WIDTH))
        return points, [f"class {task * self.each + c}" for c in classes]

    def profiles(self, rows: int = 120) -> tuple[list[Floats], list[list[str]]]:
        drawn = [self.draw(t, rows) for t in range(self.tasks)]
        return [points for points, _ in drawn], [labels for _, labels in drawn]

    def target(self, *counts: int) -> Floats:
        return np.concatenate([self.draw(t, count)[0] for t, count in enumerate(counts) if count])


def estimate(features: Any, labels: Any, target: Any, seed: int = 0) -> Preference:
    probe = TaskProbe.fit(features, labels, seed)
    groups = Groups.of([Counter(own) for own in labels])
    evidence, facts = probe.evidence(target, groups), {"probe": probe.facts()}
    found = Preference.from_evidence(evidence, groups, "probe", facts, seed=seed)
    return found.with_ood_share(probe, target)


@pytest.mark.parametrize("counts", [(60, 0, 40, 0), (25, 25, 25, 25), (100, 0, 0, 0), (0, 80, 10, 10)])
def test_the_mixture_is_found_again(counts: tuple[int, ...]) -> None:
    world = World(0)
    features, labels = world.profiles()
    found = estimate(features, labels, world.target(*counts))
    assert found.method == "probe"
    assert np.abs(np.array(found.weights) - np.array(counts) / 100).sum() / 2 < 0.08
    assert found.intervals is not None
    for weight, (low, high) in zip(found.weights, found.intervals, strict=True):
        assert low <= weight + 0.01
        assert weight - 0.01 <= high
    told = found.provenance
    assert told["samples"] == 100
    assert found.expected_error is not None
    assert 0 < found.expected_error < 0.15
    assert told["ood_share"] < 0.15  # type: ignore[operator]
    facts = told["probe"]
    assert isinstance(facts, dict)
    assert facts["class_accuracy"] <= facts["task_accuracy"]
    assert Preference.from_json(found.to_json()) == found


def test_likelihoods_are_bayes_without_the_tasks_shares() -> None:
    """A task with nine times the rows of another must not look more likely for that."""
    world = World(1, tasks=2, each=1, gap=0.4)
    (large, few), target = (world.draw(0, 900), world.draw(1, 100)), world.target(200, 200)
    found = estimate([large[0], few[0]], [large[1], few[1]], target)
    assert found.weights == pytest.approx((0.5, 0.5), abs=0.12)


def test_tasks_that_share_classes_are_told_apart_by_their_look() -> None:
    rng = np.random.default_rng(2)
    means, look = rng.normal(size=(3, WIDTH)), rng.normal(size=WIDTH)
    labels = rng.integers(0, 3, 150)
    photos = means[labels] + rng.normal(size=(150, WIDTH)) * 0.5
    sketches = means[labels] + look + rng.normal(size=(150, WIDTH)) * 0.5
    target = means[labels[:50]] + look + rng.normal(size=(50, WIDTH)) * 0.5
    found = estimate([photos, sketches], [labels, labels], target)
    assert found.weights[1] > 0.9


def test_something_that_no_task_held_is_outside() -> None:
    world = World(6)
    fitted = TaskProbe.fit(*world.profiles(200))
    equal = np.full(4, 0.25)
    own = world.target(100, 100, 100, 100)
    assert ood_share(fitted, equal, fitted.probe.distances(own)) == pytest.approx(0.05, abs=0.04)
    foreign = World(99).target(50, 50)
    assert ood_share(fitted, equal, fitted.probe.distances(foreign)) > 0.5
    # Only the tasks with weight set the measure.
    alone = ood_share(
        fitted, np.array([1.0, 0, 0, 0]), fitted.probe.held_out_distances[fitted.members[fitted.probe.judged] == 0]
    )
    assert alone == pytest.approx(0.05, abs=0.01)
