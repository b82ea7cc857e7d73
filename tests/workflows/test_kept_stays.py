"""Samples that a run keeps are in nothing that leaves it: merges, tailored models, conversions, exports, pushes."""

import json
import shutil

import pytest
from labelled_run import TASKS, build
from runs.keeping import keep_samples

from tunable_magmax.data.source import memory_samples
from tunable_magmax.runs.run import Run

SECRET = "unmistakable"


@pytest.fixture
def run(tmp_path):
    """A run of texts that keeps samples, all of which say the secret; and what a site has, which does not."""
    made = build(tmp_path / "run", "bert")
    opened = Run.open(made.path)
    for t, classes in enumerate(TASKS.values()):
        texts = [f"{text} {SECRET} {k}" for name in classes for k, text in enumerate(made.inputs(name, 6, 90))]
        labels = [name for name in classes for _ in range(6)]
        keep_samples(opened, t, memory_samples(texts, "text", labels), source="training")
    made.pairs(tmp_path / "site", {"red": 12, "green": 6})
    return made.path


def holds_secret(*places):
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    assert files
    return [file for file in files if SECRET.encode() in file.read_bytes()]


def test_nothing_that_leaves_a_run_holds_its_samples(tmx, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(holds_secret(run)) == 2
    commands = [
        ("merge", run, "--weights", "3,1", "-o", "merged"),
        ("tailor", run, "--inputs", "site.csv", "-o", "site-model", "--device", "cpu"),
        ("convert", run / "first", "-o", "converted"),
    ]
    for command in commands:
        done = tmx(*command)
        assert done.code == 0, (command, done.err)
        assert SECRET not in done.out + done.err
    outputs = [item for item in tmp_path.iterdir() if item != run]
    assert {"merged", "site-model", "converted"} <= {item.name for item in outputs}
    assert holds_secret(*outputs) == []
    # What a push of a task's checkpoint would send.
    sent = json.loads(tmx("push", run / "first", "org/name", "--dry-run", "--json").out)["files"]
    assert holds_secret(*(run / "first" / name for name in sent)) == []


def test_a_base_that_a_run_was_made_around_takes_none_along(tmx, run, tmp_path):
    """The run lies in the directory of its base, as `tmx init base/ --base base/` makes it."""
    for item in (run / "base").iterdir():
        shutil.copy(item, run / item.name)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "base": "."}))
    assert tmx("merge", run, "--weights", "1,1", "-o", tmp_path / "merged").code == 0
    assert holds_secret(tmp_path / "merged") == []
    assert "run.json" not in {file.name for file in (tmp_path / "merged").iterdir()}
    refused = tmx("push", run, "org/name", "--dry-run")
    assert (refused.code, "no finished model" in refused.err) == (2, True)
