"""What is said of the committed records is what they hold: summary, reports, README's table, the docs' tables."""

import re
from pathlib import Path
from statistics import mean

import pytest

from tunable_magmax.errors import InputError
from tunable_magmax.experiments import paper
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.records import AlphaRecord, SequenceRecord, read_records
from tunable_magmax.experiments.reproduce import missing_jobs
from tunable_magmax.experiments.results import Difference, Results, Score, load_results, paired, write_summary
from tunable_magmax.experiments.tables import Cell, accuracy_table, overall_tables

ROOT = Path(__file__).parents[2]
RESULTS, DEVELOPMENT = ROOT / "results", ROOT / "results-development"
DOCS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    "tailored": "tailor:auto",
    "tailored, from labels": "tailor:label",
    "tailored, from labelled inputs": "tailor:both",
    "base, fitted": "zero-shot+fit+prior:auto",
    "last checkpoint, fitted": "sequential@1+fit+prior:auto",
    "weighted average, fitted": "average:auto@1+fit+prior",
    "TIES, fitted": ("ties@best+fit+prior:auto", "ties@1+fit+prior:auto"),
    "`tsv`, fitted": "tsv:auto@1+fit+prior",
    "Tunable MAGMAX, fitted": "tunable:auto@1+fit+prior",
    "MAGMAX, fitted": "magmax@best+fit+prior:auto",
    "Tunable MAGMAX, old head": "tunable:auto@1+prior",
    "MAGMAX, old head": "magmax@best+prior:auto",
    "MAGMAX, no prior": "magmax@best",
    "last checkpoint, no prior": "sequential@1",
    "logistic": "logistic:auto+prior",
    "joint, old head": "joint+prior:auto",
    "joint, fitted": "joint+fit+prior:auto",
}
"""What tables call a row; of two, that which a setting has."""


@pytest.fixture(scope="module")
def measured() -> Results:
    return load_results(RESULTS)


@pytest.fixture(scope="module")
def by_name(measured: Results) -> dict[str, dict[str, list[Score]]]:
    """All rows of each setting by the last part of its name; those of results-development by their folders."""
    found = {setting.split("/")[1]: measured.rows(setting) for setting in measured.settings}
    for file in DEVELOPMENT.rglob("records.jsonl"):
        results = load_results(file.parent)
        found[file.parent.name] = results.rows(results.settings[0])
    return found


def tables(text: str, head: str) -> list[tuple[list[str], list[list[str]]]]:
    """The headings and the lines of all tables whose first heading is so."""
    found = re.findall(rf"^\| ({re.escape(head)} \|.*) \|\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = lambda line: [cell.strip() for cell in line.strip("|\n ").split(" | ")]  # noqa: E731
    return [(cells(heads), [cells(line) for line in body.splitlines()]) for heads, body in found]


def scores(rows: dict[str, list[Score]], name: str, level: str = "D") -> list[Score]:
    """The scores of a row in the five ratios (D), or in a level such as M5, or in "all"."""
    names = ROWS[name.strip("*")]
    own = next((rows[row] for row in ([names] if isinstance(names, str) else names) if row in rows), [])
    return [each for each in own if level in ("all", each.found.mixture, each.found.mixture[0])]


def accuracy(found: list[Score]) -> str:
    return f"{mean(100 * each.found.accuracy for each in found):.1f}" if found else "–"


def shown(found: Difference | None) -> str:
    if found is None:
        return "–"
    return Cell(100 * found.mean, interval=(100 * found.low, 100 * found.high), signed=True).shown


def test_the_summary_is_what_the_command_makes_of_the_records(measured: Results, tmp_path: Path) -> None:
    again = write_summary(measured, tmp_path)
    assert again.read_bytes() == (RESULTS / "summary.json").read_bytes()


def test_accuracies_are_those_of_the_records(by_name: dict[str, dict[str, list[Score]]]) -> None:
    told = tables(DOCS, "row")
    assert len(told) >= 4
    for heads, lines in told:
        assert len(lines) >= 3
        for name, *cells in lines:
            for column, cell in zip(heads[1:], cells, strict=True):
                setting, level = column.rsplit(" ", 1)
                assert cell == accuracy(scores(by_name[setting], name, level)), (column, name)


def test_differences_are_those_of_the_records(by_name: dict[str, dict[str, list[Score]]]) -> None:
    told = tables(DOCS, "difference")
    assert sum(len(lines) for _, lines in told) > 15
    for heads, lines in told:
        for name, *cells in lines:
            first, second = re.findall("`(.*?)`", name)
            for setting, cell in zip(heads[1:], cells, strict=True):
                own = [
                    [each for each in by_name[setting].get(row, ()) if each.found.mixture.startswith("D")]
                    for row in (first, second)
                ]
                assert cell == shown(paired(*own)), (setting, name)


def test_expected_accuracies_are_those_of_the_records(by_name: dict[str, dict[str, list[Score]]]) -> None:
    [(_, lines)] = tables(DOCS, "expected at")
    assert {setting for setting, *_ in lines} == set(by_name)
    files = [file for folder in (RESULTS, DEVELOPMENT) for file in folder.rglob("records.jsonl")]
    sources = {file.parent.name: read_records(file)[0].kept["source"] for file in files}
    for setting, kept, *cells in lines:
        assert kept == {"training": "trained on", "evaluation": "held out"}[sources[setting]], setting
        found = by_name[setting]["tailor:auto"]
        told = [(each.found.expected["tailored"], each.found.accuracy) for each in found]
        off = [100 * (expected[0] - share) for expected, share in told]
        held = sum(low <= share <= high for (_, low, high), share in told)
        assert cells == [Cell(mean(off), signed=True).shown, f"{mean(map(abs, off)):.1f}", f"{held} of {len(off)}"], (
            setting
        )


def test_alpha_and_what_is_given_at_random_are_those_of_the_records(
    measured: Results, by_name: dict[str, dict[str, list[Score]]]
) -> None:
    [(heads, lines)] = tables(DOCS, "first / last task")
    for name, *cells in lines:
        for setting, cell in zip(heads[1:], cells, strict=True):
            alpha = None if name == "MAGMAX" else float(name.split()[1])
            points = [
                point
                for record in measured.of(AlphaRecord, next(s for s in measured.settings if s.endswith(f"/{setting}")))
                if record.scale == 0.5
                for point in record.points
                if (record.method, point.alpha) == ("magmax" if alpha is None else "tunable", alpha)
            ]
            first, last = (mean(100 * getattr(point, end) for point in points) for end in ("first", "last"))
            assert cell == f"{first:.0f} / {last:.0f}", (setting, name)
    [(heads, lines)] = tables(DOCS, "given at random")
    for name, *cells in lines:
        for setting, cell in zip(heads[1:], cells, strict=True):
            row = f"tunable:label@matched{',compare=active' if 'active' in name else ''}"
            shares = [100 * each.found.leftovers for each in by_name[setting][row] if each.found.mixture[0] == "D"]
            assert cell == f"{mean(shares):.0f} (up to {max(shares):.0f})", (setting, name)


def test_the_answers_are_those_of_the_records(by_name: dict[str, dict[str, list[Score]]]) -> None:
    """Every difference with an interval in the first table names the row pair and the setting that it is of."""
    [(_, lines)] = tables(DOCS, "question")
    cited = re.findall(r"([+−]?[\d.]+ \[[^]]+\])", "".join(answer for _, answer in lines))
    found = {
        shown(paired(*([each for each in rows.get(row, ()) if each.found.mixture.startswith("D")] for row in pair)))
        for rows in by_name.values()
        for pair in PAIRS
    }
    assert len(cited) >= 12
    assert [each for each in cited if each not in found] == []


def test_the_answers_without_an_interval_are_those_of_the_records(measured: Results) -> None:
    answers = dict(tables(DOCS, "question")[0][1])
    sizes, held, count = [], 0, 0
    for setting in measured.settings:
        told = [
            (each.found.expected["tailored"], each.found.accuracy) for each in measured.rows(setting)["tailor:auto"]
        ]
        sizes.append(mean(abs(100 * (expected[0] - share)) for expected, share in told))
        held += sum(low <= share <= high for (_, low, high), share in told)
        count += len(told)
    expected = answers["Is the expected accuracy true?"]
    assert expected.startswith(f"Off by {min(sizes):.1f} to {max(sizes):.1f} points")
    assert f"in {held} of {count} environments" in expected


PAIRS = [
    ("magmax@best+prior:auto", "magmax@best"),
    ("magmax@best+fit+prior:auto", "magmax@best+prior:auto"),
    *(
        ("tailor:auto", rival)
        for rival in (
            *("zero-shot+fit+prior:auto", "magmax@best+fit+prior:auto", "sequential@1+fit+prior:auto"),
            *("joint+fit+prior:auto", "logistic:auto+prior", "magmax@best"),
        )
    ),
    ("tailor:wrong", "tailor:auto"),
    ("tailor:both", "tailor:auto"),
    *((f"tailor:auto,{less}", "tailor:auto") for less in ("kept=0", "kept=1", "kept=5", "samples=5")),
]
"""What the answers compare."""


def test_a_cpu_gives_what_the_gpu_gave(by_name: dict[str, dict[str, list[Score]]]) -> None:
    for row, here in by_name["clinc150-10-cpu"].items():
        there = {each.found.name: each for each in by_name["clinc150-10"][row] if each.seed == 3}
        ratios = [each for each in here if each.found.mixture.startswith("D")]
        gaps = [each.found.accuracy - there[each.found.name].found.accuracy for each in ratios]
        assert len(gaps) == 5
        assert abs(mean(gaps)) <= 0.01, row
    assert f"tailored {accuracy(scores(by_name['clinc150-10-cpu'], 'tailored'))}." in DOCS


def test_the_paper_beside_ours(measured: Results) -> None:
    """Leads over MAGMAX at the paper's scale, printed, made again by the authors, and on the stand-ins."""
    [(_, lines)] = tables(DOCS, "lead over MAGMAX")
    for name, printed, again, *ours in lines:
        row = re.search("`(.*?)`", name)[1]
        for cell, source in ((printed, paper.PRINTED), (again, paper.AGAIN)):
            leads = [source[f"cifar100-{tasks}"][row] - source[f"cifar100-{tasks}"]["magmax@0.5"] for tasks in (5, 20)]
            assert cell == ", ".join(Cell(lead, signed=True).shown for lead in leads)
        for setting, cell in zip(("cifar100-5", "cifar100-20"), ours, strict=True):
            rows = measured.main_rows(f"mini-clip/{setting}")
            assert cell == shown(paired(rows[row], rows["magmax@0.5"]))


def test_training_took_as_long_as_is_said(measured: Results) -> None:
    for model in ("mini-clip", "minilm", "bert", "deit-tiny"):
        seconds = [
            record.seconds
            for setting in measured.settings
            if setting.startswith(f"{model}/")
            for record in measured.of(SequenceRecord, setting)
        ]
        assert f"{min(seconds):.0f} to {max(seconds):.0f} s ({model})" in DOCS


def test_the_docs_examples_print_what_they_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for code in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        exec(code, {})
        assert capsys.readouterr().out == code.rstrip().rpartition("# ")[2] + "\n"


def test_readmes_table_is_that_of_the_records(by_name: dict[str, dict[str, list[Score]]]) -> None:
    [(heads, lines)] = tables(README, "setting")
    assert len(lines) == len(load_results(RESULTS).settings)
    for setting, *cells in lines:
        for name, cell in zip(heads[1:], cells, strict=True):
            assert cell.strip("*") == accuracy(scores(by_name[setting.split("/")[1]], name)), (setting, name)


def test_the_committed_reports_hold_the_tables_that_the_records_give(measured: Results) -> None:
    of_settings = {RESULTS / setting: [accuracy_table(measured, setting)] for setting in measured.settings}
    for folder, own in {**of_settings, RESULTS: overall_tables(measured)}.items():
        text = (folder / "report.md").read_text(encoding="utf-8")
        assert own
        assert all(table.markdown() in text for table in own)


def test_records_are_not_taken_for_those_of_other_settings() -> None:
    config, place = "minilm/clinc150-15", RESULTS / "minilm" / "clinc150-15"
    rows = "rows=[magmax@best, 'tunable:label@0.5']"
    there = ["run.model=elsewhere", "run.benchmark.data=elsewhere", "environments.variants=[42]", rows]
    assert missing_jobs(read_experiment(config, [*there, "environments.levels=[5]"]), place) == []
    levels = missing_jobs(read_experiment(config, [*there, "environments.levels=[4]"]), place)
    assert {(job.kind, job.name) for job in levels} == {("environment", "M4/42")}
    with pytest.raises(InputError, match=r"train\.lr is 1\.0, there 0\.0001"):
        missing_jobs(read_experiment(config, ["run.train.lr=1"]), place)
    assert missing_jobs(read_experiment(config, ["run.train.lr=1", "seeds=[6]"]), place)
