"""The examples run and end as they say."""

import shlex
import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tunable_magmax import Preference
from tunable_magmax.cli.app import main

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def threads():
    """The example sets the number of threads; other tests have theirs."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_bert_four_tasks(tmp_path, capsys, monkeypatch):
    spec = spec_from_file_location("bert_four_tasks", EXAMPLES / "bert_four_tasks.py")
    example = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bert_four_tasks", example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and accelerate
        spec.loader.exec_module(example)
        accuracies = example.main(["--out", str(tmp_path / "out")])
    assert list(accuracies) == ["base", "last", "MAGMAX", "tailored"]
    assert accuracies["tailored"] > max(0.9, accuracies["last"])
    assert (tmp_path / "out" / "site-model" / "model.safetensors").is_file()
    preference = Preference.load(tmp_path / "out" / "site-model" / "preference.json")
    assert preference.tasks == ("travel", "bank", "kitchen", "music")
    assert preference.weights[0] > 0.45  # the site's share of travel is 0.7
    assert capsys.readouterr().out.splitlines()[-1].startswith("accuracy at the site: base ")
    run_the_tutorial(tmp_path, monkeypatch)


def run_the_tutorial(folder, monkeypatch):
    """Runs the commands of docs/tutorial.md on what the example left, but for those that need other files or a page."""
    (folder / "out").rename(folder / "bert-four-tasks")
    monkeypatch.chdir(folder)
    text = (EXAMPLES.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("tmx ")]
    run = [command for command in commands if command[0] not in ("init", "studio")]
    assert {"tailor", "compare", "predict"} <= {command[0] for command in run}
    for command in run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(SystemExit) as exit_:
                main(command)
        assert not exit_.value.code, command


def test_the_benchmark_of_the_mixture_embeds_so_many_pictures_of_each_class_once(image_run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "benchmarks"))
    from mixture import embedded

    image_run.pairs(tmp_path / "data" / "train", {"red": 3, "blue": 5})
    asked = tmp_path / "data", image_run.path / "base", "train", 2, tmp_path / "new" / "cache"
    features, labels = embedded(*asked)
    assert (len(features), labels.tolist()) == (4, [0, 0, 1, 1])
    monkeypatch.setattr("mixture.load_encoder", None)  # not needed again
    assert (embedded(*asked)[0] == features).all()
