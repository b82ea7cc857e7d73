"""Experiments by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import find_experiment, read_experiment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["glyphs/characters-5", "glyphs/characters-5.yaml", "configs/glyphs/characters-5.yaml"]
)
def test_an_experiment_of_this_package_is_found_by_its_name_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_experiment(name) == ROOT / "configs" / "glyphs" / "characters-5.yaml"
    assert read_experiment(name).name == "characters-5"


def test_a_file_that_exists_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glyphs").mkdir()
    (tmp_path / "glyphs" / "characters-5.yaml").touch()
    assert find_experiment("glyphs/characters-5.yaml") == Path("glyphs/characters-5.yaml")


def test_an_unknown_name_is_told_with_the_closest_ones() -> None:
    with pytest.raises(
        InputError, match=r"glyphs/character-5 does not exist, and no experiment .* glyphs/characters-5"
    ):
        find_experiment("glyphs/character-5")
    with pytest.raises(InputError, match=r"there are bert/clinc150-10, .*, mini-clip/alpha"):
        find_experiment("nothing-like-it")
