"""The demonstration measures all that it shows, and leaves files that the other commands understand."""

import importlib.util
import json

import pytest

from tunable_magmax.cli.app import main
from tunable_magmax.errors import InputError
from tunable_magmax.experiments import demo as demonstration
from tunable_magmax.experiments import glyph_encoder
from tunable_magmax.experiments.demo import CONFIG, SHOWN, SITES, SOURCES, TASKS, run_demo
from tunable_magmax.experiments.table import slug
from tunable_magmax.preference.preference import Preference

PICTURES = {"TRAIN": 6, "TEST": 3}
SMALL = {"KNOWN": 40, "UNSEEN": 60}
SOON = {"epochs": 1, "batch": 16, "lr": 1e-3, "warmup": 0}


@pytest.fixture(scope="module")
def small():
    """A demonstration of seconds, which shows that all parts work, not that anything is learnt."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**PICTURES, **SMALL}.items():
            patch.setattr(demonstration, name, value)
        patch.setattr(demonstration, "OPTIMISATION", SOON)
        patch.setattr(glyph_encoder, "STEPS", 5)
        patch.setattr(glyph_encoder, "PICTURES_EACH", 2)
        yield


@pytest.fixture(scope="module")
def demo(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(out)


def tmx(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return exit_.value.code or 0


def test_every_model_is_measured_on_every_task_and_site(demo):
    rows = demo[1].rows
    assert [row.model for row in rows if row.own is None] == ["base", "last checkpoint", *SHOWN]
    for site in SITES:
        own = [row for row in rows if row.own == site]
        assert [row.model for row in own] == ["best single task", *(f"from {source}" for source in SOURCES.values())]
        assert [row.tailored for row in own] == [False, *(True for _ in SOURCES)]
    assert {(len(row.tasks), len(row.sites), len(row.prior)) for row in rows} == {(len(TASKS), len(SITES), len(SITES))}
    assert [row.model for row in rows if row.half is None] == ["from its labelled pictures"] * len(SITES)


def test_the_label_preference_is_the_share_of_the_labels(demo):
    out, found = demo
    names = {
        name: task for task, classes in demonstration.demo_config(0)["benchmark"]["tasks"].items() for name in classes
    }
    for site in SITES:
        labels = (out / "sites" / slug(site) / "labels.txt").read_text().splitlines()
        assert len(labels) == SMALL["KNOWN"]
        shares = [sum(names[label] == task for label in labels) / len(labels) for task in TASKS]
        made = Preference.load(out / "models" / f"{slug(site)}-labels" / "preference.json")
        assert made.intervals is not None
        low, high = zip(*made.intervals, strict=True)
        assert all(low[t] - 0.01 <= share <= high[t] for t, share in enumerate(shares))
        assert found.weights[site]["labels"] == pytest.approx(shares, abs=0.1)
        assert {task for task, share in zip(TASKS, shares, strict=True) if share} == set(SITES[site])
        assert len([*(out / "sites" / slug(site) / "labelled").rglob("*.png")]) == len(labels)


def test_a_site_is_measured_on_pictures_that_its_preference_did_not_see(demo):
    for site in SITES:
        folder = demo[0] / "sites" / slug(site)
        known = {file.read_bytes() for file in (folder / "inputs").iterdir()}
        unseen = [file.read_bytes() for file in (folder / "test").rglob("*.png")]
        assert len(known) == SMALL["KNOWN"]
        assert len(unseen) == SMALL["UNSEEN"]
        assert not known & set(unseen)


def test_the_commands_it_names_give_what_it_measured(demo, tmp_path, capsys):
    out, found = demo
    site = next(iter(SITES))
    folder = out / "sites" / slug(site)
    assert (
        tmx("tailor", out / "run", "--labels", folder / "labels.txt", "-o", tmp_path / "mine", "--device", "cpu") == 0
    )
    own = out / "models" / f"{slug(site)}-labels"
    for name in ("model.safetensors", "head.safetensors", "preference.json", "tmx-tailor.json"):
        assert (tmp_path / "mine" / name).read_bytes() == (own / name).read_bytes()
    assert tmx("predict", tmp_path / "mine", folder / "inputs", "--device", "cpu") == 0
    preference = tmp_path / "mine" / "preference.json"
    assert tmx("compare", out / "run", "--preference", preference, "--data", folder / "test", "--device", "cpu") == 0
    capsys.readouterr()
    assert tmx("eval", tmp_path / "mine", "--data", folder / "test", "--json") == 0
    told = json.loads(capsys.readouterr().out)["accuracy"]
    row = next(row for row in found.rows if row.own == site and row.model == "from its labels")
    assert told["accuracy"] == pytest.approx(row.prior[0])


def test_the_picture_and_the_results_are_there(demo):
    out, found = demo
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "results.json").read_text() == found.to_json()


def test_started_again_it_trains_no_more_and_finds_the_same(small, demo):
    out, found = demo
    phases, news = set(), []
    again = run_demo(out, progress=lambda phase, done, total: phases.add(phase), notify=news.append)
    assert again == found
    assert not phases & {"pre-training", "train"}
    assert "choosing" in phases
    assert news == [f"{out} holds an earlier demonstration: its training is complete, and the rest is made again"]


def test_the_command_tells_what_was_found(demo, capsys, monkeypatch):
    out, found = demo
    monkeypatch.setattr(demonstration, "run_demo", lambda place, **options: found)
    for started, program in (
        ("/there/tunable_magmax/__main__.py", "python -m tunable_magmax"),
        ("here/bin/tmx", "here/bin/tmx"),
    ):
        monkeypatch.setattr("sys.argv", [started])
        assert tmx("demo", "--out", out) == 0
        printed = capsys.readouterr().out
        assert f"  {program} compare {out}/run --preference {out}/mine --data " in printed
        assert "__main__" not in printed
    assert printed.count("from its labels") == len(SITES)
    assert f"eval {out}/run" in printed
    assert tmx("demo", "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == list(TASKS)


def test_another_seed_starts_afresh_in_the_same_folder(small, tmp_path, demo):
    import shutil

    shutil.copytree(demo[0], tmp_path / "out")
    other = run_demo(tmp_path / "out", seed=1)
    assert "seed: 1" in (tmp_path / "out" / CONFIG).read_text()
    assert other.rows != demo[1].rows


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is no earlier demonstration; choose another folder with --out"):
        run_demo(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_core_installation_says_which_extras_it_lacks(tmp_path, monkeypatch):
    def find(name, *rest):
        return None if name in ("transformers", "matplotlib") else importlib.util.find_spec(name, *rest)

    monkeypatch.setattr(demonstration, "find_spec", find)
    with pytest.raises(
        InputError, match=r'needs transformers and matplotlib, .* pip install "tunable-magmax\[train,report\]"'
    ):
        run_demo(tmp_path / "out")
    assert not (tmp_path / "out").exists()
