"""The demonstration tells the story it claims, and leaves a run directory that the other commands understand."""

import pytest

from tunable_magmax.cli.app import main
from tunable_magmax.demo import SITES, TASKS, run_demo
from tunable_magmax.errors import InputError


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(out)


def test_a_tailored_merge_is_ahead_on_its_own_site(demo):
    rows = {row.model: row for row in demo[1]}
    rivals = ["base", "last checkpoint", "average", "ties", "magmax"]
    for k, site in enumerate(SITES):
        assert rows[f"tunable, {site}"].sites[k] > max(rows[rival].sites[k] for rival in rivals)


def test_training_forgets(demo):
    last = next(row for row in demo[1] if row.model == "last checkpoint")
    assert last.tasks[-1] > 0.8
    assert last.tasks[0] < 0.5


def test_the_run_can_be_merged_again(demo, tmp_path, capsys):
    weights = ",".join("1" for _ in range(TASKS))
    with pytest.raises(SystemExit) as exit_:
        main(["merge", str(demo[0] / "run"), "--weights", weights, "-o", str(tmp_path / "mine.safetensors")])
    assert exit_.value.code in (0, None)
    assert "12.50%" in capsys.readouterr().out


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is no earlier demonstration"):
        run_demo(tmp_path)
    assert (tmp_path / "letter.txt").exists()
