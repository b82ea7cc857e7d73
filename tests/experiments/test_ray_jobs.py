"""Seeds of an experiment as jobs on Ray leave the records that they leave without it, also if one dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from test_reproduce import without_times, written

from tunable_magmax.engines import ray_session
from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.experiments import reproduce as runner
from tunable_magmax.experiments.config import read_experiment
from tunable_magmax.experiments.jobs import plan_jobs
from tunable_magmax.experiments.records import read_records, record_key
from tunable_magmax.experiments.reproduce import JobOptions, reproduce

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tunable-magmax[cluster]'")

FEW = {
    "seeds": [3, 4],
    "baselines": ["zero-shot", "magmax"],
    "preferences": ["label"],
    "variations": [{"compare": "active"}],
    "kinds": ["sequence", "scale", "row"],
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One thread here and there, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(address="local", num_cpus=2, object_store_memory=ray_session.OBJECT_STORE, **quiet)
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def here(tmp_path_factory, cluster):
    root = tmp_path_factory.mktemp("experiment")
    experiment = read_experiment(written(root, **FEW))
    reproduce(experiment, root / "results", root / "work", JobOptions("cpu"))
    return experiment, records_in(root / "results")


def records_in(results: Path) -> dict:
    found = read_records(results / "records.jsonl")
    return {record_key(record): record for record in json.loads(json.dumps(without_times(found)))}


def test_the_same_records_after_a_death_and_none_twice(here, tmp_path, monkeypatch) -> None:
    experiment, wanted = here
    struck = tmp_path / "struck"
    job = runner._job

    def dying(seed, threads):
        for number, record in enumerate(job(seed, threads)):
            yield record
            if number == 2 and seed.seed == 4 and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(runner, "_job", dying)
    reproduce(experiment, tmp_path / "results", tmp_path / "work", JobOptions("cpu", "ray"))
    assert struck.exists()
    assert records_in(tmp_path / "results") == wanted
    lines = (tmp_path / "results" / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(plan_jobs(experiment))
    monkeypatch.setattr(runner, "ray_session", None)  # calling it would fail: there is nothing to do
    reproduce(experiment, tmp_path / "results", tmp_path / "work", JobOptions("cpu", "ray"))


def test_a_job_that_always_dies(here, tmp_path, monkeypatch) -> None:
    def dying(seed, threads):
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    monkeypatch.setattr(runner, "RETRIES", 1)
    monkeypatch.setattr(runner, "_job", dying)
    with pytest.raises(ClusterError, match=r"seed [34] died 2 times .*run the same command again"):
        reproduce(here[0], tmp_path / "results", tmp_path / "work", JobOptions("cpu", "ray"))


@pytest.mark.parametrize(("device", "gpus"), [(None, 1), ("cuda", 1), ("cpu", 0)])
def test_a_job_on_the_cpu_keeps_no_gpu_from_others(monkeypatch, device, gpus) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0, "CPU": 2.0})
    reserved, _ = runner._resources(ray, device)
    assert reserved.get("num_gpus", 0) == gpus


def test_an_error_of_a_job_is_ours(here, tmp_path, monkeypatch) -> None:
    def failing(seed, threads):
        raise InputError(f"seed {seed.seed} is no good")
        yield

    monkeypatch.setattr(runner, "_job", failing)
    with pytest.raises(InputError, match=r"^seed [34] is no good$"):
        reproduce(here[0], tmp_path / "results", tmp_path / "work", JobOptions("cpu", "ray"))
