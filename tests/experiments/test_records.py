"""Records are read back as they were written, and those of one row are put together."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.invented import row_record, scale_record

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.records import append_records, read_records
from tunable_magmax.experiments.results import load_results


def test_those_who_write_at_a_time_lose_nothing(tmp_path: Path) -> None:
    file, seeds = tmp_path / "records.jsonl", range(40)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: append_records(file, [scale_record(seed)]), seeds))
    assert sorted(record.seed for record in read_records(file)) == list(seeds)


def test_every_kind_is_read_back_as_it_was(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "results" / "mini-clip" / "cifar100-20" / "records.jsonl"
    records, file = read_records(committed), tmp_path / "new" / "records.jsonl"
    append_records(file, records)
    assert {record.kind for record in records} == {"sequence", "scale", "alpha", "row"}
    assert read_records(file) == records
    assert len({record.key for record in records}) == len(records)


def test_of_one_key_the_last_counts_and_environments_are_put_together(tmp_path: Path) -> None:
    first, other = row_record("magmax@best", 3, variants=[42]), scale_record(3)
    more, again = row_record("magmax@best", 3, variants=[123]), scale_record(3, best=1.0)
    both = replace(first, environments=first.environments + more.environments)
    for records in ([first, other], [more, again]):
        append_records(tmp_path / "records.jsonl", records)
    assert read_records(tmp_path / "records.jsonl") == [both, again]


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    with pytest.raises(InputError, match=r"records\.jsonl"):
        read_records(file)
    with pytest.raises(InputError, match=str(tmp_path)):
        load_results(tmp_path)
    append_records(file, [row_record("magmax@best", 3)])
    file.write_text(file.read_text() + '{"kind": "rows"}\n')
    with pytest.raises(InputError, match=r"line 2: .*'rows'"):
        read_records(file)
