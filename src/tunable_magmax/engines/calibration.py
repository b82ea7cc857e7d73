"""How fast this machine is at a given merge, measured in about a second. Nothing is kept between calls."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from statistics import median

import torch

from tunable_magmax.checkpoints.layout import Layout, Mergeable, build_layout
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.engines.cost import Speeds
from tunable_magmax.engines.inputs import FileVectors, Inputs
from tunable_magmax.merging.kernels import Kernels
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.reading import working_dtype
from tunable_magmax.merging.resources import available_memory
from tunable_magmax.merging.state_dicts import MemoryVectors, signature_of
from tunable_magmax.merging.stream import Merge

SAMPLE = 96 << 20
"""Bytes of the inputs that are read, unless time is up before."""
READ_SECONDS, AGAIN_SECONDS, COMPUTE_SECONDS, WRITE_SECONDS = 0.3, 0.1, 0.3, 0.2
VALUES = 1 << 24
"""Values of the invented models that the kernels are timed on: more than caches hold."""
PARTS = 4
"""Tensors of the invented models, so that threads can share the auction of `scope: tensor`."""
BLOCK = 1 << 20

Part = tuple[int, Mergeable, int, int]
"""A source, a tensor, and the elements start:stop of it."""


def measure_speeds(inputs: Inputs, options: Options, kernels: Kernels, threads: int, folder: Path | None) -> Speeds:
    """Read a sample of the inputs, merge an invented model of as many tasks, and write a file in `folder`, if given."""
    sample = list(_sample(inputs, kernels.chunk))
    _warm_up(inputs)
    read, read_cpu, done = _read(inputs, sample, threads, READ_SECONDS)
    read_again, _, _ = _read(inputs, sample[:done], threads, AGAIN_SECONDS)
    survey, decide, measure, render = _compute(inputs.layout, options, kernels, len(inputs.labels) - 1, threads)
    write, write_cpu = (None, 0.0) if folder is None else _write(folder)
    sources = range(len(inputs.labels))
    every = sum(inputs.bytes_of(tensor, source) for tensor in inputs.layout.mergeable for source in sources)
    return Speeds(
        threads=threads,
        read=read,
        read_again=read_again,
        read_cpu=read_cpu,
        survey=survey,
        decide=decide,
        measure=measure,
        render=render,
        write=write,
        write_cpu=write_cpu,
        keeps_cache=every < (available_memory() or 0) / 2,
    )


def _sample(inputs: Inputs, chunk: int) -> Iterator[Part]:
    """Parts of the inputs worth `SAMPLE` bytes: all of a small model, else any, elsewhere each time.

    Always the same parts would be cached after the first estimate, and the next one would promise too much.
    """
    layout = inputs.layout
    sources = [source for source in range(len(inputs.labels)) if source not in layout.derived]
    whole = [(source, tensor, 0, tensor.size) for tensor in layout.mergeable for source in sources]
    if sum(_bytes(inputs, part) for part in whole) <= SAMPLE:
        for source, tensor, _, size in whole:
            for start in range(0, size, chunk):
                yield source, tensor, start, min(start + chunk, size)
        return
    dice, begins, size = random.Random(), [tensor.element for tensor in layout.mergeable], 0
    while size < SAMPLE:
        element, source = dice.randrange(layout.elements), dice.choice(sources)
        tensor = layout.mergeable[bisect_right(begins, element) - 1]
        start = (element - tensor.element) // chunk * chunk
        part = source, tensor, start, min(start + chunk, tensor.size)
        size += _bytes(inputs, part)
        yield part


def _read_with(inputs: Inputs, source: int) -> list[int]:
    """What a merge reads when it reads a source: with the base all adapters, which are computed from it."""
    return [0, *sorted(inputs.layout.derived)] if source == 0 else [source]


def _bytes(inputs: Inputs, part: Part) -> int:
    """What files hold of a part."""
    source, tensor, start, stop = part
    stored = sum(inputs.bytes_of(tensor, k) for k in _read_with(inputs, source))
    return stored * (stop - start) // max(tensor.size, 1)


def _warm_up(inputs: Inputs) -> None:
    """Compute a value of each adapter, of each type: the first product of a process compiles or loads its loops."""
    vectors = FileVectors(inputs.checkpoints)
    for source, adapter in inputs.adapters.items():
        made = {name for name, part in adapter.parts.items() if part.product is not None}
        own = (tensor for tensor in inputs.layout.mergeable if tensor.size and tensor.infos[source].name in made)
        for tensor in {tensor.working: tensor for tensor in own}.values():
            vectors.read(source, tensor, 0, 1, torch.empty(1, dtype=working_dtype(tensor)))


def _read(inputs: Inputs, sample: Sequence[Part], threads: int, seconds: float) -> tuple[float, float, int]:
    """Bytes per second, CPU seconds per byte, and how many parts there was time for.

    Right factors of adapters are kept, as in a merge that has room.
    """
    if not sample:
        return 1e9, 0.0, 0  # nothing to merge: any number will do
    vectors, numbers = FileVectors(inputs.checkpoints, inputs.layout.factor_bytes), count()
    longest = max(stop - start for _, _, start, stop in sample)
    local = threading.local()
    begin, cpu = time.perf_counter(), time.process_time()

    def work(_: int) -> int:
        local.scratch = torch.empty((2, longest), dtype=torch.float64)
        size = 0
        while (number := next(numbers)) < len(sample) and time.perf_counter() - begin < seconds:
            source, tensor, start, stop = sample[number]
            base, values = local.scratch.view(working_dtype(tensor))[:, : stop - start]
            for k in _read_with(inputs, source):
                vectors.read(k, tensor, start, stop, values if k in inputs.layout.derived else base)
            size += _bytes(inputs, sample[number])
        return size

    with ThreadPoolExecutor(threads) as pool:
        size = max(1, sum(pool.map(work, range(threads))))
    wall = max(time.perf_counter() - begin, 1e-6)
    return size / wall, (time.process_time() - cpu) / size, min(next(numbers), len(sample))


def _compute(layout: Layout, options: Options, kernels: Kernels, tasks: int, threads: int) -> tuple[float, ...]:
    """Elements per second of survey, auction, measuring and rendering, with the merge's own method and tasks."""
    largest = max(layout.mergeable, key=lambda tensor: tensor.size, default=None)
    dtype = torch.float32 if largest is None else working_dtype(largest)
    size = max(1 << 12, VALUES // (tasks + 1) // PARTS)
    noise = torch.randn(size + 101 * (tasks + 1), dtype=dtype, generator=torch.Generator().manual_seed(0))
    sources = [{f"{k}": noise[101 * t + k :][:size].clone() for k in range(PARTS)} for t in range(tasks + 1)]
    weights = options.weights if options.budget is None else tuple(map(Fraction, options.budget))
    # The scale is a number, so that deciding and measuring can be told apart.
    options = replace(options, scale=1.0, weights=weights, budget=None, include=None, exclude=None)
    labels = [f"{t}" for t in range(tasks + 1)]
    signatures = [signature_of(source, label) for source, label in zip(sources, labels, strict=True)]
    invented = build_layout(signatures, labels, None, None)
    vectors = MemoryVectors(invented, sources[0], sources[1:], torch.device("cpu"))
    out = torch_dtype(options.out_dtype or (largest.widest if largest else "F32"))
    assert out is not None
    results = [torch.empty(size, dtype=out) for _ in range(PARTS)]

    def once() -> list[float]:
        method = METHODS[options.method](options, tasks)
        with Merge(invented, vectors, options, kernels, labels=labels, threads=threads, method=method) as merge:
            return [
                _seconds(merge.survey),
                _seconds(merge.decide),
                _seconds(lambda: merge.measure(merge.places)),
                _seconds(lambda: list(merge.render(lambda p: results[p.place.tensor][p.start : p.stop]))),
            ]

    once()  # loads the compiled kernels, or compiles them
    begin, found = time.perf_counter(), [once()]
    while time.perf_counter() - begin < COMPUTE_SECONDS:
        found.append(once())
    return tuple(PARTS * size / max(median(times), 1e-7) for times in zip(*found, strict=True))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _write(folder: Path) -> tuple[float, float]:
    """Bytes per second to a new file until they are on the disk, and CPU seconds per byte, with a digest beside it."""
    block, size, digest = os.urandom(BLOCK), 0, hashlib.sha256()
    begin, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        while time.perf_counter() - begin < WRITE_SECONDS and size < SAMPLE:
            hashing = hasher.submit(digest.update, block)
            size += file.write(block)
            hashing.result()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - begin), (time.process_time() - cpu) / size
