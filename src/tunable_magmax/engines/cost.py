"""What a merge costs: bytes from headers, seconds from the speeds of a machine, and how both change on a cluster.

Pure arithmetic. A phase reads, computes and writes at the same time, so it takes as long as the slowest of the three;
phases follow each other, so their times add up. docs/scale.md shows the estimates beside measured merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.merging.methods import Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.resources import MemoryPlan

UNCERTAINTY = 3.0
"""The factor either side that an estimate states: what a busy machine and its caches did in docs/scale.md."""

RAY_START = 20.0
"""Seconds to start Ray and its workers with what they import: 8 to 9 in docs/cluster.md, 17 to 24 on busy cores."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a merge has to do: bytes to read in each phase, bytes to write, elements, and round trips of the auction."""

    elements: int
    survey: int
    decide: int
    measure: int
    render: int
    written: int
    passes: int
    rounds: int
    largest: int = 0
    """Elements that one thread must auction alone: the largest tensor of `scope: tensor`."""
    stashed: bool = False
    """Whether the merged vector is kept in memory from measuring to rendering."""
    measured_early: bool = False
    """Whether the survey measures too."""

    @property
    def bytes_to_read(self) -> int:
        return self.survey + self.decide + self.measure + self.render


def load_of(
    layout: Layout,
    options: Options,
    memory: MemoryPlan,
    method: Method,
    written: int,
    stored: Callable[[Mergeable, int], int] | None = None,
) -> Load:
    """The load of a merge. The method must have been told the number of elements (`assume`).

    `stored(tensor, source)`: the bytes that a source's files hold of a tensor, if they are not simply its values.
    """
    size = stored or (lambda tensor, source: tensor.infos[source].nbytes)
    tasks = range(1, method.tasks + 1)
    base = sum(size(tensor, 0) for tensor in layout.mergeable)
    every = base + sum(size(tensor, t) for tensor in layout.mergeable for t in tasks)
    taken = [(tensor, method.combined(k, tensor.size)) for k, tensor in enumerate(layout.mergeable)]
    combined = sum(size(tensor, t + 1) for tensor, own in taken for t in own)
    pairs = combined + sum(size(tensor, 0) * len(own) for tensor, own in taken)
    copied = sum(info.nbytes for info in layout.copied)
    largest = max((tensor.size for tensor in layout.mergeable), default=0)
    looks = cut_looks(layout.elements if options.scope == "model" else largest, memory.room)
    looks = looks if method.cuts_by_magnitude else 0
    measures = options.scale is None and method.plane_rows > 0
    taking_part = max((len(own) for _, own in taken), default=0)
    return Load(
        elements=layout.elements,
        survey=every,
        decide=looks * pairs,
        measure=base + combined if measures else 0,
        render=base + copied + (0 if memory.stash else combined),
        written=written,
        passes=2 + looks + measures,
        rounds=auction_rounds(taking_part, looks) if method.plane_rows and options.scope == "model" else 0,
        largest=largest if options.scope == "tensor" else 0,
        stashed=memory.stash > 0,
        measured_early=options.scale is None and not method.plane_rows,
    )


def cut_looks(elements: int, room: int) -> int:
    """How often a cut by magnitude looks at base and task, if `room` elements can be listed.

    Once for a histogram of magnitudes and once to cut. The bins are 1/256 of a magnitude wide, so about one element in
    256 is in the one that matters; if these are too many to list, they are counted more closely, and then cut. Only
    magnitudes that crowd in one bin and still differ take more.

    >>> cut_looks(10**8, room=500_000), cut_looks(10**9, room=500_000)
    (2, 3)
    """
    return 2 if elements // 256 <= room else 3


def auction_rounds(tasks: int, looks: int) -> int:
    """Questions that an auction asks about all elements: each is a round trip on a cluster.

    For each task: count its candidates, draw, award, retire; for leftovers, draw, award, retire and unite; then count
    what it holds. A cut by magnitude adds its looks, and a draw if equals are too many to list.

    >>> auction_rounds(tasks=4, looks=0)
    38
    """
    return 2 + tasks * (9 + (looks + 1 if looks else 0))


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a machine can do, with all threads: bytes and elements per second. Elements are with all their tasks."""

    threads: int
    read: float
    """From the files as they are now, perhaps partly cached."""
    read_again: float
    """What was read a moment ago, and is cached if the inputs fit in the memory that is free."""
    read_cpu: float
    """CPU seconds of one core for each byte read."""
    survey: float
    decide: float
    measure: float
    render: float
    write: float | None
    """None if nobody said where to write; then writing is not counted."""
    write_cpu: float = 0.0
    """CPU seconds of one core for each byte written, with its digest."""
    keeps_cache: bool = False
    """Whether all inputs fit in free memory, so that all walks but the first are served from there."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, in seconds that each part would take alone."""

    name: str
    reading: float
    computing: float
    """On all cores, with the work of reading."""
    writing: float = 0.0
    waiting: float = 0.0
    """Round trips on a cluster, or the start of a program; nothing overlaps with them."""

    @property
    def seconds(self) -> float:
        return max(self.reading, self.computing, self.writing) + self.waiting


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a merge, by phase. The start of a program counts only where `after` puts it in front.

    >>> found = Estimate((Phase("survey", 3.0, 2.0), Phase("render", 2.0, 1.0, 4.0)))
    >>> found.seconds, found.after(2.5).seconds
    (7.0, 9.5)
    """

    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def after(self, start: float) -> Estimate:
        """The same with `start` seconds before it, in which nothing is read, computed or written."""
        return Estimate((Phase("start", 0.0, 0.0, waiting=start), *self.phases)) if start else self

    @property
    def low(self) -> float:
        return self.seconds / UNCERTAINTY

    @property
    def high(self) -> float:
        return self.seconds * UNCERTAINTY

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        phases = {phase.name: {"seconds": phase.seconds, **asdict(phase)} for phase in self.phases}
        for phase in phases.values():
            del phase["name"]
        return {"seconds": self.seconds, "low": self.low, "high": self.high, "phases": phases}


def estimate(load: Load, speeds: Speeds) -> Estimate:
    """The time of a merge on one machine."""
    return _estimate(load, speeds, Cluster(workers=1, shared_bandwidth=math.inf, round_trip=0.0, commit=0.0))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers that are each like the measured machine, and what they share."""

    workers: float
    shared_bandwidth: float
    """Bytes per second that the shared file system gives, or takes, in all."""
    round_trip: float = 0.005
    """Seconds from a question to all workers until the last answer."""
    commit: float = 1.0
    """Seconds that the driver needs at the end, alone."""


def estimate_cluster(load: Load, speeds: Speeds, cluster: Cluster) -> Estimate:
    """The time of a merge whose elements are spread evenly over workers."""
    return _estimate(load, speeds, cluster)


def speedup(load: Load, speeds: Speeds, cluster: Cluster) -> float:
    """How many times faster a cluster is than one machine like its workers, without a cluster's costs."""
    together = estimate_cluster(load, speeds, cluster).seconds
    return estimate(load, speeds).seconds / together if together else math.inf


def most_speedup(load: Load, speeds: Speeds, cluster: Cluster) -> float:
    """What the speed-up tends to with ever more workers: the shared file system, round trips and commit remain."""
    endless = Cluster(math.inf, cluster.shared_bandwidth, cluster.round_trip, cluster.commit)
    return speedup(load, speeds, endless)


def _estimate(load: Load, speeds: Speeds, cluster: Cluster) -> Estimate:
    again = speeds.read_again if speeds.keeps_cache else speeds.read

    def reading(size: int, each: float) -> float:
        return size / min(each * cluster.workers, cluster.shared_bandwidth) if size else 0.0

    def computing(size: int, seconds: float) -> float:
        return (seconds + size * speeds.read_cpu / speeds.threads) / cluster.workers

    survey = load.elements / speeds.survey + (load.elements / speeds.measure if load.measured_early else 0.0)
    # A stash leaves the last step to rendering.
    render = load.elements / speeds.render - (load.elements / speeds.measure if load.stashed else 0.0)
    render += load.written * speeds.write_cpu / speeds.threads
    writing = 0.0 if speeds.write is None else reading(load.written, speeds.write)
    # One thread's work is not divided, however many workers there are.
    alone = load.largest * speeds.threads / speeds.decide
    choosing = reading(load.decide, again)
    phases = [
        Phase("survey", reading(load.survey, speeds.read), computing(load.survey, survey)),
        Phase(
            "auction",
            choosing,
            # A cut by magnitude reads where it computes, not ahead.
            choosing + max(computing(0, load.elements / speeds.decide), alone),
            waiting=load.rounds * cluster.round_trip,
        ),
        Phase("render", reading(load.render, again), computing(load.render, max(render, 0.0)), writing, cluster.commit),
    ]
    if load.measure:
        phases.insert(
            2, Phase("measure", reading(load.measure, again), computing(load.measure, load.elements / speeds.measure))
        )
    return Estimate(tuple(phases))
