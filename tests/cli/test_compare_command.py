"""`tmx compare`: the table, JSON and errors."""

from __future__ import annotations

import json

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
        ("{run} --preference {site}/none.json --data {site}/test.csv", "none.json"),
        ("{run} --preference {site}/site.json", "Give data"),
        ("{run} --preference {site}/site.json --data {site}/bare.csv", "bare.csv"),
        ("{site} --preference {site}/site.json --data {site}/test.csv", "run.json"),
    ],
)
def test_bad_input(tmx, text_run, site, arguments, value):
    (site / "bare.csv").write_text("text\nhello\n")
    result = tmx("compare", *arguments.format(run=text_run.path, site=site).split())
    assert (result.code, result.out, value in result.err) == (2, "", True)
