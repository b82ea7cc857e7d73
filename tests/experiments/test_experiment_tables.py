"""Tables hold the numbers of the records, recomputed here in another way."""

from __future__ import annotations

import csv
import io
import itertools
import statistics

import numpy as np
import pytest
from experiments.invented import (
    ABOVE_MAGMAX,
    meta_record,
    row_record,
    scale_record,
    sequence_record,
    whole_experiment,
)

from tunable_magmax.experiments.report import html, markdown
from tunable_magmax.experiments.results import paired, results_of
from tunable_magmax.experiments.table import Cell, Table, csv_text, latex
from tunable_magmax.experiments.tables import (
    accuracy_table,
    all_tables,
    differences_table,
    estimation_table,
    known_table,
    leads_table,
    meta_table,
    ownership_table,
    scale_table,
    tailor_table,
    time_table,
    wrong_table,
)

SETTING = "mini-clip/cifar100-20"
RECORDS = whole_experiment()
RESULTS = results_of(RECORDS)


def shares(row: str, seed: int) -> dict[str, float]:
    (record,) = (each for each in RECORDS if (each["kind"], each.get("row"), each["seed"]) == ("row", row, seed))
    return {found["name"]: found["right"] / found["samples"] for found in record["environments"]}


def lines(table: Table) -> dict[str, tuple[Cell, ...]]:
    return {row[0].text.strip("`"): row for row in table.rows}


def test_means_over_variants_and_deviations_over_seeds() -> None:
    table = accuracy_table(RESULTS, SETTING, "D")
    assert table.columns == ("method", "D1", "D2", "D3", "D4", "D5", "Average")
    assert table.under[1:4] == ("(0.5, 0.5)", "(0.8, 0.2)", "(1/3, 1/3, 1/3)")
    for row in ABOVE_MAGMAX:
        by_seed = [shares(row, seed) for seed in (3, 4, 5)]
        for column, mixture in enumerate(("D1/", "D2/", "D3/", "D4/", "D5/", ""), 1):
            means = [statistics.mean(s for name, s in found.items() if name.startswith(mixture)) for found in by_seed]
            cell = lines(table)[row][column]
            assert cell.value == pytest.approx(100 * statistics.mean(means))
            assert cell.deviation == pytest.approx(100 * statistics.stdev(means))


def test_the_best_of_each_column_is_marked_among_rows_measured_everywhere() -> None:
    lucky = {**ABOVE_MAGMAX, "tunable:search@matched": 0.2}
    records = [row_record(row, 3, above=lucky) for row in ("magmax@best", "tunable:label@matched")]
    records.append(row_record("tunable:search@matched", 3, variants=[42], above=lucky))
    table = accuracy_table(results_of(records), SETTING, "D")
    found = lines(table)
    assert all(cell.best for cell in found["tunable:label@matched"][1:])
    assert not any(cell.best for cell in found["magmax@best"][1:])
    assert not any(cell.best for cell in found["tunable:search@matched"][1:])
    assert found["tunable:search@matched"][0].suffix == "†"
    assert "† measured in fewer environments" in table.notes[1]
    assert found["magmax@best"][1].deviation is None


def test_rows_that_read_the_same_are_both_best() -> None:
    records = [row_record("magmax@best", 3), row_record("average@best", 3)]
    for ours, theirs in zip(records[0]["environments"], records[1]["environments"], strict=True):
        theirs["right"] = ours["right"]
    assert all(cell.best for line in accuracy_table(results_of(records), SETTING, "D").rows for cell in line[1:])


def test_differences_are_of_pairs() -> None:
    found = lines(differences_table(RESULTS, SETTING, "D"))
    for row in ("tunable:label@matched", "tunable:mmd@matched", "tunable:search@matched", "zero-shot"):
        differences = [
            share - shares("magmax@best", seed)[name] for seed in (3, 4, 5) for name, share in shares_of(row, seed)
        ]
        cell = found[row][1]
        assert cell.value == pytest.approx(100 * statistics.mean(differences))
        assert cell.interval is not None
        assert cell.interval[0] < cell.value < cell.interval[1]
        assert found[row][2].shown == f"{sum(d > 0 for d in differences)}/{len(differences)}"
    assert found["tunable:label@matched"][-1].text == "ahead"
    assert found["tunable:mmd@matched"][-1].text == "behind"
    assert found["magmax@best"][1].text == "–"


def shares_of(row: str, seed: int) -> list[tuple[str, float]]:
    return list(shares(row, seed).items())


def test_an_interval_is_that_of_all_resamples() -> None:
    """Two seeds and three environments: all 4 x 27 resamples can be listed."""
    pairs = {(3, "a"): 4, (3, "b"): -1, (3, "c"): 9, (4, "a"): 2, (4, "b"): 6, (4, "c"): -3}

    def records(row: str, sign: int) -> list[dict[str, object]]:
        return [
            {"kind": "row", "setting": SETTING, "seed": seed, "row": row}
            | {
                "environments": [
                    {"name": n, "mixture": "D1", "right": 500 + sign * pairs[seed, n], "samples": 1000} for n in "abc"
                ]
            }
            for seed in (3, 4)
        ]

    results = results_of([*records("x", 1), *records("magmax@best", 0)])
    difference = paired(
        [found for found in results.measured if found.row == "x"],
        [found for found in results.measured if found.row == "magmax@best"],
    )
    listed = [
        np.mean([pairs[seed, name] for seed in seeds for name in names]) / 1000
        for seeds in itertools.product((3, 4), repeat=2)
        for names in itertools.product("abc", repeat=3)
    ]
    assert difference is not None
    assert difference.mean == pytest.approx(sum(pairs.values()) / 6000)
    low, high = np.quantile(listed, [0.025, 0.975])
    assert difference.low == pytest.approx(low, abs=5e-4)
    assert difference.high == pytest.approx(high, abs=5e-4)
    assert (difference.ahead, difference.pairs) == (4, 6)


def test_leads_say_how_much_of_the_lead_inputs_keep() -> None:
    (line,) = lines(leads_table(RESULTS)).values()
    label, auto = line[2].value, line[3].value
    assert label is not None
    assert auto is not None
    assert line[5].value == pytest.approx(100 * auto / label)


def test_errors_and_leftovers_with_the_papers_ten_percent() -> None:
    found = lines(estimation_table(RESULTS, SETTING, "D"))
    assert set(found) == {"mmd", "ot", "auto", "label", "label,compare=active", "search"}
    records = [each for each in RECORDS if each.get("row") == "tunable:ot@matched" and each["kind"] == "row"]
    cells = [each for record in records for each in record["environments"]]
    assert found["ot"][1].value == pytest.approx(100 * statistics.mean(each["error"] for each in cells))
    assert found["ot"][4].value == pytest.approx(100 * max(each["leftovers"] for each in cells))
    assert found["ot"][5].text == "no"
    assert found["auto"][6].text == "probe 75"
    few = row_record("tunable:ot@matched", 3)
    for each in few["environments"]:
        each["leftovers"] = 0.1
    table = estimation_table(results_of([few]), SETTING, "D")
    assert lines(table)["ot"][5].text == "yes"
    assert "what auto chose" not in table.columns


def test_known_time_scale_ownership_and_meta() -> None:
    known = lines(known_table(RESULTS, SETTING, "D"))["magmax@best"]
    assert known[3].value == pytest.approx(10)
    time = lines(time_table(RESULTS, SETTING))
    assert [cell.value for cell in time["magmax@best"][1:]] == pytest.approx([0.03, 0, 0.05, 1, 1.08, 100 / 21.6])
    assert time["tunable:label@0.5"][2].value == pytest.approx(0.1)
    for _, *parts, together, _ in time.values():  # no work is left out
        assert sum(cell.value or 0.0 for cell in parts) == pytest.approx(together.value)
    records = [scale_record(3), scale_record(4, best=1.0)]
    scale = scale_table(results_of(records))
    (line,) = scale.rows
    assert line[-1].text == "0.75, 1"
    assert line[2 + 2].value == pytest.approx(100 * (0.723 + 0.71) / 2)
    assert [cell.best for cell in line[2:-1]] == [False, False, True, False]
    ownership = lines(ownership_table(results_of([sequence_record(3), sequence_record(4)])))[SETTING]
    assert [cell.value for cell in ownership[1:4]] == pytest.approx([50, 3.2, 5])
    assert ownership[4].text == "yes"
    meta = meta_table(results_of([meta_record(3, "tunable:ot@matched")]), SETTING)
    assert meta.columns == ("method", "5", "10", "20", "50")
    assert meta.under[-1] == "10 environments"
    assert "different environments" in meta.notes[1]
    assert "one seed, so no deviation is given" in meta.notes[0]
    several = meta_table(results_of([meta_record(seed, "tunable:ot@matched") for seed in (3, 4)]), SETTING)
    assert "±deviation over seeds" in several.notes[0]


def test_without_records_no_table() -> None:
    assert all_tables(results_of([])) == []
    assert differences_table(results_of([row_record("average@best", 3)]), SETTING, "D").rows == ()


AWKWARD = Table(
    "awkward",
    "100 % of $x_1$ & <b>",
    ("`method`", "a_b"),
    (
        (Cell(text="`random_mix@0.5`", suffix="†"), Cell(1.25, 0.5, best=True)),
        (Cell(text='say "hi", a|b {x} ^~\\'), Cell(-0.04, interval=(-2.0, 1.0), signed=True)),
        (Cell(text="nothing"), Cell()),
    ),
    ("† 5 % < 6 %",),
    breaks=(0, 1),
)


def test_csv_gives_back_every_number_of_every_table() -> None:
    for table in [AWKWARD, *all_tables(RESULTS)]:
        read = list(csv.reader(io.StringIO(csv_text(table))))
        assert len(read) == 1 + len(table.rows)
        assert len({len(line) for line in read}) == 1
        assert len(set(read[0])) == len(read[0])
        for line, row in zip(read[1:], table.rows, strict=True):
            given = dict(zip(read[0], line, strict=True))
            for name, cell in zip(table.columns, row, strict=True):
                name = name.replace("`", "")
                if cell.value is None:
                    assert given[name] == cell.text.replace("`", "")
                    continue
                assert float(given[name]) == cell.value
                if cell.deviation is not None:
                    assert float(given[f"{name} deviation"]) == cell.deviation
                if cell.interval is not None:
                    assert (float(given[f"{name} low"]), float(given[f"{name} high"])) == cell.interval


def test_latex_is_escaped_and_ruled() -> None:
    text = latex(AWKWARD)
    assert r"\caption{100 \% of \$x\_1\$ \& \textless{}b\textgreater{}}" in text
    assert r"\texttt{random\_mix@0.5}$\dagger$ & \textbf{1.2} {\scriptsize $\pm$0.5} \\" in text
    assert (
        r"a|b \{x\} \textasciicircum{}\textasciitilde{}\textbackslash{} & 0.0 {\scriptsize [$-$2.0, +1.0]} \\" in text
    )
    assert text.count(r"\midrule") == 2
    for table in all_tables(RESULTS):
        body = latex(table).split(r"\toprule")[1].split(r"\bottomrule")[0]
        ends = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {line.replace(r"\&", "").count("&") for line in ends} == {len(table.columns) - 1}
        assert latex(table).isascii()


def test_markdown_and_html_are_escaped() -> None:
    assert r"a\|b" in markdown(AWKWARD)
    assert "| `random_mix@0.5`† | **1.2** ±0.5 |" in markdown(AWKWARD)
    text = html(AWKWARD)
    assert "&lt;b&gt;" in text
    assert "<code>random_mix<wbr>@0.5</code>†" in text
    assert 'data-value="1.25"' in text
    assert "<b>" not in text


def test_rows_of_a_table_are_equally_wide() -> None:
    with pytest.raises(ValueError, match="unequal width"):
        Table("t", "t", ("a", "b"), ((Cell(),),))


def test_the_tailored_model_is_compared_over_the_seeds_that_both_rows_have() -> None:
    above = {"tailor:auto+prior": 0.2, "magmax@best": 0.0, "magmax@best+prior:auto": 0.15}
    records = [row_record(row, seed, above=above) for row in above for seed in (3, 4, 5)]
    records = [each for each in records if (each["row"], each["seed"]) != ("magmax@best+prior:auto", 4)]
    (line,) = tailor_table(results_of(records)).rows
    _, own, plain, with_prior, *others = line
    assert own.value == pytest.approx(90, abs=2)
    assert plain.value == pytest.approx(20, abs=1)
    assert with_prior.value == pytest.approx(5, abs=1)
    assert (plain.suffix, with_prior.suffix) == (" (3 seeds)", " (2 seeds)")
    assert [cell.value for cell in others] == [None] * 3  # rivals that were not measured


def test_what_a_wrong_preference_costs() -> None:
    above = {"magmax@best": 0.0, "magmax@best+prior:wrong": -0.1, "magmax@best+prior:wrong@0.02": -0.3}
    (line,) = wrong_table(results_of([row_record(row, seed, above=above) for row in above for seed in (3, 4)])).rows
    assert [cell.value for cell in line[1:3]] == pytest.approx([-10, -30], abs=1)
    assert all(cell.value is None for cell in line[3:])
    assert wrong_table(results_of([row_record("magmax@best", 3)])).rows == ()
