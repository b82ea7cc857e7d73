"""Merges on a local Ray cluster, which all tests of the session share: same bytes, deaths, errors, strangers."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sequences import SMALL, digests, save_sequence, sequence

from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.ray_workers import RayWorkers, ray_session
from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.merging.methods import load_method
from tunable_magmax.merging.owners import Call

WEIGHTS = [3, 0, 0.5, 2, 1]
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"weights": WEIGHTS},
    "tensor": {"weights": WEIGHTS, "scope": "tensor", "compare": "active", "scale": 0.3},
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    with ray_session(None, workers=2) as ray:
        yield ray


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    return save_sequence(tmp_path_factory.mktemp("files"), *sequence(5, SMALL))


def merge(files, out: Path, name: str, **where: Any) -> dict[str, str]:
    merge_checkpoints(*files, out, shard_size=2000, **OPTIONS[name], **where)
    return digests(out)


@pytest.mark.parametrize(("workers", "name"), [(1, "model"), (2, "tensor")])
def test_the_same_bytes(cluster, files, tmp_path, workers, name) -> None:
    found = merge(files, tmp_path / "ray", name, engine="ray", workers=workers)
    assert found == merge(files, tmp_path / "local", name)
    assert {path.name for path in tmp_path.iterdir()} == {"ray", "ray.log", "local", "local.log"}


def test_a_worker_that_dies_fails_the_merge_and_a_rerun_gives_the_same_bytes(
    cluster, files, tmp_path, monkeypatch
) -> None:
    ask = RayWorkers.ask

    def killing(self: RayWorkers, calls: Sequence[Call]) -> list[Any]:
        answers = ask(self, calls)
        if any(call.name == "apply" for call in calls):
            mine = {each.pid for each in psutil.Process().children(recursive=True)}
            named = [each for each in psutil.process_iter(["name"]) if "ray::Worker" in each.info["name"]]
            next(each for each in named if each.pid in mine).kill()
        return answers

    with monkeypatch.context() as patch:
        patch.setattr(RayWorkers, "ask", killing)
        with pytest.raises(ClusterError, match=r"worker \d of 2 died on node 127\.0\.0\.1"):
            merge(files, tmp_path / "out", "model", engine="ray", workers=2)
    assert not list(tmp_path.iterdir())
    found = merge(files, tmp_path / "out", "model", engine="ray", workers=2)
    assert found == merge(files, tmp_path / "local", "model")


def test_errors_of_workers_are_ours(cluster, tmp_path) -> None:
    base, tasks = sequence(2, SMALL)
    tasks[0]["a.weight"].view(-1)[[5, 100]] = torch.nan
    paths = save_sequence(tmp_path / "in", base, tasks)
    with pytest.raises(InputError, match=r"task 1: 'a\.weight' has 2 values"):
        merge_checkpoints(*paths, tmp_path / "out", engine="ray", workers=2)
    with pytest.raises(InputError, match="too little"):
        merge_checkpoints(*paths, tmp_path / "out", engine="ray", workers=2, memory=1)
    with pytest.raises(InputError, match="999 workers"):
        merge_checkpoints(*paths, tmp_path / "out", engine="ray", workers=999)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_method_in_a_file_of_the_users_own(cluster, files, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom tunable_magmax.merging.methods import Method\nclass Lower(Method):\n"
        "    def vector(self, vectors):\n        return torch.stack(list(vectors)).median(dim=0).values\n"
    )
    method = load_method(f"{tmp_path / 'mine.py'}:Lower")
    for name, where in {"ray": {"engine": "ray", "workers": 1}, "local": {}}.items():
        merge_checkpoints(*files, tmp_path / name, method=method, scale=1, **where)
    assert digests(tmp_path / "ray") == digests(tmp_path / "local")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head", "ray://head:10001", "10.0.0.1:6379"])
def test_bad_addresses(cluster, monkeypatch, files, tmp_path, address) -> None:
    if address != "10.0.0.1:6379":  # else: this process has joined another cluster
        monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    with pytest.raises(InputError, match=address):
        merge(files, tmp_path / "out", "model", engine="ray", ray_address=address)
    assert not list(tmp_path.iterdir())


def test_options_of_the_other_engine(files, tmp_path) -> None:
    for option, value in {"workers": 2, "ray_address": "a:1"}.items():
        with pytest.raises(InputError, match=f"{option} is {value!r}"):
            merge(files, tmp_path / "out", "model", **{option: value})
    for wrong in ({"engine": "rai"}, {"engine": "ray", "workers": 0}, {"engine": "ray", "device": "cuda"}):
        with pytest.raises(InputError, match=str(list(wrong.values())[-1])):
            merge(files, tmp_path / "out", "model", **wrong)


def test_a_local_cluster_is_for_this_machine_only(cluster) -> None:
    places = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            places += [place for place in process.net_connections("inet") if place.status == "LISTEN"]
    assert {"127.0.0.1", "::ffff:127.0.0.1"} >= {place.laddr.ip for place in places} != set()


@pytest.mark.stress
def test_a_stranger_without_the_token_is_refused(cluster) -> None:
    joining = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
    command = [sys.executable, "-c", joining, cluster.get_runtime_context().gcs_address]
    stranger = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    assert subprocess.run(command, env=stranger, capture_output=True, timeout=120).returncode != 0


@pytest.mark.stress
def test_a_local_cluster_that_others_could_reach_is_refused() -> None:
    """Ray decides when it is imported where it listens."""
    script = "import ray, tunable_magmax.engines.ray_workers as w; w.ray_session(None).__enter__(); print('open')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert "InputError" in run.stderr
    assert "open" not in run.stdout
