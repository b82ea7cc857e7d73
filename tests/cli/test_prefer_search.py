"""`tmx prefer --pairs`: inputs with their labels, and the search on them."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")
pytest.importorskip("optuna", reason="optuna is not installed (extra: tune)")


from tunable_magmax.cli import terminal
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.search import Trial
from tunable_magmax.workflows import search as searching

SEARCH = ("--method", "search", "--device", "cpu")


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    """Nine images of the first task's classes and three of the second's."""
    return image_run.pairs(tmp_path_factory.mktemp("site") / "site", {"red": 5, "blue": 4, "green": 3})


def test_a_search_from_pairs_to_a_merge(tmx, image_run, site, tmp_path):
    out = tmp_path / "site.json"
    given = ("--pairs", site, *SEARCH, "--trials", "9", "--search-scale", "0.5,2", "-o", out)
    result = tmx("prefer", image_run.path, *given)
    assert result.code == 0, result.err
    assert result.err == ""
    found = Preference.load(out)
    facts = found.provenance
    assert (found.method, found.tasks, facts["samples"], facts["trials"]) == ("search", ("first", "second"), 12, 9)
    lines = result.out.splitlines()
    assert lines[0] == "search, from 12 samples"
    assert lines[1] == f"  {facts['accuracy']:.1%} right after 9 trials (no more were asked for)"
    equal, label = (start["accuracy"] for start in facts["starts"])
    assert lines[2] == f"  started from equal {equal:.1%}, label {label:.1%}"
    assert facts["starts"][1]["weights"] == pytest.approx([0.7, 0.3], abs=0.1)
    assert "90% interval" in result.out
    scale = facts["scale"]
    assert found.scale == scale
    assert lines[-1] == f"the preference carries the scale {scale:g}, which tmx merge --preference uses"
    merged = tmx("merge", image_run.path, "--preference", out, "-o", tmp_path / "m.safetensors", "--json")
    assert json.loads(merged.out)["scale"] == scale
    assert f"the scale is {scale:g}, which {out} carries; --scale sets another one" in merged.err
    other = ("--preference", out, "--scale", "1", "-o", tmp_path / "n.safetensors", "--json")
    assert json.loads(tmx("merge", image_run.path, *other).out)["scale"] == 1


def test_without_a_scale_the_merge_needs_none(tmx, image_run, site):
    result = tmx("prefer", image_run.path, "--pairs", site, *SEARCH, "--trials", "1")
    assert "--scale" not in result.out
    told = tmx("prefer", image_run.path, "--pairs", site, *SEARCH, "--trials", "1", "--json")
    assert json.loads(told.out)["preference"]["provenance"]["scale"] == "matched"


@pytest.mark.parametrize("method", ["auto", "label"])
def test_pairs_give_their_labels(tmx, image_run, site, method):
    found = json.loads(tmx("prefer", image_run.path, "--pairs", site, "--method", method, "--json").out)
    assert found == json.loads(tmx("prefer", image_run.path, "--labels", site, "--json").out)
    assert found["preference"]["method"] == "label"
    assert found["preference"]["weights"] == pytest.approx([0.7, 0.3], abs=0.1)


def test_pairs_give_their_inputs(tmx, image_run, site):
    given = ("--method", "cosine", "--device", "cpu", "--json")
    paired = json.loads(tmx("prefer", image_run.path, "--pairs", site, *given).out)
    alone = json.loads(tmx("prefer", image_run.path, "--inputs", site, *given).out)
    assert paired["preference"] == alone["preference"]
    assert paired["warnings"] == []  # that --inputs has labels too is a hint; with --pairs the user knows
    assert len(alone["warnings"]) == 1


def test_an_interrupted_search_says_how_to_go_on(tmx, image_run, site, tmp_path, monkeypatch):
    original, calls = searching._Scorer.score, []

    def interrupted(self, weights, scale):
        calls.append(weights)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        return original(self, weights, scale)

    monkeypatch.setattr(searching._Scorer, "score", interrupted)
    study = tmp_path / "site.journal"
    given = ("prefer", image_run.path, "--pairs", site, *SEARCH, "--trials", "6", "--patience", "6")
    result = tmx(*given, "--study", study)
    assert result.code == 130
    assert result.err.startswith("error: interrupted after 2 trials, the best ")
    assert result.err.endswith(f"% right; {study} keeps them: run the same command again to go on\n")
    result = tmx(*given)
    assert result.code == 130
    assert "interrupted after 2 trials" in result.err
    assert "nothing is kept, --study FILE would have kept the trials" in result.err
    result = tmx(*given, "--study", study, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["preference"]["provenance"]["trials"] == 6
    assert len(calls) == 6 + 4


def test_the_bar_shows_the_best_so_far(monkeypatch):
    from rich.progress import Progress

    bars = Progress()
    monkeypatch.setattr(terminal, "_display", lambda quiet: contextlib.nullcontext(terminal.drawn_bars(bars)))
    with terminal.search_bars(False, 5, []) as (progress, watch):
        progress("loading", 1, 3)
        for count in (1, 2, 3):
            watch([Trial((1, 0), None, value) for value in (0.5, 0.75, 0.25)[:count]])
    assert [(task.description, task.completed, task.total, task.fields["note"]) for task in bars.tasks] == [
        ("loading", 1, 3, ""),
        ("search", 3, 5, "best 75.0%"),
    ]


@pytest.mark.parametrize(
    ("arguments", "prepare", "says"),
    [
        ("--pairs {site}", "no classifier", "the run names none: enter it with"),
        (
            "--pairs {new}/x.csv",
            "text,label\nhello,zebra\n",
            "none of the 1 labels ('zebra') is one of the classifier's 4",
        ),
        ("--pairs {new}/x.csv", "text,label\n", "holds no samples"),
        ("--pairs {new}/x.csv", "text\nhello\n", "holds inputs without labels, and pairs need both"),
        ("--pairs {new}/x.csv", "text,label\nhello,red\n", "encodes images, not texts"),
        ("--pairs {new}/nothing", None, "does not exist"),
        ("--pairs {site} --labels {site}", None, "--pairs and --labels: give one of them"),
        ("--pairs {site} --inputs {site}", None, "--pairs and --inputs: give one of them"),
        ("--labels {site}", None, "--method search scores merges on inputs with labels"),
        ("--equal", None, "--method search needs samples of the target: give --pairs"),
        ("--pairs {site} --equal", None, "give one of them"),
        ("--pairs {site} --patience 0", None, "trials and patience must be >= 1"),
        ("--pairs {site} --search-scale 2,1", None, "scale must be an interval (low, high) with 0 < low < high"),
        ("--pairs {site} --search-scale 2", None, "expected two numbers LOW,HIGH"),
        ("--pairs {site} --search-scale x", None, "--search-scale is 'x'"),
        ("--pairs {site} --study {new}/x.csv", "text,label\n", "exists and is no study file"),
        ("--pairs {site} --study {new}", None, "is a directory: give the name of a study file"),
        ("--pairs {site} --seed -1", None, "seed must be >= 0"),
    ],
)
def test_bad_input(tmx, image_run, site, tmp_path, arguments, prepare, says):
    path = image_run.path
    if prepare == "no classifier":
        path = shutil.copytree(path, tmp_path / "run")
        record = json.loads((path / "run.json").read_text())
        del record["classifier"]
        (path / "run.json").write_text(json.dumps(record))
    elif prepare is not None:
        (tmp_path / "x.csv").write_text(prepare)
    result = tmx("prefer", path, *arguments.format(site=site, new=tmp_path).split(), *SEARCH, "--trials=1")
    assert result.code == 2, result.out
    assert says in result.err
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert result.out == ""


@pytest.mark.parametrize("option", ["--trials 3", "--patience 3", "--search-scale 1,2", "--study {new}/study"])
def test_options_of_a_search_are_refused_without_one(tmx, image_run, site, tmp_path, option):
    result = tmx("prefer", image_run.path, "--pairs", site, *option.format(new=tmp_path).split())
    assert result.code == 2
    assert f"{option.split()[0]} is for --method search, not auto" in result.err
    assert not (tmp_path / "study").exists()
