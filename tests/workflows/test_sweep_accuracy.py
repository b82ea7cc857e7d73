"""The accuracy of a sweep's points is that of the checkpoints it writes, and is measured once."""

from __future__ import annotations

import csv
import json

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from tunable_magmax.workflows.evaluate import evaluate
from tunable_magmax.workflows.measuring import Measuring
from tunable_magmax.workflows.options import Reading


def test_each_point_is_measured_as_eval_measures_its_checkpoint(image_run, tmx, tmp_path, monkeypatch):
    site = image_run.pairs(tmp_path / "site", {"red": 6, "blue": 3, "green": 3})
    line = ["--from", "1,0", "--to", "1,2", "--steps", "3"]
    common = ["sweep", image_run.path, *line, "-o", tmp_path / "out", "--data", site, "--device", "cpu"]
    told = tmx(*common, "--plot", tmp_path / "chart.svg")
    assert told.code == 0, told.err
    assert "its mix" in told.out
    assert (tmp_path / "chart.svg").read_text().count("accuracy") >= 1
    made = json.loads((tmp_path / "out/sweep.json").read_text())
    assert made["data"] == {"name": str(site), "samples": 12, "of": 12}
    for point in made["points"]:
        place = tmp_path / "out" / point["name"]
        found = evaluate(place, site, run=image_run.path, prior="none", reading=Reading(device="cpu"))
        assert point["accuracy"]["right"] == found.accuracy.overall.right
    rows = list(csv.DictReader((tmp_path / "out/sweep.csv").read_text().splitlines()))
    assert [float(row["accuracy"]) for row in rows] == pytest.approx(
        [point["accuracy"]["overall"] for point in made["points"]], abs=1e-5
    )
    assert rows[0].keys() >= {"point", "weight first", "accuracy second", "accuracy on its mix, tailored"}
    monkeypatch.setattr(Measuring, "measure", None)  # a second call measures nothing
    again = tmx(*common)
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "out/sweep.json").read_text()) == made


def test_what_cannot_be_measured_is_refused(image_run, tmx, tmp_path, sequence):
    line = ["--from", "1,0,0", "--to", "0,0,1", "--data", tmp_path]
    told = tmx("sweep", *sequence.arguments, *line, "-o", tmp_path / "out")
    assert told.code == 2
    assert "--data needs a run" in told.err
    line = ["--from", "1,0", "--to", "0,1", "--steps", "2", "--reports-only", "--compare", "active"]
    told = tmx("sweep", image_run.path, *line, "--data", tmp_path, "-o", tmp_path / "other")
    assert told.code == 2
    assert "leave out --compare" in told.err
    assert not (tmp_path / "other").exists()
