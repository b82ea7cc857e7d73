"""Merges on Ray: several nodes on this machine, workers and nodes that are killed, a driver that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import digests, save_sequence, sequence

from tunable_magmax.cli.app import main
from tunable_magmax.engines import ray_session
from tunable_magmax.engines import workers as workers_module
from tunable_magmax.engines.local import merge_checkpoints
from tunable_magmax.engines.ray_reaper import marked
from tunable_magmax.engines.workers import Call, RayWorkers
from tunable_magmax.errors import ClusterError, InputError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tunable-magmax[cluster]'")

SHARD = 300_000
WEIGHTS = [3, 0, 0.5, 2, 1]
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"weights": WEIGHTS},
    "tensor": {"weights": WEIGHTS, "scope": "tensor", "compare": "active", "scale": 0.3},
    "ties": {"method": "ties", "density": 0.4},
    "average": {"method": "average", "out_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs and two nodes with two each, as separate sets of processes."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    store = {"object_store_memory": ray_session.OBJECT_STORE}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    nodes.pair = [nodes.add_node(num_cpus=2, **store) for _ in range(2)]
    ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    return save_sequence(tmp_path_factory.mktemp("files"), *sequence(5))


@pytest.fixture(scope="module")
def wanted(files, tmp_path_factory) -> dict[str, dict[str, str]]:
    """SHA-256 of all files that the local engine writes, by options."""
    folder = tmp_path_factory.mktemp("local")
    for name, options in OPTIONS.items():
        merge_checkpoints(*files, folder / name, shard_size=SHARD, **options)
    return {name: digests(folder / name) for name in OPTIONS}


def merge(files, out: Path, name: str, workers: int, **how: Any) -> None:
    merge_checkpoints(*files, out, shard_size=SHARD, engine="ray", workers=workers, **OPTIONS[name], **how)


@pytest.mark.parametrize(("workers", "name"), [(1, "model"), (2, "tensor"), (4, "ties")])
def test_the_same_bytes(cluster, files, wanted, tmp_path, workers, name) -> None:
    merge(files, tmp_path / "out", name, workers)
    assert digests(tmp_path / "out") == wanted[name]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.log"}


# -- deaths -----------------------------------------------------------------------------------------------------------


def at_call(monkeypatch: pytest.MonkeyPatch, name: str, strike: Any, times: int = 1) -> list[int]:
    """Have `strike(workers, worker)` happen while a worker is at its call of this name; the list tells of whom."""
    struck: list[int] = []
    send = RayWorkers._send

    def sending(self: RayWorkers, call: Call) -> Any:
        answer = send(self, call)
        if call.name == name and len(struck) < times:
            struck.append(call.worker)
            strike(self, call.worker)
        return answer

    monkeypatch.setattr(RayWorkers, "_send", sending)
    return struck


def kill_actor(workers: RayWorkers, worker: int) -> None:
    ray.kill(workers._actors[worker])


def kill_process(workers: RayWorkers, worker: int) -> None:
    actor = workers._actors[worker]
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


@pytest.mark.parametrize(("phase", "strike"), [("auction_steps", kill_process), ("write", kill_actor)])
def test_a_worker_dies(cluster, files, wanted, tmp_path, monkeypatch, phase, strike) -> None:
    struck = at_call(monkeypatch, phase, strike)
    merge(files, tmp_path / "out", "model", 2)
    assert len(struck) == 1
    assert digests(tmp_path / "out") == wanted["model"]


def test_a_worker_dies_too_often_and_the_merge_goes_on_later(cluster, files, wanted, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers_module, "RETRIES", 0)
        at_call(patch, "digest", kill_actor)
        with pytest.raises(ClusterError) as told:
            merge(files, tmp_path / "out", "tensor", 1)
    text = str(told.value)
    assert "worker 1 of 1 died 1 times, the last time on node" in text
    assert f"Finished shards are kept in {tmp_path / 'out.partial'}: run the same command again" in text
    merge_checkpoints(*files, tmp_path / "out", shard_size=SHARD, **OPTIONS["tensor"])  # the local engine goes on
    assert digests(tmp_path / "out") == wanted["tensor"]


def test_a_successor_that_cannot_read_the_inputs(cluster, wanted, tmp_path, monkeypatch) -> None:
    """Its error is ours, and says that what was done is kept."""
    paths = save_sequence(tmp_path / "in", *sequence(5))
    away = tmp_path / "away"

    def strike(workers: RayWorkers, worker: int) -> None:
        paths[0].rename(away)
        kill_actor(workers, worker)

    with monkeypatch.context() as patch:
        at_call(patch, "digest", strike)
        with pytest.raises(ClusterError) as told:
            merge(paths, tmp_path / "out", "model", 1)
    assert type(told.value) is ClusterError  # not Ray's
    assert str(told.value).startswith("a worker can't read what the driver can: base: ")
    assert f"Finished shards are kept in {tmp_path / 'out.partial'}" in str(told.value)
    away.rename(paths[0])
    merge(paths, tmp_path / "out", "model", 1)
    assert digests(tmp_path / "out") == wanted["model"]


DRIVER = """
import os, signal, sys
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.cli.app import main
finish, finished = Output.finish_shard, []
def finish_and_die(self, shard, path, sha256):
    finish(self, shard, path, sha256)
    finished.append(shard.name)
    if len(finished) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Output.finish_shard = finish_and_die
main(sys.argv[1:])
"""


def test_the_driver_dies(cluster, files, wanted, tmp_path, monkeypatch) -> None:
    """It had a cluster of its own on this machine, which dies with it."""
    tasks = [part for path in files[1] for part in ("--task", str(path))]
    weights = ",".join(map(str, WEIGHTS))
    command = ["merge", "--base", str(files[0]), *tasks, "--weights", weights, "--shard-size", str(SHARD)]
    command += ["-o", str(tmp_path / "out"), "--engine", "ray", "--workers", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.run([sys.executable, "-c", DRIVER, *command], env=environment, timeout=300)
    assert process.returncode == -signal.SIGKILL
    kept = {path: path.stat().st_ino for path in (tmp_path / "out.partial" / "output").iterdir()}
    assert len(kept) == 2
    assert not (tmp_path / "out").exists()
    merge(files, tmp_path / "out", "model", 1)
    assert digests(tmp_path / "out") == wanted["model"]
    assert all((tmp_path / "out" / path.name).stat().st_ino == inode for path, inode in kept.items())


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_of_workers_are_ours(cluster, tmp_path, capsys) -> None:
    base, tasks = sequence(2)
    tasks[0]["h.1.weight"][[5, 100_000]] = torch.nan
    paths = save_sequence(tmp_path / "in", base, tasks)
    command = ["merge", "--base", str(paths[0]), "--task", str(paths[1][0]), "--task", str(paths[1][1])]
    with pytest.raises(SystemExit) as leaving:
        main([*command, "-o", str(tmp_path / "out"), "--engine", "ray", "--workers", "1", "--exclude", "head"])
    assert leaving.value.code == 2
    text = capsys.readouterr().err
    assert "task 1: 'h.1.weight' has 2 values that are NaN or infinite" in text
    assert "Traceback" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_too_little_memory_for_a_worker(cluster, files, tmp_path) -> None:
    with pytest.raises(InputError, match="memory of 1 MiB is too little for 5 tasks: give at least 3 MiB"):
        merge(files, tmp_path / "out", "model", 4, memory="1MiB")


def test_more_workers_than_cpus(cluster, files, tmp_path) -> None:
    with pytest.raises(InputError, match="5 workers need a CPU each, but the Ray cluster has 4"):
        merge(files, tmp_path / "out", "model", 5)


def test_another_cluster_than_the_one_joined(cluster, files, tmp_path) -> None:
    with pytest.raises(InputError, match=r"connected to the Ray cluster at .*, not to 10\.0\.0\.1:6379"):
        merge(files, tmp_path / "out", "model", 2, ray_address="10.0.0.1:6379")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("head", "the Ray address is 'head', expected HOST:PORT"),
        ("ray://head:10001", "the Ray address is 'ray://head:10001', expected HOST:PORT"),
    ],
)
def test_bad_addresses(monkeypatch, files, tmp_path, address, text) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError) as told:
        merge(files, tmp_path / "out", "model", 2, ray_address=address)
    assert text in str(told.value)
    assert "`ray start --head` prints it" in str(told.value)


def test_ray_is_not_installed(monkeypatch, files, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs Ray: pip install 'tunable-magmax\[cluster\]'"):
        merge(files, tmp_path / "out", "model", 2)


def test_options_of_the_other_engine(files, tmp_path) -> None:
    for option, value in {"workers": 2, "ray_address": "a:1"}.items():
        with pytest.raises(InputError, match=f"{option} is {value!r}, but the engine is 'local'"):
            merge_checkpoints(*files, tmp_path / "out", **{option: value})
    with pytest.raises(InputError, match="unknown engine 'rai'"):
        merge_checkpoints(*files, tmp_path / "out", engine="rai")
    with pytest.raises(InputError, match="workers is 0, expected at least 1"):
        merge(files, tmp_path / "out", "model", 0)


# -- progress, and a node that goes -----------------------------------------------------------------------------------


def test_progress_over_the_cluster(cluster, files, wanted, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(workers_module, "WATCH_EVERY", 0.01)
    seen: list[tuple[str, int, int]] = []
    merge(files, tmp_path / "out", "average", 2, progress=lambda *step: seen.append(step))
    assert digests(tmp_path / "out") == wanted["average"]
    phases = {phase for phase, _, _ in seen}
    assert "survey" in phases
    assert phases <= {"survey", "measure", "merge"}
    for phase in phases:
        steps = [(done, total) for name, done, total in seen if name == phase]
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert all(done <= total for done, total in steps)


def test_a_node_is_removed_while_merging(cluster, files, wanted, tmp_path, monkeypatch) -> None:
    """The last test of the cluster: what is left of it has no CPUs for another worker, and must do."""
    monkeypatch.setattr(workers_module, "PATIENCE", 2.0)
    seen: list[RayWorkers] = []

    def remove(workers: RayWorkers, worker: int) -> None:
        seen.append(workers)
        cluster.remove_node(cluster.pair[0], allow_graceful=False)
        until = time.monotonic() + 60
        while alive() > 1 and time.monotonic() < until:
            time.sleep(0.1)

    at_call(monkeypatch, "auction_steps", remove)
    merge(files, tmp_path / "out", "model", 2)
    assert alive() == 1
    assert sum(seen[0]._deaths) == 1
    assert digests(tmp_path / "out") == wanted["model"]


def alive() -> int:
    """Nodes that workers can be on."""
    return sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in ray.nodes())


# -- a cluster of this machine ----------------------------------------------------------------------------------------

LOCAL = """
import time
from tunable_magmax.engines.ray_session import ray_session
with ray_session(None) as ray:
    ray.get(ray.remote(lambda: 1).remote())
    print(ray.get_runtime_context().gcs_address, flush=True)
    time.sleep(60)
"""


def listening(processes: list[int]) -> set[str]:
    """Returns the addresses that some processes listen on, in the kernel's hexadecimal."""
    sockets = set()
    for process in processes:
        with suppress(OSError):
            sockets |= {str(entry.readlink()) for entry in Path(f"/proc/{process}/fd").iterdir()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_local_cluster_is_for_this_machine_only_and_ends_with_its_driver() -> None:
    with subprocess.Popen([sys.executable, "-c", LOCAL], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().startswith("127.0.0.1:")
        reapers = [p for p in children(driver.pid) if b"ray_reaper" in Path(f"/proc/{p}/cmdline").read_bytes()]
        mark = Path(f"/proc/{reapers[0]}/cmdline").read_bytes().split(b"\0")[-2].decode()
        processes = marked(mark)
        assert len(processes) >= 3
        loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
        assert loopback >= listening([driver.pid, *processes]) != set()
        driver.kill()
    deadline = time.monotonic() + 4
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not marked(mark)


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
