"""The paper's numbers, checked against each other and shown only beside the same setting."""

from __future__ import annotations

import pytest
from experiments.invented import row_record, sequence_record

from tunable_magmax.experiments import paper
from tunable_magmax.experiments.report import html, markdown
from tunable_magmax.experiments.results import results_of
from tunable_magmax.experiments.table import csv_text, latex
from tunable_magmax.experiments.tables import accuracy_table, similarity_tables

IMAGE_ENCODER = 86_192_640


def test_each_line_has_five_numbers_whose_mean_is_the_printed_average() -> None:
    assert len(paper.TABLES) == 6
    for setting, rows in paper.TABLES.items():
        assert len(rows) == 7
        for row, line in rows.items():
            assert len(line.means) == len(line.deviations) == 5
            # Five numbers and their average, each rounded to two digits.
            assert abs(sum(line.means) / 5 - line.average) <= 0.0101, (setting, row)


def test_the_comparison_of_similarities_agrees_with_the_tables() -> None:
    for setting, rows in paper.SIMILARITY.items():
        for row in ("magmax@0.5", "tunable:ot-raw@0.5", "tunable:label@0.5"):
            assert rows[row] == paper.TABLES[setting][row].average


@pytest.mark.parametrize(
    ("setting", "elements", "mixtures", "shown"),
    [
        ("clip-vit-b16/cifar100-20", IMAGE_ENCODER, ["D1", "D2", "D3", "D4", "D5"], True),
        ("clip-vit-b16/cifar100-20", 1000, ["D1", "D2", "D3", "D4", "D5"], False),
        ("mini-clip/cifar100-20", IMAGE_ENCODER, ["D1", "D2", "D3", "D4", "D5"], False),
        ("clip-vit-b16/cifar100-15", IMAGE_ENCODER, ["D1", "D2", "D3", "D4", "D5"], False),
        ("clip-vit-b16/cifar100-20", IMAGE_ENCODER, ["D1", "D2"], False),
        ("clip-vit-b16/cifar100-20", IMAGE_ENCODER, ["M1", "M2", "M3", "M5", "M10"], False),
        ("clip-vit-b16/cifar100-20", None, ["D1", "D2", "D3", "D4", "D5"], False),
    ],
)
def test_the_papers_lines_stand_beside_the_same_setting_only(
    setting: str, elements: int | None, mixtures: list[str], shown: bool
) -> None:
    records = [row_record(row, 3, setting, mixtures) for row in ("magmax@0.5", "tunable:label@matched")]
    if elements is not None:
        records.append(sequence_record(3, setting, elements))
    table = accuracy_table(results_of(records), setting, mixtures[0][0])
    for write in (markdown, latex, csv_text, html):
        assert ("paper" in write(table)) == shown
    lines = {line[0].text: line for line in table.rows}
    assert len(lines) == (3 if shown else 2)
    if shown:
        printed = lines["`magmax@0.5` in the paper"]
        assert [cell.value for cell in printed[1:]] == pytest.approx([78, 78, 77, 78, 76, 77])
        assert [cell.deviation for cell in printed[1:]] == pytest.approx([1, 2, 2, 1, 2, None])
        assert not any(cell.best for cell in printed)


def test_similarities_of_the_paper_too() -> None:
    def built(model: str, elements: int) -> str:
        settings = [f"{model}/cifar100-{tasks}" for tasks in (5, 20)]
        rows = ("magmax@0.5", "tunable:ot-raw@0.5", "tunable:label@0.5", "tunable:ot@matched", "tunable:label@matched")
        records = [row_record(row, 3, setting) for setting in settings for row in rows]
        records += [sequence_record(3, setting, elements) for setting in settings]
        tables = similarity_tables(results_of(records))
        assert [table.name[-7:] for table in tables] == ["100-0.5", "matched"]
        assert "paper" not in markdown(tables[1])
        return markdown(tables[0])

    assert "| 20 `in the paper` | 77 | 79 | 81 |" in built("clip-vit-b16", IMAGE_ENCODER)
    assert "paper" not in built("clip-vit-b16", 1000)
    assert "paper" not in built("mini-clip", IMAGE_ENCODER)
