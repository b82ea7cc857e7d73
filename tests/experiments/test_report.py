"""Tables hold the numbers of the records, recomputed here in another way; reports are whole and made the same again."""

import itertools
import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.invented import row_record

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.records import AlphaRecord, EnvironmentScore, RowRecord
from tunable_magmax.experiments.report import write_overview, write_setting
from tunable_magmax.experiments.results import Results, load_results, paired, write_summary
from tunable_magmax.experiments.tables import BASE, accuracy_table, differences_table, expected_table, overall_tables
from tunable_magmax.plots.figure import blank_figure, save_figure

SETTING = "minilm/clinc150-15"
RESULTS = load_results(Path(__file__).parents[2] / "results" / SETTING)
SEEDS = sorted({record.seed for record in RESULTS.of(RowRecord, SETTING)})


def shares(row: str, seed: int) -> dict[str, float]:
    """The accuracy of a row with a seed in each environment."""
    [record] = [each for each in RESULTS.of(RowRecord, SETTING) if (each.row, each.seed) == (row, seed)]
    return {found.name: found.right / found.samples for found in record.environments}


def means(row: str, mixtures: str) -> list[float]:
    """The mean accuracy over the environments of some mixtures, for each seed."""
    found = [shares(row, seed) for seed in SEEDS]
    return [statistics.mean(share for name, share in one.items() if name.startswith(mixtures)) for one in found]


@pytest.mark.parametrize("row", ["tailor:auto", BASE, "magmax@best"])
def test_means_over_draws_and_deviations_over_seeds(row: str) -> None:
    table = accuracy_table(RESULTS, SETTING)
    cells = dict(zip(table.columns[1:], table.lines[f"`{row}`"], strict=True))
    for column, mixtures in {"D1": "D1/", "M5": "M5/", "Average": "D"}.items():
        assert cells[column].value == pytest.approx(100 * statistics.mean(means(row, mixtures)))
        assert cells[column].deviation == pytest.approx(100 * statistics.stdev(means(row, mixtures)))


def test_the_summary_has_the_means_over_seeds(tmp_path: Path) -> None:
    summary = json.loads(write_summary(RESULTS, tmp_path).read_text())
    assert (summary.pop("chosen"), summary.pop("recommended"), *summary) == ("matched", "tailor:auto", SETTING)
    for row in ("tailor:auto", BASE):
        numbers = summary[SETTING][row]
        assert numbers["mean"] == pytest.approx(statistics.mean(means(row, "D")))
        assert numbers["std"] == pytest.approx(statistics.stdev(means(row, "D")))
        draws = [name for name in shares(row, SEEDS[0]) if name[0] == "D"]
        assert (numbers["seeds"], numbers["environments"]) == (len(SEEDS), len(draws))


def test_differences_are_of_pairs() -> None:
    [cell] = differences_table(RESULTS).lines[f"`tailor:auto` minus `{BASE}`"]
    ours, theirs = ([shares(row, seed) for seed in SEEDS] for row in ("tailor:auto", BASE))
    pairs = [a[name] - b[name] for a, b in zip(ours, theirs, strict=True) for name in a if name[0] == "D"]
    assert cell.value == pytest.approx(100 * statistics.mean(pairs))
    assert cell.interval is not None
    assert cell.interval[0] < cell.value < cell.interval[1]


def test_an_interval_is_that_of_all_resamples() -> None:
    """Two seeds and three environments: all 4 x 27 resamples can be listed."""
    pairs = {(3, "a"): 4, (3, "b"): -1, (3, "c"): 9, (4, "a"): 2, (4, "b"): 6, (4, "c"): -3}

    def scores(row: str, sign: int) -> list[RowRecord]:
        def one(seed: int) -> tuple[EnvironmentScore, ...]:
            right = {name: 500 + sign * pairs[seed, name] for name in "abc"}
            return tuple(EnvironmentScore(name=n, mixture="D1", right=r, samples=1000) for n, r in right.items())

        return [RowRecord(setting=SETTING, seed=seed, row=row, environments=one(seed)) for seed in (3, 4)]

    rows = Results((*scores("x", 1), *scores("magmax@best", 0))).main_rows(SETTING)
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
    leads = []
    for variants in ([42, 123], [42]):
        records = [row_record(row, 3, variants, right) for row, right in ((BASE, 200), ("tailor:auto", 300))]
        records += [row_record(row, 4, [42], right) for row, right in ((BASE, 220), ("tailor:auto", 310))]
        rows = Results(tuple(records)).main_rows(records[0].setting)
        leads.append(paired(rows["tailor:auto"], rows[BASE]))
    assert leads[0] == leads[1] is not None


def test_what_was_told_beforehand_stands_beside_what_came_out() -> None:
    table = expected_table(RESULTS).lines
    scores = RESULTS.rows(SETTING)["tailor:auto"]
    told = [(each.found.accuracy, *each.found.expected["tailored"]) for each in scores]
    assert [cell.value for cell in table[f"{SETTING}: accuracy, tailored"]] == pytest.approx(
        [
            100 * statistics.mean(real for real, *_ in told),
            100 * statistics.mean(expected for _, expected, _, _ in told),
            100 * statistics.mean(abs(real - expected) for real, expected, _, _ in told),
            100 * statistics.mean(low <= real <= high for real, _, low, high in told),
            len(told),
        ]
    )
    errors = [cell.value for cell in table[f"{SETTING}: error of the weights"][:2]]
    assert errors[0] == pytest.approx(100 * statistics.mean(each.found.error for each in scores))
    assert errors[1] == pytest.approx(100 * statistics.mean(each.found.expected_error for each in scores))


def test_reports_are_whole_and_equal_records_give_equal_files(tmp_path: Path) -> None:
    swept = [replace(row_record(f"tailor:auto,samples={size}", 3), setting=SETTING) for size in (5, 10, 20)]
    results = Results((*RESULTS.records, *swept))
    first, again = (
        [*write_setting(results, SETTING, place, "About it."), *write_overview(results, place / "all")]
        for place in (tmp_path / "one", tmp_path / "two")
    )
    for left, right in zip(first, again, strict=True):
        assert left.read_bytes() == right.read_bytes()
    text = (tmp_path / "one" / "report.md").read_text()
    assert text.startswith(f"# {SETTING}\n\nAbout it.")
    pictures = re.findall(r"!\[(.+?)\]\((.+?)\)", text)
    assert len(pictures) == 3
    for alt, file in pictures:
        assert len(alt) > 40
        assert ElementTree.parse(tmp_path / "one" / file).getroot().tag.endswith("svg")


@pytest.mark.parametrize("kept", ["nothing", "an alpha", "a row"])
def test_little_is_no_trouble(kept: str, tmp_path: Path) -> None:
    [alpha, *_] = RESULTS.of(AlphaRecord, SETTING)
    records = {"nothing": (), "an alpha": (alpha,), "a row": (replace(row_record("average@1", 3), setting=SETTING),)}
    results = Results(records[kept])
    for setting in results.settings:
        assert write_setting(results, setting, tmp_path)
    assert all(table.lines for table in overall_tables(results))


def test_pictures_that_cannot_be_written_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file/p.png", "p.xyz"):
        with pytest.raises(InputError, match=place):
            save_figure(blank_figure(2, 1), tmp_path / place)
