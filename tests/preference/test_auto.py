"""`auto` and `combined`: which source is used, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.preference.labels import class_shares
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.shift import shift_outlook
from tunable_magmax.preference.uncertainty import half_l1

SHARP = np.array([[95, 5, 0, 0], [0, 95, 5, 0], [0, 0, 95, 5]])
BLUNT = np.array([[26, 25, 24, 25], [25, 26, 25, 24], [24, 25, 26, 25]])
SEEN = [0] * 12 + [1] * 8
RNG = np.random.default_rng(0)
OWN = [RNG.normal(size=(20, 3)) + 4 * np.eye(3)[t] for t in range(3)]
TARGET = [RNG.normal(size=(10, 3)) + 4 * np.eye(3)[0]] * 3


def reason(preference: Preference) -> dict[str, Any]:
    found = preference.provenance["auto"]
    assert isinstance(found, dict)
    return found


def test_a_sharp_classifier_is_trusted() -> None:
    found = Preference.auto(task_predictions=SHARP, predictions=SEEN, task_features=OWN, target_features=TARGET)
    assert found.method == "shift"
    assert reason(found)["expected_error"] <= reason(found)["limit"] == 0.4
    assert "at most the limit" in reason(found)["reason"]


def test_a_blunt_classifier_is_not() -> None:
    blunt: dict[str, Any] = {"task_predictions": BLUNT, "predictions": SEEN}
    features: dict[str, Any] = {"task_features": OWN, "target_features": TARGET}
    found = Preference.auto(**blunt, **features)
    error = reason(Preference.auto(**blunt))["expected_error"]
    assert error > 0.4
    # Transport was measured to be wrong by 0.6, so the classifier must expect more than that to be left alone.
    assert found.method == ("ot" if error > 0.6 else "shift")
    assert f"expected error of shift {error:.2f}, above the limit 0.4" in reason(found)["reason"]
    assert Preference.auto(**blunt).method == "shift"
    assert reason(Preference.auto(**blunt))["reason"].endswith("; nothing expects less")


def test_other_evidence() -> None:
    assert reason(Preference.auto(task_features=OWN, target_features=TARGET))["reason"] == "only features are given"
    counts = [{0: 1}, {1: 1}, {2: 1}]
    by_label = Preference.auto(task_label_counts=counts, labels=[0, 0, 1])
    assert by_label.method == "label-count"
    both = Preference.auto(task_label_counts=counts, labels=[0, 0, 1], task_predictions=SHARP, predictions=SEEN)
    assert both.method == "shift+label"
    with pytest.raises(
        InputError, match="auto needs labels with task_label_counts, predictions with task_predictions, target_b"
    ):
        Preference.auto()
    with pytest.raises(InputError, match="task_label_counts is missing"):
        Preference.auto(labels=[1])


LABELS = [[t] * 20 for t in range(3)]


def test_a_probe_comes_first_and_nothing_else_is_made() -> None:
    def never() -> Any:
        raise AssertionError("made for nothing")

    found = Preference.auto(
        task_base_features=OWN,
        task_base_labels=LABELS,
        target_base_features=lambda: TARGET[0],
        task_predictions=SHARP,
        predictions=never,
        task_features=OWN,
        target_features=never,
    )
    assert found.method == reason(found)["chosen"] == "probe"
    assert found.weights[0] > 0.9
    assert reason(found)["expected_error"] == found.provenance["expected_error"] <= reason(found)["limit"]
    assert reason(found)["reason"].endswith(", at most the limit 0.4")


def test_a_probe_that_cannot_tell_tasks_gives_way() -> None:
    noise = [RNG.normal(size=(20, 3)) for _ in range(3)]
    blind: dict[str, Any] = {
        "task_base_features": noise,
        "task_base_labels": LABELS,
        "target_base_features": RNG.normal(size=(10, 3)),
        "limit": 0.05,
    }
    alone = Preference.auto(**blind)
    assert alone.method == "probe"
    assert reason(alone)["reason"].endswith("above the limit 0.05; nothing expects less")
    shift = Preference.auto(**{**blind, "limit": 0.15}, task_predictions=SHARP, predictions=lambda: SEEN)
    assert shift.method == "shift"
    assert reason(alone)["expected_error"] > 0.15 >= reason(shift)["expected_error"]
    assert "expected error of probe" in reason(shift)["reason"]
    assert "; expected error of shift" in reason(shift)["reason"]


def test_of_two_that_cannot_tell_tasks_the_one_that_expects_less_is_taken() -> None:
    noise = [RNG.normal(size=(20, 3)) for _ in range(3)]
    probe: dict[str, Any] = {
        "task_base_features": noise,
        "task_base_labels": LABELS,
        "target_base_features": RNG.normal(size=(10, 3)),
    }
    sharp: dict[str, Any] = {"task_predictions": SHARP, "predictions": SEEN}
    errors = {
        name: reason(Preference.auto(**evidence, limit=0.0))["expected_error"]
        for name, evidence in (("probe", probe), ("shift", sharp))
    }

    def never() -> Any:
        raise AssertionError("made for nothing")

    both = Preference.auto(**probe, **sharp, task_features=OWN, target_features=never, limit=0.0)
    assert min(errors.values()) < 0.6  # what transport was measured to be wrong by
    assert both.method == min(errors, key=lambda name: errors[name])


def test_labels_come_before_a_probe() -> None:
    base: dict[str, Any] = {"task_base_features": OWN, "task_base_labels": LABELS, "target_base_features": TARGET[0]}
    found = Preference.auto(task_label_counts=[{0: 1}, {1: 1}, {2: 1}], labels=[0, 0, 1], **base)
    assert found.method == "label-count"


def test_the_expected_error_is_the_error() -> None:
    rng = np.random.default_rng(1)
    table = rng.dirichlet(np.full(12, 0.5), size=4)
    truth = np.array([0.6, 0.4, 0, 0])
    foreseen, real = [], []
    for _ in range(25):
        counts = np.stack([rng.multinomial(300, row) for row in table])
        seen = np.repeat(np.arange(12), rng.multinomial(60, truth @ table))
        found = Preference.from_predictions(counts, seen, "em")
        foreseen.append(shift_outlook(counts, seen, found.weights)[0])
        real.append(float(half_l1(np.array(found.weights), truth)))
    assert np.mean(foreseen) == pytest.approx(np.mean(real), rel=0.35)


def test_fit_tells_a_mixture_from_something_else() -> None:
    rng = np.random.default_rng(2)
    table = class_shares(SHARP.astype(float), 0.5)
    seen = np.repeat(np.arange(4), rng.multinomial(200, [0.5, 0.3, 0.2] @ table))
    weights = Preference.from_predictions(SHARP, seen).weights
    assert shift_outlook(SHARP, seen, weights)[1] > 0.05
    strange = [3] * 100 + [0] * 100
    assert shift_outlook(SHARP, strange, Preference.from_predictions(SHARP, strange).weights)[1] < 0.01


def test_combined_by_hand() -> None:
    # Strengths: label 1 / (0 + 1/20) = 20, ot 1 / (0.16 + 1/100) = 5.88.
    labels = Preference((1, 0), "label", {"samples": 20}, ((0.8, 1), (0, 0.2)), ("a", "b"))
    inputs = Preference((0, 1), "ot", {"samples": 100}, ((0, 0.1), (0.9, 1)))
    found = Preference.combined([labels, inputs])
    share = 20 / (20 + 1 / 0.17)
    assert found.weights == pytest.approx((share, 1 - share))
    assert (found.method, found.tasks) == ("combined", ("a", "b"))
    assert found.intervals is not None
    spread = share * 0.2
    assert found.intervals[0] == pytest.approx((share - spread, share + (1 - share) * 0.1))
    sources = found.provenance["sources"]
    assert isinstance(sources, list)
    assert [source["method"] for source in sources] == ["label", "ot"]
    assert Preference.from_json(found.to_json()) == found


def test_combining_several_real_sources() -> None:
    counts = [{0: 1}, {1: 1}, {2: 1}]
    sources = [
        Preference.from_labels(counts, [0, 0, 1]),
        Preference.from_predictions(SHARP, SEEN),
        Preference.from_features(OWN, TARGET),
    ]
    found = Preference.combined(sources)
    assert found.intervals is not None
    assert sum(found.weights) == pytest.approx(1)


@pytest.mark.parametrize(
    ("sources", "strengths", "message"),
    [
        ([], None, "nothing to combine: give at least one preference"),
        ([Preference((1, 1)), Preference((1,))], [1, 1], "preference 1 has 2 tasks and preference 2 has 1"),
        (
            [Preference((1, 1))],
            None,
            "preference 1 (weights) does not say how many samples stand behind it; give strengths",
        ),
        ([Preference((1, 1))], [1, 2], "2 strengths for 1 preferences: give one per preference"),
        ([Preference((1, 1))], [0], "strengths must be finite, not negative and not all 0"),
        (
            [Preference((1,), tasks=("a",)), Preference((1,), tasks=("b",))],
            [1, 1],
            "the preferences name different tasks; combine preferences of one run only",
        ),
    ],
)
def test_bad_combinations(sources: Any, strengths: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.combined(sources, strengths)
    assert message in str(error.value)


def test_sources_without_samples_have_no_say() -> None:
    nothing = Preference((0, 1), "label", {"samples": 0})
    assert Preference.combined([Preference((1, 0), "label", {"samples": 3}), nothing]).weights == (1, 0)
    with pytest.raises(InputError, match="none of the preferences has a sample behind it; give strengths"):
        Preference.combined([nothing])
