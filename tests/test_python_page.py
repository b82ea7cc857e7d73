"""The Python of docs/python.md and of the notebook runs."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

from tunable_magmax.experiments import glyph_encoder

ROOT = Path(__file__).parent.parent
SITE = {"green": 14, "red": 8}


@pytest.fixture
def calm(tmp_path, monkeypatch):
    """A folder to work in, and no warnings: models and samples are far too small to be good."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_block_of_the_page_runs(image_run, calm, capsys):
    shutil.copytree(image_run.path, "run")
    names = {}
    for prefix, seed in (("", 500), ("test_", 700)):
        names[f"{prefix}images"] = [
            image for name, count in SITE.items() for image in image_run.inputs(name, count, seed)
        ]
        names[f"{prefix}labels"] = [name for name, count in SITE.items() for _ in range(count)]
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    for promised in re.findall(r"print\((?:run|error)\)  # (.*)", page):
        assert promised in printed
    assert len(names["compared"].rows) == 9


def test_the_notebook_runs_from_top_to_bottom(calm, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(glyph_encoder, "STEPS", 5)
    monkeypatch.setattr(glyph_encoder, "PICTURES_EACH", 2)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    plt.switch_backend("agg")
    cells = json.loads((ROOT / "examples" / "tunable_magmax.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {"__name__": "__main__"}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(source.replace("PICTURES = 150", "PICTURES = 4"), names)
    assert names["PICTURES"] == 4
    assert len(names["accuracies"]) == len(names["shares"])
    assert names["model"].preference.weights == names["site"].weights
