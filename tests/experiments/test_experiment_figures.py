"""Figures: which there are, what they say in words, and that equal records give equal bytes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from experiments.invented import alpha_records, meta_record, row_record, whole_experiment

from tunable_magmax.experiments.figures import all_drawings
from tunable_magmax.experiments.results import results_of
from tunable_magmax.plots.experiment import Drawing


@pytest.fixture(scope="module")
def drawings() -> dict[str, Drawing]:
    sweep = [
        row_record(row, seed, mixtures=["M1", "M2", "M10"], variants=[42, 123, 456])
        for row in ("magmax@best", "tunable:label@matched")
        for seed in (3, 4)
    ]
    settings = ["mini-clip/cifar100-5", "mini-clip/cifar100-20"]
    return {drawing.name: drawing for drawing in all_drawings(results_of([*whole_experiment(settings), *sweep]))}


def test_every_kind_is_there(drawings: dict[str, Drawing]) -> None:
    assert list(drawings) == [
        "leads",
        "alpha-mini-clip-cifar100-0.5",
        "preference-vectors-mini-clip-cifar100-5",
        "preference-vectors-mini-clip-cifar100-20",
        "m-sweep-mini-clip-cifar100-20",
        "meta-size-mini-clip-cifar100",
    ]


def test_alternative_texts_say_what_is_seen(drawings: dict[str, Drawing]) -> None:
    alpha = drawings["alpha-mini-clip-cifar100-0.5"].alt
    assert "mini-clip/cifar100-5: first task 40.8% at alpha 0 and 70.8% at alpha 2 (MAGMAX 55.8%)" in alpha
    assert "alpha 0.5: first task 32.3, last task 516" in drawings["preference-vectors-mini-clip-cifar100-5"].alt
    leads = drawings["leads"].alt
    assert "surely behind: zero-shot, sequential@0.5, random_mix@0.5, tunable:mmd@matched" in leads
    assert "for tunable:label@matched; surely ahead: tunable:ot@matched, tunable:auto@matched" in leads


def test_both_formats_are_written(drawings: dict[str, Drawing], tmp_path: Path) -> None:
    drawing = drawings["leads"]
    png, svg = drawing.save(tmp_path / "figures")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert drawing.content("svg") == svg.read_bytes()
    assert b"<dc:date>" not in svg.read_bytes()


def test_panels_are_settings_and_bars_are_budgets(drawings: dict[str, Drawing]) -> None:
    titles = [axes.get_title(loc="left") for axes in drawings["alpha-mini-clip-cifar100-0.5"].figure.axes]
    assert titles == ["mini-clip/cifar100-5", "mini-clip/cifar100-20"]
    below, above = drawings["preference-vectors-mini-clip-cifar100-5"].figure.axes
    heights = [bar.get_height() for bar in below.patches]
    assert heights == pytest.approx([1000.003 * 2**t / 31 for t in range(5)], abs=0.001)
    assert [bar.get_height() for bar in above.patches] == pytest.approx(heights[::-1])


def test_lines_are_told_apart_without_colour(drawings: dict[str, Drawing]) -> None:
    for name in ("alpha-mini-clip-cifar100-0.5", "m-sweep-mini-clip-cifar100-20", "meta-size-mini-clip-cifar100"):
        handles, labels = drawings[name].figure.axes[0].get_legend_handles_labels()
        curves = [handle.lines[0] if hasattr(handle, "lines") else handle for handle in handles]
        looks = {(str(line.get_marker()), str(line._dash_pattern[1])) for line in curves}
        assert len(looks) == len(labels) > 1, name


@pytest.mark.parametrize("records", [[], alpha_records(3)[1:], [meta_record(3, "a")], [row_record("magmax@best", 3)]])
def test_little_is_no_trouble(records: list[dict[str, object]]) -> None:
    names = [drawing.name for drawing in all_drawings(results_of(records))]
    assert names == (["meta-size-mini-clip-cifar100"] if records and records[0]["kind"] == "meta-size" else [])
