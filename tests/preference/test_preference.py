"""The preference itself: normalisation, the alpha schedule, refusals, the file, and merges that take it."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunable_magmax import merge_checkpoints, merge_state_dicts
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.shares import SitePrior

GOLDEN = Path(__file__).parent.parent / "golden"

EXAMPLE = Preference(
    weights=(0.5, 0.25, 0.25),
    method="label",
    provenance={"similarity": "inner", "samples": 4, "nested": {"b": 1, "a": [0.1, None, "é"]}},
    intervals=((0.25, 0.75), (0.0, 0.5), (0.0, 0.5)),
    expected_error=0.125,
    tasks=("birds", "cars", "flowers"),
    scale=0.5,
    prior=SitePrior({"finch": 3, "tram": 1}),
)


def test_the_file_is_the_golden_one(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path / "site.json")
    assert (tmp_path / "site.json").read_bytes() == (GOLDEN / "preference.json").read_bytes()
    assert Preference.load(GOLDEN / "preference.json") == EXAMPLE


@given(st.lists(st.floats(0, 1e308, allow_subnormal=True), min_size=1, max_size=30).filter(any))
def test_round_trip_is_exact_and_weights_sum_to_one(weights: list[float]) -> None:
    preference = Preference.from_weights(weights)
    assert Preference.from_json(preference.to_json()) == preference
    assert math.fsum(preference.weights) == pytest.approx(1, abs=1e-15)
    assert Preference(preference.weights).weights == preference.weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "no weights: give one number per task"),
        ([0, 0], "all weights are zero"),
        ([1, -1], "weight 2 is negative (-1)"),
        (["x"], "weight 1 is 'x'"),
        ([10**400], "a number that a float64 can hold"),
        ("1,2", "weights: expected a list, not '1,2'"),
    ],
)
def test_bad_weights(weights: object, message: str) -> None:
    with pytest.raises(InputError) as error:
        Preference.from_weights(weights)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_the_papers_equation_by_hand() -> None:
    # w_t is proportional to alpha^(T - t). alpha = 2, T = 3: 4, 2, 1 over 7; alpha = 0.5: 1, 2, 4 over 7.
    assert Preference.from_alpha(2, 3).weights == pytest.approx((4 / 7, 2 / 7, 1 / 7), abs=1e-16)
    assert Preference.from_alpha(0.5, 3).weights == pytest.approx((1 / 7, 2 / 7, 4 / 7), abs=1e-16)
    assert Preference.from_alpha(1, 4).weights == (0.25,) * 4
    assert Preference.from_alpha(0, 3).weights == (0, 0, 1)
    for alpha, tasks in ((-1, 3), (1, 0)):
        with pytest.raises(InputError, match=f"not {min(alpha, tasks)}"):
            Preference.from_alpha(alpha, tasks)
    with pytest.raises(InputError, match="not 0"):
        Preference.equal(0)


@pytest.mark.parametrize("alpha", [2.0, 1e-3, 0.999, 1e300, 5e-324])
def test_a_thousand_tasks_neither_overflow_nor_lose_the_ratio(alpha: float) -> None:
    weights = Preference.from_alpha(alpha, 1000).weights
    assert math.fsum(weights) == pytest.approx(1, abs=1e-15)
    for earlier, later in pairwise(weights):
        if min(earlier, later) > 1e-290:
            assert earlier / later == pytest.approx(alpha, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wieghts": [1]}, "unknown key 'wieghts' (did you mean 'weights'?)"),
        ({"version": 2}, "version 2, this program reads 1 at most: upgrade tunable-magmax"),
        ({"weights": None}, "weights is None: must be a list"),
        ({"weights": [1, "2"], "task": 3}, "weights.1 is '2': must be a number\n  - unknown key 'task'"),
        ({"intervals": [[0, 1]]}, "intervals must be 2 pairs"),
        ({"intervals": [[0, 1], [0.9, 0.1]]}, "0 <= low <= high <= 1"),
        ({"tasks": ["a", "a"]}, "tasks must be a list of 2 different names, one for each weight: ['a', 'a']"),
        ({"expected_error": 1.5}, "expected error must lie between 0 and 1, not 1.5"),
    ],
)
def test_bad_files(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "site.json"
    file.write_text(json.dumps({"version": 1, "weights": [1, 1], **change}))
    with pytest.raises(InputError) as error:
        Preference.load(file)
    assert str(error.value).startswith(f"{file}:")
    assert message in str(error.value)


def test_files_that_are_no_preference(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; `tmx prefer` writes preference files"):
        Preference.load(tmp_path / "none.json")
    for content, message in ((b"\xff\xfe\x00", "cannot be read"), (b"{", "not JSON"), (b"[1]", "must be a mapping")):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(InputError, match=message):
            Preference.load(tmp_path / "bad.json")
    with pytest.raises(InputError, match="'weights' is missing"):
        Preference.from_json("{}")
    with pytest.raises(InputError, match=r"is a directory without preference\.json: give the file that `tmx prefer`"):
        Preference.load(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "site.json"
    EXAMPLE.save(file)
    with pytest.raises(InputError, match="provenance cannot be written as JSON"):
        Preference((1,), "x", {"bad": math.nan}).save(file)
    with pytest.raises(InputError, match="provenance cannot be written as JSON"):
        Preference((1,), "x", {"bad": {1, 2}}).save(file)  # type: ignore[dict-item]
    assert Preference.load(file) == EXAMPLE
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="could not be written"):
        EXAMPLE.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "site.json"]


def test_budget_and_names() -> None:
    assert Preference.from_weights([1, 9]).budget(10) == [1, 9]
    assert Preference.from_alpha(1e-3, 3).budget(100) == [1, 0, 99]  # so peaked that a task gets nothing
    assert Preference.from_alpha(0, 3).budget(7) == [0, 0, 7]
    assert Preference.equal(2).named(["a", "b"]).tasks == ("a", "b")


def test_a_merge_takes_its_weights_and_its_scale_from_a_preference(sequence, tmp_path: Path) -> None:
    base, *tasks = sequence.state_dicts
    by_hand = merge_state_dicts(base, tasks, weights=[0.75, 0.25, 0]).report
    assert merge_state_dicts(base, tasks, weights=Preference((3, 1, 0))).report.counts == by_hand.counts
    scaled = Preference((3, 1, 0), scale=0.5)
    assert merge_state_dicts(base, tasks, weights=scaled).report.scale == 0.5
    assert merge_state_dicts(base, tasks, weights=scaled, scale=2).report.scale == 2
    report = merge_checkpoints(sequence.base, sequence.tasks, tmp_path / "out.safetensors", weights=scaled)
    assert (report.scale, report.counts) == (0.5, by_hand.counts)
