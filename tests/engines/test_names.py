"""What the tasks are called goes into report, configuration and model card, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from sequences import SMALL, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.errors import InputError

NAMES = ("birds", "a|b\n`c`", "birds")


@pytest.fixture
def files(tmp_path):
    return save_sequence(tmp_path / "in", *sequence(3, SMALL))


def test_the_card_holds_them_whatever_they_look_like(files, tmp_path) -> None:
    merge_checkpoints(*files, tmp_path / "out", names=NAMES)
    rows = [row for row in (tmp_path / "out" / "README.md").read_text().splitlines() if row.startswith("| task ")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| task",
        "| task 1: birds",
        r"| task 2: a\|b \`c\`",
        "| task 3: birds",
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a", "b"], "2 names for 3 tasks"), ("abc", "expected a list of texts"), (["a", "b", 3], "a list of texts")],
)
def test_names_that_do_not_fit_are_refused_beforehand(files, tmp_path, names, message) -> None:
    with pytest.raises(InputError, match=message):
        merge_checkpoints(*files, tmp_path / "out", names=names)
    assert not (tmp_path / "out").exists()


def test_a_base_is_not_named_after_what_it_was_made_of(files, tmp_path) -> None:
    """A configuration may still have the name of an ancestor, whose weights are others."""
    base, tasks = files
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(Path(base).read_bytes())
    (folder / "config.json").write_text('{"_name_or_path": "someone/ancestor", "model_type": "bert"}')
    merge_checkpoints(folder, tasks, tmp_path / "out")
    for name in ("README.md", "tmx-config.yaml"):
        assert "ancestor" not in (tmp_path / "out" / name).read_text()
