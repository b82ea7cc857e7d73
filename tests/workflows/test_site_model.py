"""What a tailored model leaves beside its weights: texts without paths, and files that are not passed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunable_magmax.checkpoints.companions import companion_files
from tunable_magmax.workflows.site_model import Unfinished, without_paths

PLACES = [Path("/data/run"), Path("/data/run-2/site"), Path("/data/run/site/head.safetensors"), Path("photos")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/run: no profile", "run: no profile"),
        ("/data/run/site/head.safetensors is flat", "head.safetensors is flat"),
        ("'/data/run/first' and /data/run.", "'run/first' and run."),
        ("/data/run-2/site/a.png", "site/a.png"),
        ("/data/run-3, /data/run.csv and /old/data/run", "/data/run-3, /data/run.csv and /old/data/run"),
        ("photos: 2 telephotos in my-photos", "photos: 2 telephotos in my-photos"),
    ],
)
def test_paths_become_names_only_where_they_are_whole(text: str, expected: str) -> None:
    assert without_paths(text, [None, *PLACES]) == without_paths(text, PLACES[::-1]) == expected


def test_a_base_that_was_tailored_itself_passes_on_no_preference(tmp_path: Path) -> None:
    names = ("config.json", "preference.json", "head.safetensors", "tmx-tailor.json", "vocab.txt")
    for name in names:
        (tmp_path / name).write_text("{}")
    assert [name for name, _ in companion_files(tmp_path)] == ["config.json", "vocab.txt"]


def test_unfinished_work_is_known_by_its_tailoring(tmp_path: Path) -> None:
    mine = Unfinished(tmp_path / "out", {"seed": 0}, {"weights": (0.5, 0.5)})
    mine.leave()
    assert not mine.is_there()  # the merge has not begun
    mine.file.parent.mkdir()
    mine.leave()
    assert (mine.is_there(), mine.is_stale()) == (True, False)
    other = Unfinished(tmp_path / "out", {"seed": 0}, {"weights": (0.4, 0.6)})
    assert (other.is_there(), other.is_stale()) == (True, True)
    stranger = Unfinished(tmp_path / "out", {"seed": 1}, {"weights": (0.5, 0.5)})
    assert (stranger.is_there(), stranger.is_stale()) == (False, False)
    mine.file.write_text("[")
    assert not mine.is_there()
