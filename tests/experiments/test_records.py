"""Records: written in one piece, read back as they were, and a killed run's last line does no harm."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.invented import alpha_records, row_record, scale_record, sequence_record, whole_experiment

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.experiments.records import Record, append_records, find_records, read_records
from tunable_magmax.experiments.results import load_results


def write(path: Path, records: list[Record]) -> Path:
    append_records(path, records)
    return path


def test_every_kind_is_read_back_as_it_was(tmp_path: Path) -> None:
    records = whole_experiment()
    assert read_records(write(tmp_path / "new" / "records.jsonl", records)) == records
    assert len({record.key for record in records}) == len(records)


def test_of_one_key_the_last_counts_and_environments_are_put_together(tmp_path: Path) -> None:
    first, other = row_record("magmax@best", 3, variants=[42]), scale_record(3)
    more, again = row_record("magmax@best", 3, variants=[123]), scale_record(3, best=1.0)
    both = replace(first, environments=first.environments + more.environments)
    assert read_records(write(tmp_path / "records.jsonl", [first, other, more, again])) == [both, again]


def test_killed_anywhere_in_a_line_and_started_again_the_records_are_the_same(tmp_path: Path) -> None:
    first, second = alpha_records(3)
    whole = write(tmp_path / "whole.jsonl", [first, second]).read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole)):
        file = tmp_path / "records.jsonl"
        file.write_bytes(whole[:cut])
        assert read_records(file) == ([first, second] if cut == len(whole) - 1 else [first])
        append_records(file, [second])
        assert read_records(file) == [first, second]


def test_all_bad_lines_are_named_with_their_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "records.jsonl", [row_record("magmax@best", 3)])
    too_many = json.loads(file.read_text())
    too_many["environments"][1]["right"] = 401
    lines = ["{oops", file.read_text().strip(), '{"kind": "rows"}', json.dumps(too_many)]
    file.write_text("\n".join([*lines, ""]))
    with pytest.raises(InputError) as refused:
        read_records(file)
    assert [f"line {number}:" in str(refused.value) for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert "401" in str(refused.value)


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    file = write(tmp_path / "records.jsonl", [replace(sequence_record(3), seconds=math.nan)])
    assert json.loads(file.read_text())["seconds"] is None
    assert read_records(file)[0].seconds is None


def test_places_that_do_not_work_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_records(tmp_path / "records.jsonl")
    with pytest.raises(InputError):
        load_results(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        append_records(tmp_path / "file" / "records.jsonl", [sequence_record(3)])


def test_other_environments_of_a_row_are_put_together_and_doubles_come_from_the_later_place(tmp_path: Path) -> None:
    here = row_record("magmax@best", 3)
    there = row_record("magmax@best", 3, mixtures=["M1", "M2"], variants=[42])
    again = row_record("magmax@best", 3, above={"magmax@best": 0.2})
    for name, record in (("a", here), ("b", there), ("c", again)):
        write(tmp_path / name / "records.jsonl", [record])
    results = load_results(tmp_path)
    assert len(results.scores) == 27
    shares = {score.environment: score.accuracy for score in results.scores}
    assert shares["D1/42"] == again.environments[0].right / 400
    assert len(results.main_rows("mini-clip/cifar100-20")["magmax@best"]) == 25


def test_what_training_tells_is_no_record_of_an_experiment(tmp_path: Path) -> None:
    file = write(tmp_path / "records.jsonl", [sequence_record(3)])
    (tmp_path / "work" / "seed-3").mkdir(parents=True)
    (tmp_path / "work" / "seed-3" / "records.jsonl").write_text("{}\n")
    (tmp_path / "work" / "seed-3" / "run.json").write_text("{}")
    assert find_records(tmp_path) == [file]
