"""`tmx compare`: the table, JSON, the picture and errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from tunable_magmax import Preference

CPU = ("--device", "cpu")
TABLES = [{"red": 5, "blue": 5}, {"green": 5, "grey": 5}]
LIKELY = Preference((3, 1), tasks=("first", "second")).with_prior(TABLES, eps=0.02)


@pytest.fixture(scope="module")
def site(text_run, tmp_path_factory):
    """A folder with labelled texts and a preference."""
    folder = tmp_path_factory.mktemp("site")
    text_run.pairs(folder / "test", {"red": 6, "blue": 4, "green": 3})
    LIKELY.save(folder / "site.json")
    return folder


def test_a_table_that_fits_and_what_it_says(tmx, text_run, site):
    given = ("--preference", site / "site.json", "--data", site / "test.csv", *CPU)
    result = tmx("compare", text_run.path, *given)
    assert (result.code, "warning" in result.err) == (0, False)
    found = json.loads(tmx("compare", text_run.path, *given, "--json").out)
    lines = result.out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])  # the first names run and data
    table = {line[2:34].strip(): line for line in lines if "%" in line and line.startswith("  ")}
    for row in found["rows"]:
        star = " *" if row["verdict"] is None else ""
        line = next(line for start, line in table.items() if start.startswith(row["model"] + star))
        assert f"{row['accuracy']:.1%}" in line
    assert {row["head"] for row in found["rows"]} <= {"fitted", "old"}
    assert result.out.count(" *") == len([line for line in lines if " *" in line])
    assert all(part in " ".join(result.out.split()) for part in found["summary"])


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("{run} --preference {new}/none.json --data {site}/test.csv", "none.json"),
        ("{run} --preference {new}/other.json --data {site}/test.csv", "a, b"),
        ("{run} --preference {site}/site.json", "Give data"),
        ("{run} --preference {site}/site.json --data {new}/empty.csv", "empty.csv"),
        ("{run} --preference {site}/site.json --data {new}/zebra.csv", "'zebra'"),
        ("{run} --preference {site}/site.json --data {new}/bare.csv", "bare.csv"),
        ("{headless} --preference {site}/site.json --data {site}/test.csv", "give head"),
        ("{site} --preference {site}/site.json --data {site}/test.csv", "run.json"),
    ],
)
def test_bad_input(tmx, text_run, site, tmp_path, arguments, value):
    replace(LIKELY, tasks=("a", "b")).save(tmp_path / "other.json")
    (tmp_path / "empty.csv").write_text("text,label\n")
    (tmp_path / "zebra.csv").write_text("text,label\nhello,zebra\n")
    (tmp_path / "bare.csv").write_text("text\nhello\n")
    headless = shutil.copytree(text_run.path, tmp_path / "run")
    record = json.loads((headless / "run.json").read_text())
    (headless / "run.json").write_text(json.dumps({**record, "classifier": None}))
    names = {"run": text_run.path, "site": site, "new": tmp_path, "headless": headless}
    result = tmx("compare", *arguments.format(**names).split())
    assert result.code == 2, result.out
    assert value in result.err
    assert result.err.startswith("error: ")
    assert result.out == ""
