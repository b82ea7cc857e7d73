"""Experiments in miniature: every kind of job, killed and resumed; and every shipped configuration is planned."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from training import toy

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.records import read_records, record_key
from tunable_magmax.experiments.reproduce import reproduce_all, results_folder
from tunable_magmax.experiments.run import missing_jobs, plan_jobs

CONFIGS = Path(__file__).parents[2] / "configs"
PREFERENCES = ["label", "ot", "cosine", "mmd", "shift", "pseudo", "probe", "auto", "search"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in another order differ in the last bit, so all runs that are compared have the same number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def written(root: Path, **changed) -> Path:
    """An experiment on tiny models."""
    run = toy.settings(root, benchmark={"holdout": 0.3}, train={"epochs": 1})
    given = {
        "name": "toy",
        "setting": "toy/colours-2",
        "run": run,
        "seeds": [3],
        "environments": {"mixtures": {"D1": [0.5, 0.5], "D2": [0.8, 0.2]}, "variants": [42], "size": "supply"},
        "baselines": ["zero-shot", "single-best", "sequential", "ties", "magmax"],
        "preferences": PREFERENCES,
        "scales": [0.5, "matched", "best"],
        "grid": [0.5, 1.0],
        "variations": [{"compare": "active"}, {"scope": "tensor"}],
        "search": {"trials": 3, "variants": [42]},
        "alphas": [0.5, 2.0],
        "meta_sizes": [1, 2],
        **changed,
    }
    path = root / "toy.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def without_times(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in record.items() if k not in ("seconds", "samples_per_second")} for record in records]


@pytest.fixture(scope="module")
def done(tmp_path_factory, one_thread):
    root = tmp_path_factory.mktemp("experiment")
    experiment = read_experiment(written(root))
    files = reproduce_all(experiment, root / "results", root / "work", device="cpu")
    return root, experiment, files


def test_every_job_leaves_its_record(done):
    root, experiment, _ = done
    records = read_records(results_folder(experiment, root / "results") / "records.jsonl")
    planned = [(experiment.setting, job.kind, job.seed, job.name) for job in plan_jobs(experiment)]
    assert [record_key(record) for record in records] == planned
    rows = {record["row"]: record for record in records if record["kind"] == "row"}
    assert {f"tunable:{name}@matched" for name in PREFERENCES} <= set(rows)
    assert rows["magmax@best"]["environments"][0]["lambda"] in (0.5, 1.0)
    for row in rows.values():
        assert [part["name"] for part in row["environments"]] == ["D1/42", "D2/42"]
        for part in row["environments"]:
            assert 0 <= part["right"] <= part["known_right"] <= part["samples"]
    assert rows["tunable:label@0.5"]["environments"][0]["lambda"] == 0.5
    for part in rows["tunable:auto@matched"]["environments"]:
        assert part["chosen"] in ("probe", "shift", "ot")
        assert part["chosen"] == "ot" or 0 <= part["expected_error"] <= 0.4  # the limit, above which `ot` is taken


def test_tables_figures_page_and_summary_are_there(done):
    root, experiment, files = done
    assert all(file.stat().st_size for file in files)
    names = {file.name for file in files}
    assert {"report.html", "report.md", "summary.json", "leads.png"} <= names
    summary = json.loads((root / "results" / "summary.json").read_text())
    assert set(summary[experiment.setting]["magmax@0.5"]) >= {"mean", "std", "seeds", "environments"}


def test_a_second_call_measures_nothing(done, monkeypatch):
    root, experiment, _ = done
    assert missing_jobs(experiment, results_folder(experiment, root / "results")) == []
    monkeypatch.setattr("tunable_magmax.experiments.run.train_sequence", None)  # calling it would fail
    reproduce_all(experiment, root / "results", root / "work", device="cpu")


def test_stopped_in_the_middle_it_ends_with_the_same_records(done, tmp_path):
    root, experiment, _ = done
    whole = (results_folder(experiment, root / "results") / "records.jsonl").read_bytes()
    folder = results_folder(experiment, tmp_path / "results")
    folder.mkdir(parents=True)
    lines = whole.splitlines(keepends=True)
    cut = len(lines) // 2
    (folder / "records.jsonl").write_bytes(b"".join(lines[:cut]) + lines[cut][:40])  # as a kill leaves it
    reproduce_all(experiment, tmp_path / "results", tmp_path / "work", device="cpu")  # trains again, too
    again = read_records(folder / "records.jsonl")
    before = read_records(results_folder(experiment, root / "results") / "records.jsonl")
    assert without_times(again) == without_times(before)


def test_a_sequence_that_another_process_trained_has_its_time(done, tmp_path):
    root, experiment, _ = done
    work = shutil.copytree(root / "work", tmp_path / "work")
    run = work / experiment.setting / "seed-3"
    told = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    trained = sum(record["seconds"] for record in told if record["kind"] == "task")
    reproduce_all(replace(experiment, kinds=("sequence",)), tmp_path / "results", work, device="cpu")
    (record,) = read_records(results_folder(experiment, tmp_path / "results") / "records.jsonl")
    assert record["seconds"] == round(trained, 2) > 0
    assert record["samples_per_second"] > 0


def test_parts_share_records(done):
    root, _, _ = done
    (root / "collection.yaml").write_text("about: parts\nparts: [toy.yaml]\nkinds: [row]\nonly: [magmax@0.5]\n")
    collection = read_experiment(root / "collection.yaml")
    assert [job.name for job in plan_jobs(collection)] == ["magmax@0.5"]
    files = reproduce_all(collection, root / "results", root / "work", device="cpu")
    assert (root / "results" / "toy" / "collection" / "report.html") in files


SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if not path.name.startswith("common-"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_configuration_is_planned(path):
    experiment = read_experiment(path)
    jobs = plan_jobs(experiment)
    assert {job.seed for job in jobs} == {3, 4, 5}
    for part in experiment.parts or (experiment,):
        own = plan_jobs(part)
        assert len({(job.seed, job.kind, job.name) for job in own}) == len(own)


def test_all_problems_of_a_configuration_at_once(tmp_path):
    path = written(tmp_path, preferences=["labels"], scales=["machted"], colour=1)
    with pytest.raises(InputError) as told:
        read_experiment(path)
    text = str(told.value)
    assert "unknown key 'colour'" in text
    assert "'labels' is none of" in text
    assert "did you mean 'label'" in text
    assert "scales: 'machted' is no positive number" in text


def test_a_configuration_that_extends_itself(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(InputError, match="extends itself"):
        read_experiment(tmp_path / "a.yaml")
