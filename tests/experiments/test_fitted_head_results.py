"""The numbers in docs/results.md are those of the records in results-development/."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = {path.parent.name: path for path in (ROOT / "results-development").rglob("records.jsonl")}
ROWS = {
    "**tailored**": "tailor:auto",
    "base, fitted": "zero-shot+fit+prior:auto",
    "last checkpoint, fitted": "sequential@1+fit+prior:auto",
    "weighted average, fitted": "average:auto@1+fit+prior",
    "`tsv`, fitted": "tsv:auto@1+fit+prior",
    "Tunable MAGMAX, fitted": "tunable:auto@1+fit+prior",
    "MAGMAX, fitted": "magmax@1+fit+prior:auto",
    "`tsv`, old head": "tsv:auto@1+prior",
    "Tunable MAGMAX, old head": "tunable:auto@1+prior",
    "MAGMAX, old head, no prior": "magmax@1",
    "last checkpoint, its own head": "sequential@1+prior:auto",
    "logistic": "logistic:auto+prior",
    "joint training, old head": "joint+prior:auto",
    "joint training, fitted": "joint+fit+prior:auto",
}


def environments(setting: str, row: str) -> dict[str, list[dict]]:
    """The measured environments of a row by level: D for the five ratios, else M5, M10, ..."""
    found = defaultdict(list)
    for line in RECORDS[setting].read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "row" and record["row"] == row:
            for each in record["environments"]:
                found["D" if each["mixture"].startswith("D") else each["mixture"]].append(each)
    return found


def tables() -> list[tuple[list[str], list[list[str]]]]:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = text.partition("## The fitted head")[2].partition("## The prior and the merge")[0]
    bodies = re.findall(r"^\| (.*) \|\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    split = [
        (head.split(" | "), [line.strip("|\n ").split(" | ") for line in body.splitlines()]) for head, body in bodies
    ]
    return [(head, [[cell.strip() for cell in row] for row in rows]) for head, rows in split]


@pytest.mark.parametrize("table", tables()[:-1], ids=lambda table: table[0][1])
def test_accuracies_are_those_of_the_records(table):
    head, rows = table
    assert rows
    for label, *cells in rows:
        for column, cell in zip(head[1:], cells, strict=True):
            setting, level = column.rsplit(" ", 1)
            found = environments(setting, ROWS[label])[level]
            assert cell == f"{mean(100 * each['right'] / each['samples'] for each in found):.1f}", (label, column)


def test_expected_accuracies_are_those_of_the_records():
    _, rows = tables()[-1]
    assert len(rows) == len(RECORDS)
    for setting, _, difference, size, inside in rows:
        found = [each for level in environments(setting, "tailor:auto").values() for each in level]
        shares = [each["right"] / each["samples"] for each in found]
        told = [each["expected"]["tailored"] for each in found]
        off = [100 * (one[0] - share) for one, share in zip(told, shares, strict=True)]
        held = sum(low <= share <= high for (_, low, high), share in zip(told, shares, strict=True))
        expected = [f"{mean(off):+.1f}", f"{mean(map(abs, off)):.1f}", f"{held} of {len(off)}"]
        assert [difference, size, inside] == expected, setting


def test_readmes_table_is_that_of_the_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [body] = re.findall(r"^\| setting \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    order = ["last checkpoint, its own head", "Tunable MAGMAX, old head", "base, fitted", "logistic", "**tailored**"]
    for line in body.splitlines():
        name, *cells = [cell.strip(" *") for cell in line.strip("|").split(" | ")]
        setting = name.split("/")[1]
        for row, cell in zip([*order, "joint training, fitted"], cells, strict=True):
            found = environments(setting, ROWS[row]).get("D", [])
            assert cell == (f"{mean(100 * e['right'] / e['samples'] for e in found):.1f}" if found else "–"), (
                name,
                row,
            )
