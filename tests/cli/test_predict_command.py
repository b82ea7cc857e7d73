"""`tmx predict`: a table, files of labels, JSON and errors."""

import csv
import json
import os
import shutil

import pytest

CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def photos(image_run, tmp_path_factory):
    folder = image_run.pairs(tmp_path_factory.mktemp("site") / "photos", {"red": 2, "blue": 2})
    (folder / "blue" / "1.png").write_text("?")
    return folder


def test_a_table(tmx, image_run, photos):
    result = tmx("predict", image_run.path / "first", photos, "--top", "2", *CPU)
    assert result.code == 0
    assert result.err == (
        f"warning: 1 of 4 inputs could not be read and got no label: {photos}/blue/1.png (not an image)\n"
    )
    lines = iter(result.out.splitlines())
    assert next(lines).split() == ["label", "probability"]
    found = json.loads(tmx("predict", image_run.path / "first", photos, "--top", "2", *CPU, "--json").out)
    for one in found["predictions"]:
        cells = [[pair["label"], f"{pair['probability']:.1%}"] for pair in one["top"]] or [[]]
        assert [next(lines).split() for _ in cells] == [[one["input"], *cells[0]], *cells[1:]]
    assert list(lines) == []


def test_files_of_labels(tmx, image_run, photos, tmp_path):
    command = ("predict", image_run.path / "first", photos, *CPU)
    shown = json.loads(tmx(*command, "--json").out)
    result = tmx(*command, "-o", tmp_path / "new" / "labels.csv")
    assert "4 inputs classified: " in result.out
    assert f"written to {tmp_path / 'new' / 'labels.csv'}\n" in result.out
    with (tmp_path / "new" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [one["label"] or "" for one in shown["predictions"]]
    assert tmx(*command, "-q", "-o", tmp_path / "a.jsonl").out == ""
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == shown["predictions"]


def test_names_that_are_not_utf_8(tmx, image_run, photos, tmp_path):
    (tmp_path / "in").mkdir()
    try:
        shutil.copy(photos / "red" / "0.png", os.fsencode(tmp_path / "in") + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    command = ("predict", image_run.path / "first", tmp_path / "in", *CPU)
    for name in ("a.csv", "a.jsonl"):
        assert tmx(*command, "-o", tmp_path / name).code == 0
        assert "caf\\udce9.png" in (tmp_path / name).read_text().replace("\\\\", "\\")
    assert "caf\\udce9.png" in tmx(*command).out
    assert json.loads(tmx(*command, "--json").out)["predictions"][0]["input"].endswith("caf\udce9.png")
