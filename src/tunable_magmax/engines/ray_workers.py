"""A Ray cluster, joined or started for the time of a merge, and the merge's workers on it, as actors.

A worker that dies fails the merge; nothing was written then, and a rerun gives the same bytes.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.files import Progress
from tunable_magmax.merging.owners import Call
from tunable_magmax.merging.walker import default_threads
from tunable_magmax.version import __version__

ANSWER_WITHIN = 5.0
"""Seconds in which a cluster must accept a connection; Ray itself would try for many minutes."""
START_WITHIN = 300.0
"""Seconds to wait for a cluster to have room for all workers: it may have to start machines."""
PHASES = {"scan": "survey", "measure": "measure", "write": "merge"}
"""What the calls are that read all values, in reports of progress: so many calls done of so many."""
OBJECT_STORE = 1 << 27
"""Bytes of a local cluster's object store: next to nothing travels."""
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""With this environment, all of Ray's processes listen on loopback, and nothing is reported to anybody."""

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
_REMEDY = (
    "Give the address of its head as --ray-address HOST:PORT (`ray start --head` prints it), "
    "or no address for a cluster on this machine"
)

# -- the cluster ------------------------------------------------------------------------------------------------------


@contextmanager
def ray_session(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Yields the module `ray`, connected to the cluster at `address` or to one that is started here for this time.

    Without an address, RAY_ADDRESS counts, as for Ray's own tools. A connection that the process already has is used
    and left alone. A local cluster has a slot for each core, and at least one for each worker.
    """
    require_ray()
    address = address or os.environ.get("RAY_ADDRESS") or None
    with ExitStack() as stack:
        if address is None:
            stack.enter_context(_environment(LOCAL))  # Ray reads it when it is imported and when it starts a cluster
        import ray

        if ray.is_initialized():
            joined = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", joined):
                raise InputError(f"this process is connected to the Ray cluster at {joined}, not to {address}")
            yield ray
            return
        with _sigterm_as_before():
            if address is None:
                _start(ray, max(default_threads(), workers or 1))
            else:
                _join(ray, address)
        stack.callback(ray.shutdown)
        yield ray


def require_ray() -> None:
    """Raises an `InputError` that says how to install Ray if it is not there."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("engine 'ray' needs Ray: pip install 'tunable-magmax[cluster]'")


def refuse_address_form(address: str) -> None:
    """Raises an `InputError` for text that can't be the address of a cluster."""
    host, _, port = address.rpartition(":")
    if address != "auto" and (not host or "://" in host or not port.isdecimal()):
        raise InputError(f"the Ray address is {address!r}, expected HOST:PORT. {_REMEDY}")


def _start(ray: Any, slots: int) -> None:
    """Starts a cluster that only this machine can reach."""
    ray.init(address="local", num_cpus=slots, include_dashboard=False, object_store_memory=OBJECT_STORE, **_QUIET)
    listening = ray.get_runtime_context().gcs_address
    if not listening.startswith(("127.", "localhost")):
        ray.shutdown()
        raise InputError(
            f"a local Ray cluster would be open to others at {listening}, because this process has imported ray: merge "
            "in a process of its own"
        )


def _join(ray: Any, address: str) -> None:
    refuse_address_form(address)
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_WITHIN).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"no Ray cluster answers at {address!r} ({error}). {_REMEDY}") from None
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"can't join the Ray cluster at {address!r} ({reason}). {_REMEDY}") from None


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _sigterm_as_before() -> Iterator[None]:
    """Puts back what SIGTERM did before: Ray lets it end the process without a word."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


# -- the workers ------------------------------------------------------------------------------------------------------


def find_room(nodes: Sequence[float], workers: int | None, threads: int | None) -> tuple[int, int]:
    """Divides nodes with these numbers of CPUs among workers; returns how many workers there are, and CPUs of each.

    By default one worker has a node; else all have as many CPUs as each can have.

    >>> find_room([16, 16], None, None), find_room([16, 16], 3, None), find_room([2], 2, 1)
    ((2, 16), (3, 8), (2, 1))
    """
    usable = [int(cpus) for cpus in nodes if cpus >= 1]
    if not usable:
        raise ClusterError("the Ray cluster has no CPUs for workers: add nodes with `ray start --address=...`")
    wanted = len(usable) if workers is None else workers
    for cpus in range(max(usable), 0, -1):
        if sum(node // cpus for node in usable) >= wanted:
            return wanted, min(cpus, threads or cpus)
    raise InputError(
        f"{wanted} workers need a CPU each, but the Ray cluster has {sum(usable)}: give at most --workers {sum(usable)}"
    )


class RayWorkers:
    """Workers as Ray actors, known by number. A context manager: leaving it ends them."""

    def __init__(self, ray: Any, worker: type, count: int, cpus: int, progress: Progress | None = None) -> None:
        self._ray, self._cpus, self._progress = ray, cpus, progress
        self._nodes = ["a node not known yet"] * count
        placed = {"num_cpus": cpus, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        self._actors = [ray.remote(worker).options(**placed).remote() for _ in range(count)]

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        """Sends calls, in order to each worker; returns their answers in the order of the calls."""
        sent = [getattr(self._actors[call.part], call.name).remote(*call.arguments) for call in calls]
        answers: dict[int, Any] = {}
        pending = {answer: k for k, answer in enumerate(sent)}
        while pending:
            [answer], _ = self._ray.wait(list(pending))
            k = pending.pop(answer)
            answers[k] = self._result(calls[k].part, answer)
            if self._progress is not None and calls[k].name in PHASES:
                self._progress(PHASES[calls[k].name], len(answers), len(calls))
        return [answers[k] for k in range(len(calls))]

    def _result(self, worker: int, answer: Any) -> Any:
        """Returns a worker's answer, or raises the error that it raised; its death is a `ClusterError`."""
        known = self._ray.exceptions
        try:
            return self._ray.get(answer)
        except known.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except (known.RayActorError, known.ObjectLostError, known.NodeDiedError) as error:
            reason, *_ = [*str(error).strip().splitlines(), type(error).__name__]
            died = f"worker {worker + 1} of {len(self._actors)} died on node {self._nodes[worker]} ({reason})"
            raise ClusterError(f"{died}: nothing was written. Look at that node's memory, and run again") from None

    def greet(self) -> None:
        """Waits until all workers have begun, with the same version of this package."""
        greetings = [actor.node_and_version.remote() for actor in self._actors]
        _, waiting = self._ray.wait(greetings, num_returns=len(greetings), timeout=START_WITHIN)
        if waiting:
            free = self._ray.available_resources().get("CPU", 0)
            raise ClusterError(
                f"{len(waiting)} of {len(greetings)} workers found no room in {START_WITHIN:.0f} seconds: each needs "
                f"{self._cpus} CPUs, and {free:g} are free. Give fewer --workers or --threads, or wait"
            )
        for k, greeting in enumerate(greetings):
            self._nodes[k], version = self._result(k, greeting)
            if version != __version__:
                raise ClusterError(f"node {self._nodes[k]} has version {version}, not {__version__}: install that")
