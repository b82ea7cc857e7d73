"""The page: whole, alone, and honest in its words."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from experiments.invented import (
    ABOVE_MAGMAX,
    alpha_records,
    row_record,
    sequence_record,
    whole_experiment,
    write_records,
)

from tunable_magmax.experiments.findings import findings, headlines
from tunable_magmax.experiments.report import render
from tunable_magmax.experiments.results import results_of
from tunable_magmax.experiments.rows import BASELINES, Source, meanings, plan_rows, row_parts

VOID = {"meta", "img", "br", "wbr", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page and notes what does not close, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.alts: list[str] = []
        self.feed(text)
        self.problems += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        if "id" in given:
            self.ids.append(str(given["id"]))
        self.links += [str(given[name]) for name in ("href",) if name in given]
        self.sources += [str(given[name]) for name in ("src", "srcset", "data") if name in given]
        if tag == "img":
            self.alts.append(given.get("alt") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing at {self.getpos()}")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("experiment")
    records = whole_experiment(["mini-clip/cifar100-5", "mini-clip/cifar100-20"])
    write_records(root / "records.jsonl", records)
    return root / "out", render(root, root / "out", title="A <title> & more", about="About `tmx`.")


def test_everything_that_is_said_to_be_written_is_there(rendered: tuple[Path, list[Path]]) -> None:
    out, written = rendered
    assert sorted(written) == sorted(path for path in out.rglob("*") if path.is_file())
    names = {path.relative_to(out).as_posix() for path in written}
    assert {"report.html", "report.md", "figures/leads.png", "figures/leads.svg"} <= names
    for kind in ("accuracy", "differences", "estimation", "known", "time", "meta-size"):
        assert {f"tables/{kind}-mini-clip-cifar100-20.{suffix}" for suffix in ("md", "tex", "csv")} <= names
    assert {
        "tables/scales.md",
        "tables/magmax-ownership.md",
        "tables/similarity-mini-clip-cifar100-matched.md",
    } <= names


def test_the_page_is_well_formed_and_stands_alone(rendered: tuple[Path, list[Path]]) -> None:
    text = (rendered[0] / "report.html").read_text()
    page = Page(text)
    assert page.problems == []
    assert page.tags["h1"] == page.tags["title"] == page.tags["main"] == 1
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert "@import" not in text
    assert "url(" not in text
    assert re.search(r"https?://", text) is None
    assert page.tags["img"] == len(page.alts) > 3
    assert min(map(len, page.alts)) > 40
    assert "A &lt;title&gt; &amp; more" in text
    assert page.tags["table"] == text.count('<div class="scroll" role="region" aria-labelledby=')


def test_equal_records_give_equal_pages(rendered: tuple[Path, list[Path]], tmp_path: Path) -> None:
    out, _ = rendered
    render(out.parent / "records.jsonl", tmp_path, title="A <title> & more", about="About `tmx`.")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (out / path.relative_to(tmp_path)).read_bytes(), path.name


def said(records: list[dict[str, object]], about: str = "mini-clip/cifar100-20") -> str:
    return " ".join(findings(results_of(records))[about])


def test_words_say_who_leads_and_who_loses() -> None:
    text = said(whole_experiment())
    assert "`tunable:label@matched` has the highest mean accuracy" in text
    assert re.search(r"Ahead of `magmax@best`: `tunable:label@matched` \(\+[67]\.\d points", text)
    assert re.search(r"Behind `magmax@best`: `tunable:mmd@matched` \(−[78]\.\d points", text)
    assert re.search(r"`tunable:auto@matched` keeps 8\d% of the lead that labels give", text)
    assert "`tunable:search@matched`" in text
    assert "in 15 of 75 pairs only" in text
    assert "alpha steers" in text


@pytest.mark.parametrize(("lead", "words"), [(0.2, "Ahead of"), (-0.2, "Behind")])
def test_words_compare_the_single_best_task_as_well(lead: float, words: str) -> None:
    """It is tailored to the environment too, and a reader who has labels would try it first."""
    above = {**ABOVE_MAGMAX, "single-best": lead}
    rows = ("magmax@best", "single-best", "tunable:label@matched")
    text = said([row_record(row, seed, above=above) for row in rows for seed in (3, 4, 5)])
    assert re.search(rf"{words} `magmax@best`: [^.]*`single-best` \([+−]\d+\.\d points", text), text


def test_the_headline_names_the_best_row_and_the_recommended_one() -> None:
    rows = ("magmax@best", "tunable:label@matched", "tunable:auto@matched")
    records = [row_record(row, seed) for row in rows for seed in (3, 4, 5)]
    (line,) = headlines(results_of(records))
    number = r"\d\d\.\d%"
    lead = r"\(\+\d\.\d points, \+\d\.\d to \+\d\.\d\)"
    assert re.fullmatch(
        rf"mini-clip/cifar100-20: best tunable:label@matched {number} {lead}; "
        rf"recommended tunable:auto@matched {number} {lead}; magmax@best {number}",
        line,
    )
    (line,) = headlines(results_of([row_record("magmax@best", seed) for seed in (3, 4)]))
    assert re.fullmatch(rf"mini-clip/cifar100-20: best magmax@best {number}; magmax@best {number}", line)
    assert headlines(results_of([row_record("tunable:label@matched", 3)])) == []


def test_words_do_not_hide_that_nothing_helps() -> None:
    worse = {**ABOVE_MAGMAX, "tunable:label@matched": -0.05, "tunable:auto@matched": -0.09, "tunable:ot@matched": -0.03}
    rows = ("magmax@best", "tunable:label@matched", "tunable:auto@matched", "tunable:ot@matched")
    settings = ("mini-clip/cifar100-20", "mini-clip/cifar100-50")
    records = [
        row_record(row, seed, setting, above=worse if setting.endswith("20") else ABOVE_MAGMAX)
        for row in rows
        for seed in (3, 4, 5)
        for setting in settings
    ]
    text = said(records)
    assert "`magmax@best` has the highest mean accuracy" in text
    assert "No method beats it." in text
    assert "Ahead of" not in text
    assert re.search(r"Behind `magmax@best`: `tunable:ot@matched` \(−[23]\.\d points", text)
    assert "Labels give no lead" in text
    assert "`tunable:auto@matched` is behind `tunable:ot@matched`" in text
    overview = said(records, "All settings")
    assert "`tunable:label@matched` has a higher mean than `magmax@best` in 1 of 2 settings" in overview
    assert re.search(r"not in mini-clip/cifar100-20 \(−[45]\.\d points", overview)


def test_words_say_if_alpha_does_not_steer() -> None:
    backwards = alpha_records(3, "mini-clip/cifar100-20")
    for point in backwards[0]["points"]:
        point["first"], point["last"] = point["last"], point["first"]
    assert "alpha does not steer as it should" in said(backwards)


def test_words_say_with_how_many_tasks_a_lead_is_gone() -> None:
    records = [
        row_record(row, seed, mixtures=[mixture], above={"tunable:label@matched": lead})
        for mixture, lead in (("M1", 0.2), ("M5", 0.05), ("M10", -0.1))
        for row in ("magmax@best", "tunable:label@matched")
        for seed in (3, 4, 5)
    ]
    shape = r"by the number of tasks: \+(19|20)\.\d with 1, \+[45]\.\d with 5 and −(9|10)\.\d with 10 \(points\); "
    assert re.search(shape + "clearly ahead with 1 and 5, clearly behind with 10\\.", said(records))
    assert "by the number of tasks" not in said(whole_experiment())


def test_kinds_and_rows_may_be_chosen_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    root = write_records(tmp_path / "records.jsonl", whole_experiment()).parent
    alone = {path.name for path in render(root, tmp_path / "alpha", kinds=["sequence", "alpha"])}
    assert "alpha-mini-clip-cifar100-0.5.png" in alone
    assert not any(name.startswith(("accuracy", "leads", "scales")) for name in alone)
    render(root, tmp_path / "rows", kinds=["row"], rows=["magmax@best", "tunable:ot@matched"])
    text = (tmp_path / "rows" / "tables" / "accuracy-mini-clip-cifar100-20.md").read_text()
    assert "tunable:ot@matched" in text
    assert "label" not in text
    bare = write_records(tmp_path / "bare" / "records.jsonl", [sequence_record(3)])
    render(bare, tmp_path / "little")
    assert Page((tmp_path / "little" / "report.html").read_text()).problems == []


def test_every_part_of_a_rows_name_is_explained() -> None:
    for row in plan_rows(BASELINES, get_args(Source), [0.5, "matched", "best"], [{"compare": "active"}]):
        base, preference, scale, _ = row_parts(row.name)
        parts = [base, *([f":{preference}"] if preference else []), *([f"@{scale}"] if scale else [])]
        assert list(meanings([row.name])) == parts


def test_the_page_explains_the_names_it_uses(rendered: tuple[Path, list[Path]]) -> None:
    text = (rendered[0] / "report.html").read_text()
    assert "<dt><code>@matched</code></dt><dd>the step from the base is as long as the last task&#39;s</dd>" in text
