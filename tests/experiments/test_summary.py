"""The summary's numbers are those of the records, recomputed here by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from experiments.invented import row_record, whole_experiment, write_records

from tunable_magmax.experiments.results import write_summary


def test_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    records = whole_experiment(["mini-clip/cifar100-20", "minilm/clinc150-15"])
    write_records(tmp_path / "one" / "records.jsonl", records)
    path = write_summary(tmp_path)
    assert path == tmp_path / "summary.json"
    summary = json.loads(path.read_text())
    assert summary.pop("chosen") == "matched"
    assert summary.pop("recommended") == "tailor:auto"
    assert set(summary) == {"mini-clip/cifar100-20", "minilm/clinc150-15"}
    for setting, rows in summary.items():
        for row, numbers in rows.items():
            seeds = []
            for record in records:
                if (record["setting"], record.get("row"), record["kind"]) == (setting, row, "row"):
                    shares = [found["right"] / found["samples"] for found in record["environments"]]
                    seeds.append(sum(shares) / len(shares))
            assert abs(numbers["mean"] - statistics.mean(seeds)) < 1e-12
            assert abs(numbers["std"] - statistics.stdev(seeds)) < 1e-12
            assert numbers["seeds"] == 3
            assert numbers["environments"] == (5 if "search" in row else 25)


def test_a_sweep_over_m_does_not_change_a_settings_numbers(tmp_path: Path) -> None:
    write_records(tmp_path / "a" / "records.jsonl", [row_record("magmax@best", 3)])
    before = json.loads(write_summary(tmp_path).read_text())
    sweep = row_record("magmax@best", 3, mixtures=["M1", "M5"], above={"magmax@best": -0.5})
    alone = row_record("magmax@best", 3, setting="other/data-5", mixtures=["M1", "M5"])
    write_records(tmp_path / "b" / "records.jsonl", [sweep, alone])
    after = json.loads(write_summary(tmp_path, tmp_path / "out.json").read_text())
    assert after["mini-clip/cifar100-20"] == before["mini-clip/cifar100-20"]
    assert before["mini-clip/cifar100-20"]["magmax@best"]["std"] is None
    assert after["other/data-5"]["magmax@best"]["environments"] == 10
