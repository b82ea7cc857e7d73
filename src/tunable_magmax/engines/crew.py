"""The workers of a merge as Ray actors: where they run, calls to them, and others in place of those that die.

A call that changes a worker's state is kept. A new worker is given all of its predecessor's, which takes it to the
same state, and then what its predecessor has not answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tunable_magmax.engines.worker import Worker
from tunable_magmax.errors import ClusterError, InputError
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
    """A worker's method to call."""

    worker: int
    name: str
    arguments: tuple[Any, ...] = ()
    replay: tuple[Any, ...] | None = None
    """Arguments of the call that takes a successor to the state in which this one leaves the worker; None: no call."""

    @classmethod
    def lasting(cls, worker: int, name: str, *arguments: Any) -> Call:
        """A call on which later ones build."""
        return cls(worker, name, arguments, arguments)


@dataclass(frozen=True, slots=True)
class Room:
    """How many workers a merge has, and the CPUs that each of them gets."""

    workers: int
    cpus: int


def find_room(nodes: Sequence[float], workers: int | None, threads: int | None) -> Room:
    """Divide nodes of the given numbers of CPUs: by default a worker on each, otherwise as many CPUs as all can have.

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


class Crew:
    """Workers at their places, known by number. A context manager: leaving it ends them."""

    def __init__(self, ray: Any, room: Room, watch: Callable[[dict[str, tuple[int, int]]], None] | None = None) -> None:
        self._ray, self._room, self._watch = ray, room, watch
        self._kept: list[list[Call]] = [[] for _ in range(room.workers)]
        self._deaths = [0] * room.workers
        self._nodes = ["a node not known yet"] * room.workers
        self._watched = time.monotonic()
        self._actor = ray.remote(concurrency_groups={"watch": 1}, max_restarts=0)(Member)
        self._members = [self._create(room.cpus) for _ in range(room.workers)]

    def __enter__(self) -> Crew:
        try:
            self._await_all()
        except BaseException:
            self._dismiss()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._dismiss()

    def each(self, calls: deque[Call]) -> Iterator[tuple[Call, Any]]:
        """Make all calls, those to one worker in order; yields each with its result as it is answered.

        Calls that are added meanwhile are made as well.
        """
        pending: dict[Any, Call] = {}
        while calls or pending:
            while calls:
                call = calls.popleft()
                pending[self._send(call)] = call
            for answer in self._answered(list(pending)):
                call = pending[answer]
                try:
                    result = self._result(answer)
                except self._losses as error:
                    self._replace(call.worker, error)
                    # Whatever else was asked of it is lost as well.
                    for lost, again in [(a, c) for a, c in pending.items() if c.worker == call.worker]:
                        del pending[lost]
                        pending[self._send(again)] = again
                    continue
                del pending[answer]
                if call.replay is not None:
                    self._kept[call.worker].append(call)
                yield call, result

    def _answered(self, pending: list[Any]) -> list[Any]:
        """The first answer, once there is one."""
        while True:
            ready: list[Any] = self._ray.wait(pending, timeout=WATCH_EVERY if self._watch else None)[0]
            if self._watch and time.monotonic() - self._watched > WATCH_EVERY:
                self._look_around()
                self._watched = time.monotonic()
            if ready:
                return ready

    @property
    def _losses(self) -> tuple[type[Exception], ...]:
        known = self._ray.exceptions
        # A large answer can be lost with its node after its worker had given it.
        return known.RayActorError, known.ObjectLostError, known.NodeDiedError

    def _send(self, call: Call) -> Any:
        return self._told(call.worker, call.name, call.arguments)

    def _told(self, worker: int, name: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._members[worker], name).remote(*arguments)

    def _result(self, answer: Any) -> Any:
        """What a worker answered; what it raised is raised as if it were here."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def _create(self, cpus: int) -> Any:
        return self._actor.options(num_cpus=cpus, scheduling_strategy="SPREAD").remote()

    def _await_all(self) -> None:
        greetings = [member.hello.remote() for member in self._members]
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
                self._welcome(k, greeting)
            except self._losses as error:
                self._replace(k, error)

    def _welcome(self, worker: int, greeting: Any) -> None:
        node, version = self._ray.get(greeting)
        self._nodes[worker] = node
        if version != __version__:
            raise ClusterError(
                f"node {node} has tunable-magmax {version}, this machine {__version__}: "
                "install the same version on all nodes"
            )

    def _replace(self, worker: int, error: Exception) -> None:
        """Start another worker in a dead one's place and take it to the same state; it may die as well."""
        while True:
            self._deaths[worker] += 1
            with suppress(Exception):  # it may be alive and only out of reach
                self._ray.kill(self._members[worker])
            if self._deaths[worker] > RETRIES:
                raise ClusterError(
                    f"worker {worker + 1} of {self._room.workers} died {self._deaths[worker]} times, the last time on "
                    f"node {self._nodes[worker]} ({_reason(error)}). See that node's memory and its Ray logs; a "
                    "smaller --memory or more --workers make a worker smaller"
                )
            try:
                self._welcome(worker, self._settle_in(worker))
                for call in self._kept[worker]:
                    assert call.replay is not None
                    self._result(self._told(worker, call.name, call.replay))
                return
            except self._losses as another:
                error = another

    def _settle_in(self, worker: int) -> Any:
        """A new worker's greeting: with CPUs of its own if there are any, otherwise beside another worker."""
        for cpus, seconds in ((self._room.cpus, PATIENCE), (0, START_WITHIN)):
            self._members[worker] = self._create(cpus)
            greeting = self._members[worker].hello.remote()
            ready, _ = self._ray.wait([greeting], timeout=seconds)
            if ready:
                return greeting
            self._ray.kill(self._members[worker])
        raise ClusterError(
            f"worker {worker + 1} of {self._room.workers} died on node {self._nodes[worker]}, and the cluster has no "
            "room for another one: add a node"
        )

    def _look_around(self) -> None:
        """Tell the watcher how far all workers are; who does not answer at once is left out this time."""
        assert self._watch is not None
        asked = [member.progress.options(concurrency_group="watch").remote() for member in self._members]
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=WATCH_EVERY)
        if len(ready) < len(asked):
            return
        totals: dict[str, tuple[int, int]] = {}
        for answer in ready:
            try:
                found = self._ray.get(answer)
            except self._losses:
                return
            for phase, (done, total) in found.items():
                before = totals.get(phase, (0, 0))
                totals[phase] = (before[0] + done, before[1] + total)
        self._watch(totals)

    def _dismiss(self) -> None:
        """End all workers, and see them ended: one that merely loses its last handle ends in its own time, noisily."""
        with suppress(Exception):
            leaving = [member.close.remote() for member in self._members]
            self._ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_WITHIN)
        until = time.monotonic() + LEAVE_WITHIN
        for member in self._members:
            with suppress(Exception):
                self._ray.kill(member)
                while time.monotonic() < until:  # until it answers with an error
                    self._ray.get(member.hello.remote(), timeout=LEAVE_WITHIN)


class Member(Worker):
    """A worker as an actor: one that says where it is."""

    def hello(self) -> tuple[str, str]:
        """The node's address, and the version of this package there."""
        import ray

        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return node, __version__


def _reason(error: Exception) -> str:
    """The first sentence of what Ray says that is about the case."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next(
        (line for line in lines if "dead" in line or "died" in line or "exit" in line), lines[0] if lines else ""
    )
    return told[:200] or type(error).__name__
