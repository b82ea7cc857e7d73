"""Tables hold the numbers of the records, recomputed here in another way; reports are whole and made the same again."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from experiments.invented import (
    ABOVE,
    BASE,
    SETTING,
    alpha_records,
    results_of,
    row_record,
    whole_experiment,
)

from tunable_magmax.experiments.records import EnvironmentScore, RowRecord
from tunable_magmax.experiments.report import write_overview, write_setting
from tunable_magmax.experiments.results import paired, write_summary
from tunable_magmax.experiments.tables import (
    Cell,
    Table,
    accuracy_table,
    differences_table,
    expected_table,
    overall_tables,
)

RECORDS = whole_experiment()
RESULTS = results_of(RECORDS)


def shares(row: str, seed: int) -> dict[str, float]:
    [record] = [each for each in RECORDS if isinstance(each, RowRecord) and (each.row, each.seed) == (row, seed)]
    return {found.name: found.right / found.samples for found in record.environments}


def lines(table: Table) -> dict[str, dict[str, Cell]]:
    found = {label.replace("`", ""): cells for label, cells in table.lines.items()}
    return {label: dict(zip(table.columns[1:], cells, strict=True)) for label, cells in found.items()}


def test_means_over_draws_and_deviations_over_seeds() -> None:
    table = accuracy_table(RESULTS, SETTING)
    assert table.columns == ("row", "D1", "D2", "D3", "D4", "D5", "Average", "M5", "M10")
    for row in ABOVE:
        by_seed = [shares(row, seed) for seed in (3, 4, 5)]
        for column, mixtures in {"D1": ("D1/",), "M10": ("M10/",), "Average": ("D",)}.items():
            means = [statistics.mean(s for name, s in found.items() if name.startswith(mixtures)) for found in by_seed]
            cell = lines(table)[row][column]
            assert cell.value == pytest.approx(100 * statistics.mean(means))
            assert cell.deviation == pytest.approx(100 * statistics.stdev(means))


def test_differences_are_of_pairs() -> None:
    table = lines(differences_table(RESULTS))
    cell = table[f"tailor:auto minus {BASE}"][SETTING]
    main = [name for name in shares(BASE, 3) if name.startswith("D")]
    pairs = [shares("tailor:auto", seed)[name] - shares(BASE, seed)[name] for seed in (3, 4, 5) for name in main]
    assert cell.value == pytest.approx(100 * statistics.mean(pairs))
    assert cell.interval is not None
    assert cell.interval[0] < cell.value < cell.interval[1]
    assert table["tailor:wrong minus tailor:auto"][SETTING].value == pytest.approx(-35, abs=1)


def test_an_interval_is_that_of_all_resamples() -> None:
    """Two seeds and three environments: all 4 x 27 resamples can be listed."""
    pairs = {(3, "a"): 4, (3, "b"): -1, (3, "c"): 9, (4, "a"): 2, (4, "b"): 6, (4, "c"): -3}

    def scores(row: str, sign: int) -> list[RowRecord]:
        def one(seed: int) -> tuple[EnvironmentScore, ...]:
            right = {name: 500 + sign * pairs[seed, name] for name in "abc"}
            return tuple(EnvironmentScore(name=n, mixture="D1", right=r, samples=1000) for n, r in right.items())

        return [RowRecord(setting=SETTING, seed=seed, row=row, environments=one(seed)) for seed in (3, 4)]

    rows = results_of([*scores("x", 1), *scores("magmax@best", 0)]).main_rows(SETTING)
    difference = paired(rows["x"], rows["magmax@best"])
    listed = [
        np.mean([pairs[seed, name] for seed in seeds for name in names]) / 1000
        for seeds in itertools.product((3, 4), repeat=2)
        for names in itertools.product("abc", repeat=3)
    ]
    assert difference is not None
    assert difference.mean == pytest.approx(sum(pairs.values()) / 6000)
    assert (difference.low, difference.high) == pytest.approx(tuple(np.quantile(listed, [0.025, 0.975])), abs=5e-4)


def test_environments_that_a_seed_lacks_are_not_compared() -> None:
    records = [row_record(row, 3) for row in (BASE, "tailor:auto")]
    whole = [row_record(row, 4, variants=[42]) for row in (BASE, "tailor:auto")]
    alone = [row_record(row, 3, variants=[42]) for row in (BASE, "tailor:auto")]
    leads = []
    for some in ([*records, *whole], [*alone, *whole]):
        rows = results_of(some).main_rows(SETTING)
        leads.append(paired(rows["tailor:auto"], rows[BASE]))
    assert leads[0] == leads[1] is not None


def test_what_was_told_beforehand_stands_beside_what_came_out() -> None:
    table = expected_table(RESULTS).lines
    real = [share for seed in (3, 4, 5) for share in shares("tailor:auto", seed).values()]
    assert [cell.value for cell in table[f"{SETTING}: accuracy, tailored"][:4]] == pytest.approx(
        [
            100 * statistics.mean(real),
            80,
            100 * statistics.mean(abs(share - 0.8) for share in real),
            100 * statistics.mean(0.7 <= share <= 0.9 for share in real),
        ]
    )
    weights = table[f"{SETTING}: error of the weights"]
    assert [cell.value for cell in weights[:3]] == pytest.approx([10, 15, 5])
    assert f"{SETTING}: accuracy, base" in table


def test_reports_are_whole_and_equal_records_give_equal_files(tmp_path: Path) -> None:
    first, again = (
        [
            *write_setting(RESULTS, SETTING, tmp_path / name, "About it."),
            *write_overview(RESULTS, tmp_path / name / "all"),
        ]
        for name in ("one", "two")
    )
    for left, right in zip(first, again, strict=True):
        assert left.read_bytes() == right.read_bytes()
    text = (tmp_path / "one" / "report.md").read_text()
    pictures = re.findall(r"!\[(.+?)\]\((.+?)\)", text)
    assert len(pictures) == 3
    for alt, file in pictures:
        assert len(alt) > 40
        assert ElementTree.parse(tmp_path / "one" / file).getroot().tag.endswith("svg")
    assert text.startswith(f"# {SETTING}\n\nAbout it.")


@pytest.mark.parametrize("records", [[], alpha_records(3)[1:], [row_record("average@1", 3)]])
def test_little_is_no_trouble(records: list, tmp_path: Path) -> None:
    results = results_of(records)
    for setting in results.settings:
        assert write_setting(results, setting, tmp_path)
    assert all(table.lines for table in overall_tables(results))


def test_the_summary_has_the_means_over_seeds(tmp_path: Path) -> None:
    summary = json.loads(write_summary(RESULTS, tmp_path).read_text())
    assert (summary.pop("chosen"), summary.pop("recommended")) == ("matched", "tailor:auto")
    assert set(summary) == {SETTING}
    for row, numbers in summary[SETTING].items():
        seeds = [statistics.mean(s for n, s in shares(row, seed).items() if n[0] == "D") for seed in (3, 4, 5)]
        assert numbers["mean"] == pytest.approx(statistics.mean(seeds))
        assert numbers["std"] == pytest.approx(statistics.stdev(seeds))
        assert (numbers["seeds"], numbers["environments"]) == (3, 5 if "search" in row or "samples=" in row else 25)
