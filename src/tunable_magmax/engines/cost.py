"""What a merge costs: bytes from headers, and seconds from how fast this machine is, measured in about a second.

A phase reads, computes and writes at the same time, so it takes as long as the slowest of the three; phases follow each
other, so their times add up. docs/scale.md shows estimates beside measured merges.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tunable_magmax.checkpoints.layout import Layout, Mergeable, build_layout
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.engines.inputs import Inputs
from tunable_magmax.engines.vectors import FileVectors
from tunable_magmax.merging.kernels import Kernels
from tunable_magmax.merging.methods import METHODS, Method
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import Sources, working_dtype
from tunable_magmax.merging.resources import Limits, MemoryPlan, available_memory
from tunable_magmax.merging.state_dicts import MemoryVectors, signature_of
from tunable_magmax.merging.stream import Merge

UNCERTAINTY = 3.0
"""The factor either side that an estimate states: what a busy machine and its caches did in docs/scale.md."""
RAY_START = 20.0
"""Seconds to start Ray and its workers with what they import: 8 to 9 in docs/cluster.md, 17 to 24 on busy cores."""

SAMPLE = 96 << 20
"""Bytes of the inputs that are read, unless time is up before."""
READ_SECONDS, AGAIN_SECONDS, COMPUTE_SECONDS, WRITE_SECONDS = 0.3, 0.1, 0.3, 0.2
VALUES = 1 << 24
"""Values of the invented model that the kernels are timed on: more than caches hold."""
TENSORS = 4
"""Tensors of the invented model, so that threads can share the auction of `scope: tensor`."""
BLOCK = 1 << 20

# -- bytes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What a merge has to do: elements, bytes to read in each phase, and bytes to write."""

    elements: int
    survey: int
    decide: int
    measure: int
    render: int
    written: int
    passes: int
    largest: int = 0
    """Elements that one thread must auction alone: the largest tensor of `scope: tensor`."""
    stashed: bool = False
    """Whether the merged vector is kept in memory from measuring to rendering."""
    measured_early: bool = False
    """Whether the survey measures too."""

    @property
    def bytes_to_read(self) -> int:
        return self.survey + self.decide + self.measure + self.render


def load_of(inputs: Inputs, options: Options, memory: MemoryPlan, method: Method, written: int) -> Load:
    """Returns the load of a merge. The method must know the number of elements (`assume`)."""
    layout, size = inputs.layout, inputs.bytes_of
    base = sum(size(tensor, 0) for tensor in layout.mergeable)
    every = base + sum(size(tensor, t + 1) for tensor in layout.mergeable for t in range(method.tasks))
    taken = [(tensor, method.combined(k, tensor.size)) for k, tensor in enumerate(layout.mergeable)]
    combined = sum(size(tensor, t + 1) for tensor, own in taken for t in own)
    pairs = combined + sum(size(tensor, 0) * len(own) for tensor, own in taken)
    largest = max((tensor.size for tensor in layout.mergeable), default=0)
    # A cut by magnitude reads base and task for a histogram of magnitudes and again to cut. The bins are 1/256 of a
    # magnitude wide, so about one element in 256 is in the one that matters; if these are too many to list, they are
    # counted more closely before the cut.
    crowded = (layout.elements if options.scope == "model" else largest) // 256
    looks = (2 if crowded <= memory.room else 3) if method.cuts_by_magnitude else 0
    measures = options.scale is None and (method.plane_rows > 0 or method.whole)
    # A matrix that is merged whole is made from the base's values before these are read again for the output.
    made = base if method.whole and not memory.stash else 0
    return Load(
        elements=layout.elements,
        survey=every,
        decide=looks * pairs,
        measure=base + combined if measures else 0,
        render=base + made + sum(info.nbytes for info in layout.copied) + (0 if memory.stash else combined),
        written=written,
        passes=2 + looks + measures,
        largest=largest if options.scope == "tensor" else 0,
        stashed=memory.stash > 0,
        measured_early=options.scale is None and not measures,
    )


# -- seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speed of a machine with all threads: bytes and elements per second. Elements are with all their tasks."""

    threads: int
    read: float
    """From the files as they are now, perhaps partly cached."""
    read_again: float
    """In the walks after the first: faster if all inputs fit in free memory."""
    read_cpu: float
    """CPU seconds of one core for each byte read."""
    survey: float
    decide: float
    measure: float
    render: float
    write: float | None
    """None if no output was given; then writing is not counted."""
    write_cpu: float = 0.0
    """CPU seconds of one core for each byte written, with its digest."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, in seconds that each of its parts would take alone."""

    name: str
    reading: float
    computing: float
    """On all cores, with the work of reading."""
    writing: float = 0.0
    waiting: float = 0.0
    """The start of a program; nothing overlaps with it."""

    @property
    def seconds(self) -> float:
        return max(self.reading, self.computing, self.writing) + self.waiting


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a merge, by phase.

    >>> Estimate((Phase("survey", 3.0, 2.0), Phase("render", 2.0, 1.0, 4.0))).seconds
    7.0
    """

    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def low(self) -> float:
        return self.seconds / UNCERTAINTY

    @property
    def high(self) -> float:
        return self.seconds * UNCERTAINTY

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate for JSON."""
        phases = {phase.name: {"seconds": phase.seconds, **asdict(phase)} for phase in self.phases}
        for phase in phases.values():
            del phase["name"]
        return {"seconds": self.seconds, "low": self.low, "high": self.high, "phases": phases}


def estimate(load: Load, speeds: Speeds, start: float = 0.0) -> Estimate:
    """Returns the time of a merge on a machine of these speeds, by a program that takes `start` seconds to start."""

    def computing(size: int, seconds: float) -> float:
        return seconds + size * speeds.read_cpu / speeds.threads

    measure = load.elements / speeds.measure
    survey = load.elements / speeds.survey + (measure if load.measured_early else 0.0)
    # A stash leaves only the last step to rendering.
    render = max(0.0, load.elements / speeds.render - (measure if load.stashed else 0.0))
    render += load.written * speeds.write_cpu / speeds.threads
    writing = 0.0 if speeds.write is None else load.written / speeds.write
    # A cut by magnitude reads where it computes, not ahead. The largest tensor has one thread.
    cutting = load.decide / speeds.read_again
    auction = cutting + max(load.elements, load.largest * speeds.threads) / speeds.decide
    again = speeds.read_again
    phases = [
        Phase("start", 0.0, 0.0, waiting=start),
        Phase("survey", load.survey / speeds.read, computing(load.survey, survey)),
        Phase("auction", cutting, auction),
        Phase("measure", load.measure / again, computing(load.measure, measure)),
        Phase("render", load.render / again, computing(load.render, render), writing),
    ]
    absent = {"start": not start, "measure": not load.measure}
    return Estimate(tuple(phase for phase in phases if not absent.get(phase.name)))


# -- measuring this machine -------------------------------------------------------------------------------------------

Range = tuple[Mergeable, int, int]
"""A tensor, and the elements start:stop of it."""


def measure_speeds(inputs: Inputs, options: Options, kernels: Kernels, threads: int, folder: Path | None) -> Speeds:
    """Reads a sample of the inputs, merges an invented model of as many tasks, and writes a file in `folder`."""
    sample = list(_sample(inputs, kernels.chunk))
    # The first product of an adapter in a process compiles its loops.
    vectors = FileVectors(inputs.checkpoints)
    for tensor in inputs.layout.mergeable if inputs.adapters else ():
        for source in inputs.adapters:
            vectors.read(source, tensor, 0, min(1, tensor.size), torch.empty(1, dtype=working_dtype(tensor)))
    read, read_cpu, done = _read(inputs, sample, threads, READ_SECONDS)
    again, _, _ = _read(inputs, sample[:done], threads, AGAIN_SECONDS)
    every = sum(_bytes(inputs, (tensor, 0, tensor.size)) for tensor in inputs.layout.mergeable)
    survey, decide, measure, render = _compute(inputs.layout, options, kernels, len(inputs.paths) - 1, threads)
    write, write_cpu = (None, 0.0) if folder is None else _write(folder)
    return Speeds(
        threads=threads,
        read=read,
        read_again=again if every < (available_memory() or 0) / 2 else read,
        read_cpu=read_cpu,
        survey=survey,
        decide=decide,
        measure=measure,
        render=render,
        write=write,
        write_cpu=write_cpu,
    )


def _bytes(inputs: Inputs, part: Range) -> int:
    """Returns the bytes of a range in the files of all sources."""
    tensor, start, stop = part
    stored = sum(inputs.bytes_of(tensor, source) for source in range(len(inputs.paths)))
    return stored * (stop - start) // max(tensor.size, 1)


def _sample(inputs: Inputs, chunk: int) -> Iterator[Range]:
    """Yields random ranges worth `SAMPLE` bytes, or all of a small model.

    The same ranges each time would be cached after the first estimate, and the next one would promise too much.
    """
    ranges = [
        (tensor, start, min(start + chunk, tensor.size))
        for tensor in inputs.layout.mergeable
        for start in range(0, tensor.size, chunk)
    ]
    random.shuffle(ranges)
    size = 0
    for part in ranges:
        if size < SAMPLE:
            size += _bytes(inputs, part)
            yield part


def _read(inputs: Inputs, sample: Sequence[Range], threads: int, seconds: float) -> tuple[float, float, int]:
    """Returns bytes per second, CPU seconds per byte, and for how many ranges there was time."""
    if not sample:
        return 1e9, 0.0, 0  # nothing to merge: any number will do
    vectors, numbers = FileVectors(inputs.checkpoints, inputs.layout.factor_bytes), count()
    longest = max(stop - start for _, start, stop in sample)
    begin, cpu = time.perf_counter(), time.process_time()

    def work(_: int) -> int:
        buffers = torch.empty((2, longest), dtype=torch.float64)
        size = 0
        while (number := next(numbers)) < len(sample) and time.perf_counter() - begin < seconds:
            tensor, start, stop = sample[number]
            base, task = buffers.view(working_dtype(tensor))[:, : stop - start]
            for source in range(len(inputs.paths)):
                vectors.read(source, tensor, start, stop, task if source else base)
            size += _bytes(inputs, sample[number])
        return size

    with ThreadPoolExecutor(threads) as pool:
        size = max(1, sum(pool.map(work, range(threads))))
    wall = max(time.perf_counter() - begin, 1e-6)
    return size / wall, (time.process_time() - cpu) / size, min(next(numbers), len(sample))


def _compute(layout: Layout, options: Options, kernels: Kernels, tasks: int, threads: int) -> tuple[float, ...]:
    """Returns elements per second of survey, auction, measuring and rendering, with the merge's method and tasks."""
    largest = max(layout.mergeable, key=lambda tensor: tensor.size, default=None)
    dtype = torch.float32 if largest is None else working_dtype(largest)
    size = max(1 << 12, VALUES // (tasks + 1) // TENSORS)
    noise = torch.randn(size + 101 * (tasks + 1), dtype=dtype, generator=torch.Generator().manual_seed(0))
    sources = [{f"{k}": noise[101 * t + k :][:size].clone() for k in range(TENSORS)} for t in range(tasks + 1)]
    weights = options.weights if options.budget is None else tuple(map(Fraction, options.budget))
    # The scale is a number, so that deciding and measuring can be told apart.
    options = replace(options, scale=1.0, weights=weights, budget=None, include=None, exclude=None)
    labels = [f"{t}" for t in range(tasks + 1)]
    signatures = [signature_of(source, label) for source, label in zip(sources, labels, strict=True)]
    invented = build_layout(signatures, labels, None, None)
    vectors = MemoryVectors(invented, sources[0], sources[1:], torch.device("cpu"))
    out = torch_dtype(options.out_dtype or (largest.widest if largest else "F32"))
    assert out is not None
    results = [torch.empty(size, dtype=out) for _ in range(TENSORS)]

    def once() -> list[float]:
        method = METHODS[options.method](options, tasks)
        with Merge(Sources(invented, vectors, labels), options, kernels, Limits(threads), method) as merge:
            return [
                _seconds(merge.survey),
                _seconds(merge.decide),
                _seconds(lambda: merge.measure(merge.places)),
                _seconds(lambda: list(merge.render(lambda p: results[p.place.tensor][p.start : p.stop]))),
            ]

    once()  # loads the compiled kernels, or compiles them
    begin, times = time.perf_counter(), [once()]
    while time.perf_counter() - begin < COMPUTE_SECONDS:
        times.append(once())
    return tuple(TENSORS * size / max(median(phase), 1e-7) for phase in zip(*times, strict=True))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(folder: Path) -> tuple[float, float]:
    """Returns bytes per second to a new file until they are on the disk, and CPU seconds per byte, with a digest."""
    block, size, digest = os.urandom(BLOCK), 0, hashlib.sha256()
    begin, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        while time.perf_counter() - begin < WRITE_SECONDS and size < SAMPLE:
            hashing = hasher.submit(digest.update, block)
            size += file.write(block)
            hashing.result()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - begin), (time.process_time() - cpu) / size
