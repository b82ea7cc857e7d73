"""Joins a Ray cluster, or starts one for the time of a command, quiet and offline."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tunable_magmax.engines import ray_reaper
from tunable_magmax.errors import InputError
from tunable_magmax.merging.resources import default_threads

ANSWER_WITHIN = 5.0
"""Seconds in which a cluster must accept a connection; Ray itself would try for many minutes."""

OBJECT_STORE = 1 << 27
"""Bytes of a local cluster's object store: next to nothing travels."""


@contextmanager
def ray_session(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Yields the module `ray`, connected to the cluster at `address` or to one that is started here for this time.

    Without an address, RAY_ADDRESS counts, as for Ray's own tools. A connection that the process already has is used
    and left alone. A local cluster has a slot for each core, and at least one for each worker.
    """
    ray = import_ray()
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise InputError(f"this process is connected to the Ray cluster at {joined}, not to {address}")
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    with ExitStack() as stack:
        if address is None:
            _start(ray, max(default_threads(), workers or 1), stack)
        else:
            _join(ray, address)
        stack.callback(ray.shutdown)
        yield ray


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}


def _start(ray: Any, slots: int, stack: ExitStack) -> None:
    """Starts a cluster of this machine that only this machine can reach, and that ends with this process."""
    mark = secrets.token_hex(16)
    reaper = [sys.executable, "-I", "-S", ray_reaper.__file__, mark]
    watching = subprocess.Popen(reaper, stdin=subprocess.PIPE, start_new_session=True)
    stack.push(watching)  # closes its stdin, and waits for it
    # Ray reads these where it starts a cluster: nothing is reported to anybody, and all listen on loopback.
    wanted = {ray_reaper.MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    constants = ray._private.ray_constants  # what Ray made of the last one when it was imported
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    os.environ.update(wanted)
    try:
        with _own_handler():
            ray.init(
                address="local", num_cpus=slots, include_dashboard=False, object_store_memory=OBJECT_STORE, **_QUIET
            )
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _join(ray: Any, address: str) -> None:
    _refuse_address(address)
    try:
        with _own_handler():
            ray.init(address=address, **_QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"can't join the Ray cluster at {address!r} ({reason}). {_REMEDY}") from None


@contextmanager
def _own_handler() -> Iterator[None]:
    """Puts back what SIGTERM did before: Ray lets it end the process without a word."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


_REMEDY = (
    "Give the address of its head as --ray-address HOST:PORT (`ray start --head` prints it), "
    "or no address for a cluster on this machine"
)


def import_ray() -> Any:
    """Imports `ray`, or raises an `InputError` that says how to install it."""
    try:
        import ray
    except ImportError:
        raise InputError("engine 'ray' needs Ray: pip install 'tunable-magmax[cluster]'") from None
    return ray


def refuse_address_form(address: str) -> None:
    """Raises an `InputError` for text that can't be the address of a cluster."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdecimal():
        raise InputError(f"the Ray address is {address!r}, expected HOST:PORT. {_REMEDY}")


def _refuse_address(address: str) -> None:
    """Raises an `InputError` if no cluster answers: Ray itself would try for minutes."""
    refuse_address_form(address)
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster answers at {address!r} ({error}). {_REMEDY}") from None
