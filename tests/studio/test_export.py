"""The page in one file: nothing of this machine, nothing from elsewhere, and data that cannot break out."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json

import numpy as np
import pytest

from tunable_magmax.runs.run import Run
from tunable_magmax.studio.export import cross_validated, export_page, interpolated, one_file, sweep_weights
from tunable_magmax.studio.points import usual_presets
from tunable_magmax.studio.session import Studio, StudioOptions


class Parts(html.parser.HTMLParser):
    """The elements of a page, each with what is in it."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        self.found.append([f"/{tag}", {}, ""])

    def handle_data(self, data):
        if self.found:
            self.found[-1][2] += data


@pytest.fixture(scope="module")
def exported(image_run, site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    studio = Studio(Run.open(image_run.path), folder / "out", StudioOptions(data=site, device="cpu"))
    data = export_page(studio, folder / "page.html", 7)
    studio.close()
    return folder, data


def test_the_page_holds_its_points_and_nothing_of_this_machine(exported, image_run, site):
    folder, data = exported
    text = (folder / "page.html").read_text()
    parts = Parts(text).found
    embedded = next(part[2] for part in parts if part[1].get("id") == "tmx-data")
    assert json.loads(embedded) == json.loads(json.dumps(data))
    assert len(data["points"]) == 14
    assert data["points"][0]["lines"][0]["name"] == "base"
    assert data["commands"].keys() == {point["id"] for point in data["points"]}
    assert data["interpolation"]["error"] == cross_validated(data["points"][::2])
    for place in (folder, image_run.path, site):
        assert str(place) not in text
    for tag, attributes, content in parts:
        assert not {"src", "action", "srcset"} & attributes.keys(), tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
        if tag in ("script", "style") and "id" not in attributes:
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in text


def test_data_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script><!--\u2028&amp;"
    parts = Parts(one_file({"title": evil})).found
    embedded = [part for part in parts if part[1].get("id") == "tmx-data"]
    assert json.loads(embedded[0][2]) == {"title": evil}
    assert not any("alert(1)" in part[2] for part in parts if part not in embedded)


def test_an_interrupted_export_goes_on(exported, image_run, site, monkeypatch):
    folder, before = exported
    studio = Studio(Run.open(image_run.path), folder / "out", StudioOptions(data=site, device="cpu"))
    monkeypatch.setattr(type(studio.measured), "add", lambda self, record, right: None)
    again = export_page(studio, folder / "again.html", 7)
    studio.close()
    strip = [{**point, "time": ""} for point in again["points"]]
    assert strip == [{**point, "time": ""} for point in before["points"]]


def test_the_points_are_the_presets_then_lines_then_the_simplex(image_run):
    run = Run.open(image_run.path)
    presets = {preset.id: preset for preset in usual_presets(run)}
    few, many = sweep_weights(presets, 2, 4), sweep_weights(presets, 2, 40)
    assert few == many[:4]
    assert many[:3] == [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0)]
    assert len(set(many)) == 40
    assert all(abs(sum(weights) - 1) < 1e-3 for weights in many)


def test_interpolation_is_exact_at_points_and_linear_fields_are_nearly_right():
    rng = np.random.default_rng(1)
    points = rng.dirichlet([1.0] * 3, 200)
    values = points @ np.array([[0.2, 0.9], [0.5, 0.1], [0.8, 0.4]])
    assert interpolated(points[17], points, values).tolist() == values[17].tolist()
    rows = [{"weights": p.tolist(), "tasks": [{"accuracy": x} for x in v]} for p, v in zip(points, values, strict=True)]
    assert cross_validated(rows) < 0.03
    assert cross_validated(rows[:1]) is None
