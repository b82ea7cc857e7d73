"""Sweeps: a point is what a merge makes, its accuracy is that of the tailored model."""

import json
from fractions import Fraction

import pytest
from sequences import SMALL, digests, save_sequence, sequence

from tunable_magmax import InputError, Preference
from tunable_magmax.cli.app import stop_message
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.options import SweepOptions, from_flat
from tunable_magmax.workflows.sweep import Sweep, line, listed, sweep


@pytest.fixture
def run(tmp_path):
    base, tasks = save_sequence(tmp_path / "in", *sequence(3, SMALL))
    entries = [{"name": f"t{t}", "checkpoint": str(task)} for t, task in enumerate(tasks)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps({"version": 1, "base": str(base), "tasks": entries}))
    return Run.open(tmp_path / "run")


def swept(run, out, **options) -> Sweep:
    return sweep(run.path, from_flat(SweepOptions, out=out, **options))


@pytest.mark.parametrize("options", [{}, {"method": "average"}, {"method": "ties", "scale": 0.5, "seed": 3}], ids=str)
def test_a_point_is_what_a_merge_makes(run, tmp_path, options):
    made = swept(run, tmp_path / "sweep", start=[3, 1, 0], stop=[0, 0, 1], steps=3, **options)
    assert [point.name for point in made.points] == ["step-00", "step-01", "step-02"]
    for point in made.points:
        weights = [Fraction(weight) for weight in point.weights]
        report = merge_checkpoints(
            run.base, run.tasks, tmp_path / point.name, names=run.names, weights=weights, **options
        )
        assert digests(tmp_path / "sweep" / point.name) == digests(tmp_path / point.name)
        assert (point.counts, point.scale) == (report.counts, report.scale)
    assert json.loads((tmp_path / "sweep/sweep.json").read_text()) == json.loads(made.to_json())


def test_points_of_preferences(run, tmp_path):
    for name, weights in (("site a", (3, 1, 0)), ("home", (0, 1, 1))):
        Preference(weights).save(tmp_path / f"{name}.json")
    (tmp_path / "other").mkdir()
    Preference((1, 1, 1)).save(tmp_path / "other" / "home.json")
    places = [tmp_path / "site a.json", tmp_path / "home.json", tmp_path / "other" / "home.json"]
    points = swept(run, tmp_path / "out", preference=places).points
    assert [point.name for point in points] == ["00-site-a", "01-home", "02-home"]


def test_shares_change_evenly_and_factors_mean_what_they_say():
    assert line([3, 1], [0, 1], 3)["step-01"] == (Fraction(3, 8), Fraction(5, 8))
    assert line([3, 1], [0, 1], 3, normalise=False)["step-01"] == (Fraction(3, 2), 1)
    assert listed([("a", ["1/3", 0])])["00-a"] == (Fraction(1, 3), 0)


@pytest.mark.parametrize(
    "options",
    [
        {"start": [1, 0, 0]},
        {"start": [1, 0, 0], "stop": [0, 1]},
        {"start": [1, 0, 0], "stop": [0, 0, 1], "steps": 1},
        {"start": [1, 0, 0], "stop": [0, 0, 0]},
        {"start": [1, 0, 0], "stop": [0, 0, 1], "preference": ["a.json"]},
        {"start": [1, 0, 0], "stop": [0, 0, 1], "method": "magmax"},
    ],
    ids=str,
)
def test_what_is_refused_beforehand(run, tmp_path, options):
    with pytest.raises(InputError):
        swept(run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_sweep_says_how_to_go_on(run, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    options = from_flat(SweepOptions, out=tmp_path / "out", start=[1, 0, 0], stop=[0, 0, 1], steps=3)
    with pytest.raises(KeyboardInterrupt) as stopped:
        sweep(run.path, options, progress=stop)
    message, code = stop_message(stopped.value, "sweep")
    assert code == 130
    assert message.startswith("interrupted; 1 of 3 points are complete in ")
    assert message.endswith("with --overwrite the same command makes all of them again")


def test_a_point_that_is_there_is_refused_before_any_is_merged(run, tmp_path):
    (tmp_path / "out/step-02").mkdir(parents=True)
    with pytest.raises(InputError, match="step-02 already exists"):
        swept(run, tmp_path / "out", start=[1, 0, 0], stop=[0, 0, 1], steps=3)
    assert [place.name for place in (tmp_path / "out").iterdir()] == ["step-02"]


def test_the_command(tmx, run, tmp_path):
    command = ["sweep", run.path, "--from", "t0=1", "--to", "t2=1", "--steps", 2, "-o", tmp_path / "out"]
    result = tmx(*command)
    assert result.code == 0, result.err
    rows = {cells[0]: cells[-2:] for cells in map(str.split, result.out.splitlines()) if cells}
    assert (rows["point"], rows["step-01"]) == (["t0", "t2"], ["0.00%", "100.00%"])
    assert tmx(*command).code == 2  # the points are there
    assert tmx(*command, "--overwrite", "--json").out == (tmp_path / "out/sweep.json").read_text()
    assert tmx(*command[:-2]).code == 2


def test_the_accuracy_of_a_point_is_that_of_the_model_tailored_to_its_weights(image_run, tmx, tmp_path):
    data = image_run.pairs(tmp_path / "site", {"red": 6, "blue": 3, "green": 3})
    route = ["--from", "1,0", "--to", "1,3", "--steps", "2", "--scale", "0.5"]
    result = tmx("sweep", image_run.path, *route, "--data", data, "-o", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    made = json.loads(result.out)
    assert made["samples"] == 12
    options = ["--method", "tunable_magmax", "--scale", "0.5", "-o", tmp_path / "site-model"]
    assert tmx("tailor", image_run.path, "--weights", "1,3", *options).code == 0
    found = evaluate(tmp_path / "site-model", data).accuracy.overall.value
    assert made["points"][1]["accuracy"] == pytest.approx(found, abs=1e-6)


def test_samples_are_opened_before_anything_is_merged(image_run, tmx, tmp_path):
    (tmp_path / "site").mkdir()
    route = ["--from", "1,0", "--to", "0,1", "--steps", "2"]
    result = tmx("sweep", image_run.path, *route, "--data", tmp_path / "site", "-o", tmp_path / "out")
    assert (result.code, (tmp_path / "out").exists()) == (2, False)
