"""README's promises: its Python runs, its commands exist and work, its configuration is read."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tunable_magmax as tmx
from tunable_magmax.cli.app import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the checkpoints that README speaks of."""
    monkeypatch.chdir(tmp_path)
    values = {"base": 0.0, "task1": 1.0, "task2": 2.0}
    for name, value in values.items():
        Path(name).mkdir()
        save_file({"w": torch.full((8,), value)}, f"{name}/model.safetensors")
    return tmp_path


def run(line):
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(line)[1:])
    assert exit_.value.code in (0, None), line


def test_the_python_example_prints_what_it_says(capsys):
    [code] = blocks("python")
    exec(code, {})
    printed = capsys.readouterr().out
    assert printed.startswith("(2, 4)")


def test_a_merge_by_hand_and_a_look_at_it(folder):
    run("tmx merge --base base/ --task task1/ --task task2/ --weights 3,1 -o merged/")
    assert tmx.MergeReport.from_json(Path("merged/tmx-report.json").read_text()).counts == (6, 2)
    run("tmx inspect merged/")


def test_the_table_of_methods_is_complete():
    page = (Path(__file__).parent.parent / "docs" / "merge.md").read_text(encoding="utf-8").partition("**A method")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {name for name in tmx.METHODS if ":" not in name}


def test_the_make_targets_of_readme_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
