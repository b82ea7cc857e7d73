"""What is said of the committed records is what they hold: summary, README's table, differences in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.environments import VARIANTS
from tunable_magmax.experiments.reproduce import missing_jobs
from tunable_magmax.experiments.results import Score, load_results, paired, write_summary
from tunable_magmax.experiments.tables import Cell, overall_tables, setting_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DOCS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def lines(text: str, head: str) -> list[list[str]]:
    """The cells of all tables whose heading begins so."""
    found = re.findall(rf"^\| {re.escape(head)} \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for body in found for line in body.splitlines()]


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, list[Score]]]:
    results = load_results(RESULTS)
    return {setting: results.main_rows(setting) for setting in results.settings}


def test_the_summary_is_what_the_command_makes_of_the_records(tmp_path: Path) -> None:
    again = write_summary(RESULTS, tmp_path / "summary.json")
    assert again.read_bytes() == (RESULTS / "summary.json").read_bytes()


def test_every_difference_in_the_docs_is_that_of_the_records(measured: dict[str, dict[str, list[Score]]]) -> None:
    told = lines(DOCS, "difference")
    assert len(told) > 12
    for name, *cells in told:
        first, second = re.findall("`(.*?)`", name)
        for rows, cell in zip(measured.values(), cells, strict=True):
            found = paired(rows.get(first, ()), rows.get(second, ()))
            if found is None:
                assert cell == "–", name
                continue
            ends = (100 * found.low, 100 * found.high)
            seeds = "" if found.seeds == 3 else f" ({found.seeds} seed{'s' * (found.seeds > 1)})"
            assert cell == Cell(100 * found.mean, interval=ends, signed=True).shown + seeds, name


def test_the_docs_columns_are_the_settings(measured: dict[str, dict[str, list[Score]]]) -> None:
    heads = re.findall(r"^\| difference \| (.*) \|$", DOCS, re.MULTILINE)
    assert set(heads) == {" | ".join(setting.split("/")[1] for setting in measured)}


def test_the_docs_examples_print_what_they_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for code in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(code, {})
        assert capsys.readouterr().out == code.rstrip().rpartition("# ")[2] + "\n"


def test_the_committed_reports_hold_the_tables_that_the_records_give() -> None:
    results = load_results(RESULTS)
    tables = {RESULTS / setting: setting_tables(results, setting) for setting in results.settings}
    for folder, own in {**tables, RESULTS: overall_tables(results)}.items():
        text = (folder / "report.md").read_text(encoding="utf-8")
        assert own
        assert all(table.markdown() in text for table in own)


def test_records_are_not_taken_for_those_of_other_settings() -> None:
    config, place = "minilm/clinc150-15", RESULTS / "minilm" / "clinc150-15"
    rows = "rows=[magmax@best, 'tunable:label@0.5']"
    there = ["run.model=elsewhere", "run.benchmark.data=elsewhere", rows, "environments.levels=[]"]
    assert missing_jobs(read_experiment(config, there), place) == []
    levels = missing_jobs(read_experiment(config, [*there, "environments.levels=[5]"]), place)
    assert {(job.kind, job.name) for job in levels} == {("environment", f"M5/{draw}") for draw in VARIANTS[:3]}
    with pytest.raises(InputError, match=r"train\.lr is 1\.0, there 0\.0001"):
        missing_jobs(read_experiment(config, ["run.train.lr=1"]), place)
    assert missing_jobs(read_experiment(config, ["run.train.lr=1", "seeds=[6]"]), place)
