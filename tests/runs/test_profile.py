"""The profile and its file."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from tunable_magmax.data.arrays import choose_rows
from tunable_magmax.errors import InputError
from tunable_magmax.runs.profile import METADATA, Profile

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


def same(first: Profile, second: Profile) -> bool:
    return first.to_bytes() == second.to_bytes()


def test_the_file_is_the_golden_one(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == GOLDEN.read_bytes()


def test_round_trip() -> None:
    loaded = Profile.load(GOLDEN)
    assert same(loaded, EXAMPLE)
    assert loaded.label_table == {"finch": 6, "owl": 2}
    for name in ("features", "base_features", "row_labels"):
        array = getattr(loaded, name)
        np.testing.assert_array_equal(array, getattr(EXAMPLE, name))
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_rows_are_a_seeded_draw() -> None:
    rows = choose_rows(2000, 500)
    assert len(set(rows)) == 500
    assert rows == sorted(rows) == choose_rows(2000, 500)
    assert rows != choose_rows(2000, 500, seed=1)
    assert choose_rows(2, 5) == choose_rows(2, None) == [0, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classes": ("owl", "owl")}, "owl, owl"),
        ({"classes": ()}, "classes"),
        ({"label_counts": (1,)}, "1 counts"),
        ({"label_counts": (1, 0.5)}, "0.5"),
        ({"label_counts": (1, -1)}, "-1"),
        ({"label_counts": (0, 0)}, "not all 0"),
        ({"samples": 1}, "1 samples"),
        ({"features": np.zeros((0, 3))}, "[0, 3]"),
        ({"features": np.array([[math.nan]])}, "NaN"),
        ({"base_features": np.ones((3, 2))}, "3 base_features"),
        ({"row_labels": [0]}, "1 row_labels"),
        ({"row_labels": np.array(1)}, "1 row_labels"),
        ({"row_labels": [0.0, 1.0]}, "row_labels"),
        ({"row_labels": [0, 2]}, "below 2"),
        ({"label_counts": (8, 0)}, "label_counts"),
    ],
)
def test_bad_content(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        replace(EXAMPLE, **change)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        (None, {}, METADATA),
        ("{", {}, "not JSON"),
        ("[]", {}, "mapping"),
        ({"version": 9}, {}, "version 9"),
        ({"encoder": ...}, {}, "'encoder'"),
        ({"task": ""}, {}, "task"),
        ({}, {"features": ...}, "not a profile"),
        ({"classes": "owl"}, {}, "'owl'"),
        ({}, {"row_labels": ...}, "not a profile"),
        ({}, {"label_counts": np.array(2)}, "1 counts"),
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


def test_files_that_are_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none"):
        Profile.load(tmp_path / "none")
    (tmp_path / "cut").write_bytes(GOLDEN.read_bytes()[:-4])
    with pytest.raises(InputError, match="cut"):
        Profile.load(tmp_path / "cut")
