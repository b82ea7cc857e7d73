"""Records survive kills, later ones replace earlier ones, and what is no record is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from experiments.invented import (
    alpha_records,
    meta_record,
    row_record,
    scale_record,
    sequence_record,
    whole_experiment,
    write_records,
)

from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.experiments.records import append_record, read_records, record_key
from tunable_magmax.experiments.results import load_results


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    records = whole_experiment()
    file = tmp_path / "new" / "records.jsonl"
    for record in records:
        append_record(file, record)
    assert read_records(file) == records


def test_of_one_key_the_last_counts(tmp_path: Path) -> None:
    again = scale_record(3, best=0.5)
    file = write_records(tmp_path / "records.jsonl", [scale_record(3), scale_record(4), again])
    assert read_records(file) == [again, scale_record(4)]


def test_keys_tell_jobs_apart() -> None:
    records = whole_experiment(["a/b-5", "a/b-20"])
    assert len({record_key(record) for record in records}) == len(records)
    tunable, magmax = alpha_records(3)
    assert record_key(tunable) == ("mini-clip/cifar100-5", "alpha", 3, "tunable@0.5")
    assert record_key(magmax)[-1] == "magmax@0.5"
    assert record_key(sequence_record(3))[-1] == "sequence"
    assert record_key(meta_record(4, "tunable:ot@matched"))[1:] == ("meta-size", 4, "tunable:ot@matched")


def test_killed_anywhere_in_a_line_and_started_again_the_records_are_the_same(tmp_path: Path) -> None:
    first, second = scale_record(3), scale_record(4)
    whole = write_records(tmp_path / "whole.jsonl", [first, second]).read_bytes()
    start = len(json.dumps(first)) + 1
    for cut in range(start, len(whole)):
        file = tmp_path / "records.jsonl"
        file.write_bytes(whole[:cut])
        known = read_records(file)
        assert known == ([first, second] if cut == len(whole) - 1 else [first])
        append_record(file, second)
        assert read_records(file) == [first, second]


def test_a_long_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"kind": "row", "x": "' + b"y" * 300_000)
    append_record(file, scale_record(3))
    assert read_records(file) == [scale_record(3)]


def test_all_bad_lines_are_named_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    lacking = row_record("magmax@best", 3)
    del lacking["environments"][1]["samples"]
    too_many = row_record("magmax@0.5", 3)
    too_many["environments"][0]["right"] = 401
    lines = ["{oops", json.dumps(scale_record(3)), '{"kind": "rows"}', json.dumps(lacking), json.dumps(too_many), ""]
    file.write_text("\n".join(lines))
    with pytest.raises(InputError) as refused:
        read_records(file)
    message = str(refused.value)
    assert f"{file}:" in message
    assert "line 1 is no JSON object: {oops" in message
    assert "line 3: kind is 'rows'" in message
    assert "did you mean 'row'?" in message
    assert "line 4: row record, environments 2 lacks 'samples'" in message
    assert "line 5: row record, environments 1: 401 right of 400 samples" in message
    assert "line 2" not in message


def test_only_records_are_written_and_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    with pytest.raises(InputError, match="lacks 'magmax_counts'"):
        append_record(file, {"kind": "sequence", "setting": "a", "seed": 3, "tasks": 2, "elements": 4})
    assert not file.exists()
    append_record(file, sequence_record(3) | {"in_task": [0.5, math.nan]})
    assert read_records(file)[0]["in_task"] == [0.5, None]


def test_places_that_do_not_work_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_records(tmp_path / "records.jsonl")
    with pytest.raises(InputError, match=r"no records\.jsonl under"):
        load_results(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        append_record(tmp_path / "file" / "records.jsonl", scale_record(3))


def test_other_environments_of_a_row_are_put_together_and_doubles_come_from_the_later_place(tmp_path: Path) -> None:
    here = row_record("magmax@best", 3)
    there = row_record("magmax@best", 3, mixtures=["M1", "M2"], variants=[42])
    again = row_record("magmax@best", 3, above={"magmax@best": 0.2})
    write_records(tmp_path / "a" / "records.jsonl", [here])
    write_records(tmp_path / "b" / "records.jsonl", [there])
    write_records(tmp_path / "c" / "records.jsonl", [again])
    results = load_results(tmp_path)
    assert len(results.measured) == 27
    assert results.families("mini-clip/cifar100-20") == ["D", "M"]
    shares = {found.environment: found.accuracy for found in results.measured}
    assert shares["D1/42"] == again["environments"][0]["right"] / 400
    assert len(load_results(tmp_path, kinds=["sequence"]).measured) == 0
    assert len(load_results([tmp_path / "a"], rows=["magmax@0.5"]).measured) == 0


def test_what_training_tells_is_no_record_of_an_experiment(tmp_path: Path) -> None:
    write_records(tmp_path / "records.jsonl", [scale_record(3)])
    write_records(tmp_path / "work" / "seed-3" / "records.jsonl", [{"kind": "step", "task": 1}])
    (tmp_path / "work" / "seed-3" / "run.json").write_text("{}")
    assert len(load_results(tmp_path).scales) == 1
