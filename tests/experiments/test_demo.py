"""The demonstration measures all that it shows, and leaves files that the other commands understand."""

import pytest

from tunable_magmax.cli.demo import story_lines
from tunable_magmax.errors import InputError
from tunable_magmax.experiments import glyph_encoder
from tunable_magmax.experiments.demo import FITTED, SITES, TAILORED, TASKS, DemoSize, run_demo
from tunable_magmax.workflows.evaluate import evaluate

SMALL = DemoSize(train=5, test=2, known=20, unseen=20, epochs=1, batch=16)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demonstration of seconds, which shows that all parts work, not that anything is learnt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyph_encoder, "STEPS", 5)
        patch.setattr(glyph_encoder, "PICTURES_EACH", 2)
        out = tmp_path_factory.mktemp("demo") / "out"
        story = run_demo(out, size=SMALL)
    return out, story


def test_every_model_is_measured_on_every_site_with_what_was_told(demo):
    out, story = demo
    assert [site.site for site in story.sites] == list(SITES)
    for site in story.sites:
        assert len(site.accuracy) == 4
        assert all(0 <= share <= 1 for share in site.accuracy.values())
        value, low, high = site.expected
        assert low <= value <= high
        assert sum(site.weights.values()) == pytest.approx(1)
    assert len(story.learnt) == len(story.left) == len(TASKS)
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "results.json").read_text() == story.to_json()


def test_a_site_is_measured_on_pictures_that_tailoring_did_not_see(demo):
    for site in SITES:
        folder = demo[0] / "sites" / site.replace(" ", "-")
        known = {file.read_bytes() for file in (folder / "inputs").iterdir()}
        unseen = [file.read_bytes() for file in (folder / "test").rglob("*.png")]
        assert (len(known), len(unseen)) == (SMALL.known, SMALL.unseen)
        assert not known & set(unseen)


def test_the_story_fits_a_screen_and_its_last_line_runs(demo, tmx, tmp_path, monkeypatch):
    out, story = demo
    monkeypatch.setattr("sys.argv", ["tmx"])
    lines = list(story_lines(story, out))
    assert len(lines) <= 20
    assert max(len(line.replace(str(out), "demo-out")) for line in lines) <= 80
    program, _, command = lines[-1].partition(" tailor ")
    assert program == "next: tmx"
    *options, _, _ = command.split()
    assert tmx("tailor", *options, "-o", tmp_path / "mine", "--device", "cpu").code == 0
    own, test = out / "models" / "post-office", out / "sites" / "post-office" / "test"
    for name in ("model.safetensors", "head.safetensors", "preference.json"):
        assert (tmp_path / "mine" / name).read_bytes() == (own / name).read_bytes()
    assert tmx("eval", tmp_path / "mine", "--data", test).code == 0
    found = evaluate(tmp_path / "mine", test).accuracy.overall
    assert found.value == pytest.approx(story.sites[0].accuracy[TAILORED])


def test_started_again_it_trains_no_more_and_finds_the_same(demo):
    out, story = demo
    phases = set()
    again = run_demo(out, size=SMALL, progress=lambda phase, done, total: phases.add(phase))
    assert [(site.accuracy, site.expected) for site in again.sites] == [(s.accuracy, s.expected) for s in story.sites]
    assert not phases & {"pre-training", "train"}


@pytest.mark.parametrize("name", ["letter.txt", "run.yaml"])
def test_a_folder_of_something_else_is_left_alone(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / name).write_text("model: mine")
    with pytest.raises(InputError, match=str(tmp_path)):
        run_demo(tmp_path)
    assert (tmp_path / name).read_text() == "model: mine"
    assert (tmp_path / "run").is_dir()


def test_a_bad_seed_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match="seed is -1"):
        run_demo(tmp_path / "out", seed=-1)
    assert not (tmp_path / "out").exists()


@pytest.mark.stress
def test_at_full_size_training_forgets_and_tailored_models_win(tmp_path):
    story = run_demo(tmp_path / "out")
    assert sum(story.learnt) - sum(story.left) > 0.3 * len(TASKS)
    for site in story.sites:
        tailored, fitted = site.accuracy[TAILORED], site.accuracy[FITTED]
        assert tailored > max(each for name, each in site.accuracy.items() if name not in (TAILORED, FITTED)) + 0.1
        assert tailored > fitted - 0.02
