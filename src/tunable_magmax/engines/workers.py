"""The workers of a merge as Ray actors: starts them, sends calls to them, and replaces those that die.

A call that changes a worker's state is kept. A replacement first gets all calls that were kept for its predecessor,
which take it to the same state, and then the calls that its predecessor has not answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tunable_magmax.engines.worker import Worker
from tunable_magmax.errors import ClusterError, InputError
from tunable_magmax.files import Progress
from tunable_magmax.version import __version__

RETRIES = 3
"""How many times the worker of a share is replaced."""

START_WITHIN = 300.0
"""Seconds to wait for a cluster to have room for all workers: it may have to start machines."""

PATIENCE = 10.0
"""Seconds to wait for room for a replacement, before it shares the CPUs of another worker."""

LEAVE_WITHIN = 5.0
WATCH_EVERY = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a worker's method."""

    worker: int
    name: str
    arguments: tuple[Any, ...] = ()
    lasting: bool = False
    """Whether a replacement repeats the call to reach the same state."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many workers a merge has, and the CPUs that each of them gets."""

    workers: int
    cpus: int


def find_room(nodes: Sequence[float], workers: int | None, threads: int | None) -> Room:
    """Divides nodes with these numbers of CPUs: by default one worker on each, else as many CPUs as all can have.

    >>> find_room([16, 16], None, None), find_room([16, 16], 3, None), find_room([2], 2, 1)
    (Room(workers=2, cpus=16), Room(workers=3, cpus=8), Room(workers=2, cpus=1))
    """
    usable = [int(cpus) for cpus in nodes if cpus >= 1]
    if not usable:
        raise ClusterError("the Ray cluster has no CPUs for workers: add nodes with `ray start --address=...`")
    wanted = len(usable) if workers is None else workers
    for cpus in range(max(usable), 0, -1):
        if sum(node // cpus for node in usable) >= wanted:
            return Room(wanted, min(cpus, threads or cpus))
    raise InputError(
        f"{wanted} workers need a CPU each, but the Ray cluster has {sum(usable)}: give at most --workers {sum(usable)}"
    )


class RayWorkers:
    """Workers as Ray actors, known by number. A context manager: leaving it ends them."""

    def __init__(self, ray: Any, room: Room, progress: Progress | None = None) -> None:
        self._ray, self._room, self._progress = ray, room, progress
        self._furthest: dict[str, int] = {}
        self._kept: list[list[Call]] = [[] for _ in range(room.workers)]
        self._deaths = [0] * room.workers
        self._nodes = ["a node not known yet"] * room.workers
        self._watched = time.monotonic()
        self._actor_class = ray.remote(concurrency_groups={"watch": 1}, max_restarts=0)(RayWorker)
        self._actors = [self._create(room.cpus) for _ in range(room.workers)]

    def __enter__(self) -> RayWorkers:
        try:
            self._wait_for_all()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end_all()

    def each(self, calls: deque[Call]) -> Iterator[tuple[Call, Any]]:
        """Sends all calls, also those added meanwhile, in order to each worker; yields each with its result."""
        pending: dict[Any, Call] = {}
        while calls or pending:
            while calls:
                call = calls.popleft()
                pending[self._send(call)] = call
            for answer in self._answered(list(pending)):
                call = pending[answer]
                try:
                    result = self._result(answer)
                except self._lost_errors as error:
                    self._replace(call.worker, error)
                    # Whatever else was asked of it is lost as well.
                    for lost, again in [(a, c) for a, c in pending.items() if c.worker == call.worker]:
                        del pending[lost]
                        pending[self._send(again)] = again
                    continue
                del pending[answer]
                if call.lasting:
                    self._kept[call.worker].append(call)
                yield call, result

    def _answered(self, pending: list[Any]) -> list[Any]:
        """Waits for the first answers."""
        while True:
            ready: list[Any] = self._ray.wait(pending, timeout=WATCH_EVERY if self._progress else None)[0]
            if self._progress and time.monotonic() - self._watched > WATCH_EVERY:
                self._report_progress()
                self._watched = time.monotonic()
            if ready:
                return ready

    @property
    def _lost_errors(self) -> tuple[type[Exception], ...]:
        known = self._ray.exceptions
        # A large answer can be lost with its node after its worker had given it.
        return known.RayActorError, known.ObjectLostError, known.NodeDiedError

    def _send(self, call: Call) -> Any:
        return getattr(self._actors[call.worker], call.name).remote(*call.arguments)

    def _result(self, answer: Any) -> Any:
        """Returns a worker's answer, or raises the error that it raised."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def _create(self, cpus: int) -> Any:
        return self._actor_class.options(num_cpus=cpus, scheduling_strategy="SPREAD").remote()

    def _wait_for_all(self) -> None:
        greetings = [actor.hello.remote() for actor in self._actors]
        _, waiting = self._ray.wait(greetings, num_returns=len(greetings), timeout=START_WITHIN)
        if waiting:
            free = self._ray.available_resources().get("CPU", 0)
            raise ClusterError(
                f"{len(waiting)} of {len(greetings)} workers found no room in {START_WITHIN:.0f} seconds: each needs "
                f"{self._room.cpus} CPUs, and {free:g} are free. Give fewer --workers, or --threads below "
                f"{self._room.cpus}, or wait until the cluster is less busy"
            )
        for k, greeting in enumerate(greetings):
            try:
                self._check_version(k, greeting)
            except self._lost_errors as error:
                self._replace(k, error)

    def _check_version(self, worker: int, greeting: Any) -> None:
        node, version = self._ray.get(greeting)
        self._nodes[worker] = node
        if version != __version__:
            raise ClusterError(
                f"node {node} has tunable-magmax {version}, this machine {__version__}: "
                "install the same version on all nodes"
            )

    def _replace(self, worker: int, error: Exception) -> None:
        """Replaces a dead worker and repeats the calls that were kept for it; the replacement may die as well."""
        while True:
            self._deaths[worker] += 1
            with suppress(Exception):  # it may be alive and only out of reach
                self._ray.kill(self._actors[worker])
            if self._deaths[worker] > RETRIES:
                reason, *_ = [*str(error).strip().splitlines(), type(error).__name__]
                raise ClusterError(
                    f"worker {worker + 1} of {self._room.workers} died {self._deaths[worker]} times, the last time on "
                    f"node {self._nodes[worker]} ({reason}). See that node's memory and its Ray logs; a smaller "
                    "--memory or more --workers make a worker smaller"
                )
            try:
                self._check_version(worker, self._start_replacement(worker))
                for call in self._kept[worker]:
                    self._result(self._send(call))
                return
            except self._lost_errors as another:
                error = another

    def _start_replacement(self, worker: int) -> Any:
        """Starts a worker, with CPUs of its own if there are any, else beside another worker; returns its greeting."""
        for cpus, seconds in ((self._room.cpus, PATIENCE), (0, START_WITHIN)):
            self._actors[worker] = self._create(cpus)
            greeting = self._actors[worker].hello.remote()
            ready, _ = self._ray.wait([greeting], timeout=seconds)
            if ready:
                return greeting
            self._ray.kill(self._actors[worker])
        raise ClusterError(
            f"worker {worker + 1} of {self._room.workers} died on node {self._nodes[worker]}, and the cluster has no "
            "room for another one: add a node"
        )

    def _report_progress(self) -> None:
        """Reports how far all workers are, unless one of them does not answer at once."""
        assert self._progress is not None
        asked = [actor.progress.options(concurrency_group="watch").remote() for actor in self._actors]
        try:
            answers = self._ray.get(asked, timeout=WATCH_EVERY)
        except (self._ray.exceptions.GetTimeoutError, *self._lost_errors):
            return
        for phase in dict.fromkeys(phase for phases in answers for phase in phases):
            done, total = map(sum, zip(*(phases.get(phase, (0, 0)) for phases in answers), strict=True))
            # Never back, although a replacement begins anew.
            self._furthest[phase] = max(done, self._furthest.get(phase, 0))
            self._progress(phase, self._furthest[phase], total)

    def _end_all(self) -> None:
        """Ends all workers and waits for it: one that merely loses its last handle ends later and logs an error."""
        with suppress(Exception):
            leaving = [actor.close.remote() for actor in self._actors]
            self._ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_WITHIN)
        until = time.monotonic() + LEAVE_WITHIN
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)
                while time.monotonic() < until:  # until it answers with an error
                    self._ray.get(actor.hello.remote(), timeout=LEAVE_WITHIN)


class RayWorker(Worker):
    """A worker as a Ray actor, which also says on which node it runs."""

    def hello(self) -> tuple[str, str]:
        """Returns the node's address and the version of this package there."""
        import ray

        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return node, __version__
