"""The profile and its file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load, save

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.errors import InputError
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.profile import METADATA, Profile, require_base

GOLDEN = Path(__file__).parent.parent / "golden" / "profile.safetensors"

EXAMPLE = Profile(
    task="birds",
    classes=("finch", "owl"),
    label_counts=(6, 2),
    samples=8,
    features=np.array([[0.5, -1.0, 2.0], [0.25, 0.0, 1.5]], dtype=np.float32),
    encoder="sha256:00ff",
    base="sha256:ba5e",
    base_features=np.array([[1.0, 0.5], [-2.0, 0.25]], dtype=np.float32),
    row_labels=np.array([1, 0]),
)
BARE = Profile("birds", ("finch",), (1,), 1, np.ones((1, 2), dtype=np.float32), "sha256:00ff")


def same(first: Profile, second: Profile) -> bool:
    return first.to_bytes() == second.to_bytes()


def test_the_file_is_the_golden_one(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == GOLDEN.read_bytes()


def test_round_trip(tmp_path: Path) -> None:
    loaded = Profile.load(GOLDEN)
    assert same(loaded, EXAMPLE)
    assert loaded.label_table == {"finch": 6, "owl": 2}
    assert loaded.width == 3
    np.testing.assert_array_equal(loaded.features, EXAMPLE.features)
    BARE.save(tmp_path / "bare.safetensors")
    bare = Profile.load(tmp_path / "bare.safetensors")
    assert same(bare, BARE)
    assert (bare.base, bare.base_features, bare.row_labels) == (None, None, None)


def test_it_holds_the_rows_under_the_base() -> None:
    loaded = Profile.load(GOLDEN)
    assert loaded.base == "sha256:ba5e"
    assert loaded.base_features is not None
    assert loaded.row_labels is not None
    assert loaded.base_features.tolist() == [[1.0, 0.5], [-2.0, 0.25]]
    assert loaded.row_labels.tolist() == [1, 0]
    for array in (loaded.base_features, loaded.row_labels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_one_base_for_all() -> None:
    require_base([EXAMPLE, replace(EXAMPLE, task="cars")])
    with pytest.raises(InputError, match="the profile of 'birds' holds no embeddings by the base"):
        require_base([EXAMPLE, BARE])
    with pytest.raises(InputError, match="'birds' and 'cars' belong to different bases; make them again"):
        require_base([EXAMPLE, replace(EXAMPLE, task="cars", base="x")])
    EXAMPLE.require(base="sha256:ba5e")
    with pytest.raises(InputError, match="belongs to another base: sha256:ba5e, expected x"):
        EXAMPLE.require(base="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": None}, "base, base_features, row_labels belong together, and base is missing"),
        ({"row_labels": None}, "base, base_features, row_labels belong together, and row_labels is missing"),
        ({"base": ""}, "'base' must be a non-empty text, not ''"),
        ({"base_features": np.ones((3, 2))}, "3 rows of base_features for 2 of features"),
        ({"base_features": np.array([[1e300]] * 2)}, "base_features exceed float32"),
        ({"row_labels": [0]}, "row_labels must hold a class index below 2 for each of the 2 rows"),
        ({"row_labels": [0.0, 1.0]}, "row_labels must hold a class index below 2 for each of the 2 rows"),
        ({"row_labels": [0, 2]}, "row_labels must hold a class index below 2"),
        ({"label_counts": (8, 0)}, "row_labels name class 'owl' more often than label_counts allows"),
    ],
)
def test_bad_content_of_the_base(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(EXAMPLE, **change)
    assert message in str(error.value)


def test_the_file_is_plain_safetensors_as_the_docs_say() -> None:
    tensors = load(GOLDEN.read_bytes())
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "features": ("float32", (2, 3)),
        "label_counts": ("int64", (2,)),
        "base_features": ("float32", (2, 2)),
        "row_labels": ("int64", (2,)),
    }


def test_equal_content_equal_bytes_whatever_it_came_from() -> None:
    from_torch = replace(EXAMPLE, features=torch.tensor(EXAMPLE.features, dtype=torch.float64))  # type: ignore[arg-type]
    assert same(from_torch, EXAMPLE)
    assert not same(replace(EXAMPLE, samples=9), EXAMPLE)


def test_the_features_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        EXAMPLE.features[0, 0] = 1


def test_another_encoder_is_refused() -> None:
    EXAMPLE.require(encoder="sha256:00ff")
    with pytest.raises(InputError) as error:
        EXAMPLE.require(encoder="sha256:1111")
    assert "'birds' belongs to another encoder: sha256:00ff, expected sha256:1111" in str(error.value)


def test_profiles_feed_every_source() -> None:
    other = replace(EXAMPLE, task="cars", classes=("tram", "bus"), label_counts=(5, 1))
    profiles = [EXAMPLE, other]
    assert Preference.from_labels([p.label_table for p in profiles], ["tram"] * 9).weights[1] > 0.9
    target = [EXAMPLE.features + 1] * 2
    assert Preference.from_features([p.features for p in profiles], target).weights == (0.5, 0.5)


def test_rows_are_a_seeded_draw() -> None:
    rows = choose_rows(2000, 500)
    assert len(set(rows)) == 500
    assert rows == sorted(rows) == choose_rows(2000, 500)
    assert rows != choose_rows(2000, 500, seed=1)
    assert choose_rows(2, 5) == choose_rows(2, None) == [0, 1]
    with pytest.raises(InputError, match="there are 0 samples, of which 500 are to be used: both must be at least 1"):
        choose_rows(0, 500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": ""}, "'task' must be a non-empty text, not ''"),
        ({"encoder": None}, "'encoder' must be a non-empty text, not None"),
        ({"classes": ("owl", "owl")}, "classes must be different names, at least one; found twice: 'owl'"),
        ({"classes": ()}, "classes must be different names, at least one"),
        ({"label_counts": (1,)}, "label_counts holds 1 counts for 2 classes"),
        ({"label_counts": (1, 0.5)}, "label_counts must be whole numbers >= 0, not all 0"),
        ({"label_counts": (1, -1)}, "label_counts must be whole numbers >= 0, not all 0"),
        (
            {"label_counts": (0, 0)},
            "label_counts must be whole numbers >= 0, not all 0: a profile needs at least one sample",
        ),
        ({"samples": 1}, "samples is 1, fewer than the 2 rows of features"),
        ({"features": np.zeros((0, 3))}, "features: no samples, or features of width 0"),
        ({"features": np.array([[math.nan]])}, "features: 1 of 1 rows hold NaN or infinity"),
    ],
)
def test_bad_content(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(EXAMPLE, **change)
    assert message in str(error.value)


def test_features_beyond_float32() -> None:
    with pytest.raises(InputError, match="features exceed float32; scale the encoder's output"):
        replace(EXAMPLE, features=np.array([[1e300]]))


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        (None, {}, "not a profile: the metadata has no 'tunable_magmax_profile'"),
        ("{", {}, "the profile's metadata: not JSON"),
        ("[]", {}, "the profile's metadata:\n  - must be a mapping"),
        (
            {"version": 9},
            {},
            "the profile's metadata: version 9 is newer than this program reads (2): upgrade tunable-magmax",
        ),
        ({"encoder": ...}, {}, "'encoder' is missing"),
        ({}, {"features": ...}, "the tensor 'features' is missing; the profile is incomplete"),
        ({"classes": "owl"}, {}, "classes is 'owl': must be a list"),
        ({"samples": 1}, {}, "samples is 1, fewer than the 2 rows of features"),
        ({"base": None}, {}, "base, base_features, row_labels belong together"),
        ({}, {"row_labels": ...}, "belong together, and row_labels is missing"),
    ],
)
def test_bad_files(tmp_path: Path, metadata: Any, tensors: dict[str, Any], message: str) -> None:
    content: dict[str, Any] = {**load(GOLDEN.read_bytes()), **tensors}
    record: Any = metadata
    if isinstance(metadata, dict):
        header = json.loads(GOLDEN.read_bytes()[8 : 8 + int.from_bytes(GOLDEN.read_bytes()[:8], "little")])
        record = {**json.loads(header["__metadata__"][METADATA]), **metadata}
        record = json.dumps({key: value for key, value in record.items() if value is not ...})
    file = tmp_path / "bad.safetensors"
    kept = {name: array for name, array in content.items() if array is not ...}
    file.write_bytes(save(kept, metadata=None if record is None else {METADATA: record}))
    with pytest.raises(InputError) as error:
        Profile.load(file)
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)


def test_keys_and_tensors_of_others_are_left_alone(tmp_path: Path) -> None:
    with safe_open(GOLDEN, framework="numpy") as opened:
        record = json.loads(opened.metadata()[METADATA])
    more = {**load(GOLDEN.read_bytes()), "extra": np.ones(3)}
    file = tmp_path / "more.safetensors"
    file.write_bytes(save(more, metadata={METADATA: json.dumps({**record, "mine": 1})}))
    assert same(Profile.load(file), EXAMPLE)


def test_files_that_are_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; `tmx init --data` makes profiles"):
        Profile.load(tmp_path / "none")
    (tmp_path / "cut").write_bytes(GOLDEN.read_bytes()[:-4])
    with pytest.raises(InputError, match="not a readable safetensors file"):
        Profile.load(tmp_path / "cut")
