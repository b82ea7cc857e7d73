"""`tmx compare`: the table, JSON, the picture and errors."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: train)")
pytest.importorskip("PIL", reason="pillow is not installed (extra: train)")

from tunable_magmax import Preference

CPU = ("--device", "cpu")
TABLES = [{"red": 5, "blue": 5}, {"green": 5, "grey": 5}]
LIKELY = Preference((3, 1), tasks=("first", "second")).with_prior(TABLES, eps=0.02)


@pytest.fixture(scope="module")
def site(text_run, tmp_path_factory):
    """A folder with labelled texts and preferences."""
    folder = tmp_path_factory.mktemp("site")
    text_run.pairs(folder / "test", {"red": 6, "blue": 4, "green": 3})
    LIKELY.save(folder / "site.json")
    replace(LIKELY, prior=None).save(folder / "plain.json")
    return folder


def test_a_table_a_picture_and_sentences(tmx, text_run, site, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")
    given = ("--preference", site / "site.json", "--data", site / "test.csv", *CPU)
    result = tmx("compare", text_run.path, *given, "--plot", tmp_path / "p.svg")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert (
        lines[0]
        == f"{text_run.path} on {site / 'test.csv'}, 13 samples, with the head {text_run.path}/head.safetensors"
    )
    assert lines[1] == "  with and without the site prior of the preference, eps 0.02"
    assert lines[2].split()[:2] == ["with", "prior"]
    found = json.loads(tmx("compare", text_run.path, *given, "--json").out)
    count = len(found["rows"]) // 2
    table = lines[3 : 3 + count]
    assert sum("*  " in line for line in table) == 1
    for line in table:
        title = next(row["model"] for row in found["rows"] if line.strip().startswith(row["model"]))
        shares = {row["prior"]: row["accuracy"] for row in found["rows"] if row["model"] == title}
        assert all(f"  {share:.1%}" in line for share in shares.values())
    rest = " ".join(lines[3 + count :])
    assert f"corrected for {len(found['rows']) - 1} comparisons (Holm)" in rest
    assert all(sentence in rest for sentence in found["summary"])
    assert tmx("compare", text_run.path, *given, "--quiet").out.splitlines() == found["summary"]
    picture = (tmp_path / "p.svg").read_text()
    assert picture.startswith("<?xml")
    assert picture.count("<!-- ") > count


def test_without_a_prior_it_says_so(tmx, text_run, site):
    for given in (("plain.json", "--prior", "none"), ("site.json", "--prior", "none")):
        file, *more = given
        result = tmx("compare", text_run.path, "--preference", site / file, "--data", site / "test.csv", *CPU, *more)
        assert "  without a site prior: neither preference nor head has one, or --prior none was given" in result.out
        assert "no prior" not in result.out


def test_a_dry_run(tmx, text_run, site):
    given = ("--preference", site / "site.json", "--data", site / "test.csv", "--scales", "0.3", "--limit", "9")
    result = tmx("compare", text_run.path, *given, "--dry-run")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert ", 9 samples, with the head " in lines[0]
    assert lines[-2:] == ["  tunable, scale 0.3", "  tunable, scale 1 (the tailored model)"]
    record = json.loads(tmx("compare", text_run.path, *given, "--dry-run", "--json").out)
    assert record["candidates"][:3] == ["base", "task first", "last"]


def test_without_the_extra_for_pictures(tmx, text_run, site, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name))
    given = ("--preference", site / "site.json", "--data", site / "test.csv", "--plot", tmp_path / "p.png")
    result = tmx("compare", text_run.path, *given)
    assert result.code == 2
    assert result.err == 'error: a picture needs matplotlib: pip install "tunable-magmax[report]"\n'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("{run} --data {site}/test.csv", "for which site? Give --preference FILE, which `tmx prefer"),
        ("{run} --preference {new}/none.json", "no such file; `tmx prefer` writes preference files"),
        (
            "{run} --preference {new}/other.json",
            "about other tasks than the run: it has a, b; the run has first, second",
        ),
        ("{run} --preference {site}/site.json", "run.json names no benchmark. Give --data"),
        ("{run} --preference {site}/site.json --data {new}/empty.csv", "holds no samples; give at least one"),
        (
            "{run} --preference {site}/site.json --data {new}/zebra.csv",
            "1 of 1 labels are no class of the head: 'zebra'",
        ),
        ("{run} --preference {site}/site.json --data {new}/bare.csv", "holds inputs without labels"),
        ("{run} --preference {site}/site.json --data {site}/test.csv --head {new}/no", "no such file; a head is a"),
        (
            "{run} --preference {site}/site.json --scales 1,zero",
            "--scales is '1,zero', expected numbers above 0 or match",
        ),
        ("{run} --preference {site}/site.json --scales 1 2", "2 belongs to no option: numbers of --scales have commas"),
        (
            "{run} --preference {site}/site.json --plot p.doc",
            "p.doc: a picture's name must end in one of .png, .svg, .pdf",
        ),
        (
            "{headless} --preference {site}/site.json --data {site}/test.csv",
            "names no classifier head: give it with --head",
        ),
        ("{site} --preference {site}/site.json", "is not a run directory: it has no run.json"),
    ],
)
def test_bad_input(tmx, text_run, site, tmp_path, arguments, says):
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
    assert says in result.err
    assert result.err.startswith("error: ")
    assert result.out == ""
