"""What a sweep would do, from headers alone: `sweep --dry-run`, and what a sweep checks before it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.layout import Layout
from tunable_magmax.checkpoints.tensors import TensorInfo
from tunable_magmax.engines.inputs import Inputs, PathLike, read_names
from tunable_magmax.engines.local import DEFAULT_SHARD_SIZE, fingerprint_of
from tunable_magmax.engines.space import space_problem
from tunable_magmax.engines.weight_files import expected_shards
from tunable_magmax.errors import InputError
from tunable_magmax.files import parse_size, show_size
from tunable_magmax.merging.budget import read_weights
from tunable_magmax.merging.kernels import SLOTS, Kernels
from tunable_magmax.merging.methods import METHODS, Method, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import available_memory, kernels_for, working_threads
from tunable_magmax.workflows.points import Point
from tunable_magmax.workflows.sweep_ledger import Ledger

SPARE = 16 << 20
"""For the auction's short lists and the like, in bytes."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep would do, from headers alone. Sizes in bytes; `available` is None where nobody can tell."""

    method: str
    tasks: int
    elements: int
    points: tuple[tuple[str, tuple[str, ...], tuple[int, ...] | None], ...]
    """Name, weights and budget of each."""
    finished: tuple[str, ...]
    files_each: int
    bytes_each: int
    bytes_to_write: int
    memory: int
    available: int | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What the numbers above leave out."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        points = [{"name": n, "weights": w, "budget": b} for n, w, b in self.points]
        return {**asdict(self), "points": points}


@dataclass(frozen=True, slots=True)
class Job:
    """A sweep whose inputs are open and whose folder was looked at; nothing is written yet."""

    inputs: Inputs
    options: Options
    """Of all merges; without weights."""
    points: tuple[Point, ...]
    shard: int
    ledger: Ledger
    finished: Mapping[str, MergeReport]
    memory: int
    bound: int | None
    names: tuple[str, ...] | None

    @property
    def todo(self) -> list[Point]:
        return [point for point in self.points if point.name not in self.finished]


def plan_sweep(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike,
    points: Sequence[Point],
    *,
    reports_only: bool = False,
    **given: Any,
) -> SweepPlan:
    """Say what `sweep_checkpoints` would do; read no values, write nothing. What stands in its way is in `problems`.

    It takes the options of `sweep_checkpoints`, less `progress`.
    """
    with looked_at(base, tasks, out, points, reports_only=reports_only, **given) as job:
        layout = job.inputs.layout
        size, files = _size_of_point(job)
        return SweepPlan(
            method=job.options.method,
            tasks=len(tasks),
            elements=layout.elements,
            points=tuple(
                (point.name, tuple(map(str, point.weights)), _budget(at_point(job.options, point), layout.elements))
                for point in job.points
            ),
            finished=tuple(job.finished),
            files_each=0 if reports_only else files,
            bytes_each=0 if reports_only else size,
            bytes_to_write=0 if reports_only else size * len(job.todo),
            memory=job.memory,
            available=available_memory(),
            problems=tuple(problems_of(job, reports_only)),
            warnings=(*job.inputs.warnings(), *layout.warnings),
            notes=tuple(job.inputs.notes()),
        )


# -- looking ----------------------------------------------------------------------------------------------------------


@contextmanager
def looked_at(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike,
    points: Sequence[Point],
    *,
    reports_only: bool = False,
    memory: int | str | None = None,
    shard_size: int | str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    fresh: bool = False,
    digest_inputs: bool = False,
    base_model: str | None = None,
    names: Sequence[str] | None = None,
    **given: Any,
) -> Iterator[Job]:
    """Read and check everything that can be known before values are read; `given`: options of the merges."""
    called = read_names(names, len(tasks))
    options = _read_options(len(tasks), points, given)
    bound = None if memory is None else parse_size(memory, "memory")
    shard = DEFAULT_SHARD_SIZE if shard_size is None else parse_size(shard_size, "shard size")
    folder = Path(out)
    with Inputs(base, tasks, options) as inputs:
        for point in points:
            inputs.refuse_as_output(folder / point.name)
        fingerprint = {
            **fingerprint_of(inputs, options, shard, base_model, called),
            "digest_inputs": digest_inputs,
            "points": {point.name: list(map(str, point.weights)) for point in points},
        }
        places = [point.name for point in points]
        ledger = Ledger(folder, fingerprint, places, overwrite=overwrite, fresh=fresh)
        reports = {name: ledger.finished(name, reports_only) for name in places}
        finished = {name: report for name, report in reports.items() if report is not None}
        if not reports_only:
            ledger.check([name for name in places if name not in finished])
        needed = _memory_needed(inputs.layout, options, kernels_for(torch.device("cpu")), threads)
        yield Job(inputs, options, tuple(points), shard, ledger, finished, needed, bound, called)


def _read_options(tasks: int, points: Sequence[Point], given: Mapping[str, Any]) -> Options:
    """The options that all points share; every point's weights are checked against the number of tasks."""
    if given.keys() & {"weights", "budget"}:
        raise InputError("the points of a sweep are its weights: leave out weights and budget")
    options = Options.read(tasks, **given)
    if METHODS[options.method].weights == "refused":
        usable = ", ".join(name for name, method in METHODS.items() if method.weights != "refused")
        raise InputError(f"method {options.method!r} takes no weights, so there is nothing to sweep; use {usable}")
    if not points:
        raise InputError("a sweep needs points: make some with line, grid or listed")
    names = [point.name for point in points]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name!r} names two points of the sweep: their outputs would be in the same place")
    for point in points:
        try:
            at_point(options, point, tasks)
        except InputError as error:
            raise InputError(f"point {point.name}: {error}") from None
    return options


def at_point(options: Options, point: Point, tasks: int | None = None) -> Options:
    return replace(options, weights=read_weights(point.weights, len(point.weights) if tasks is None else tasks))


def problems_of(job: Job, reports_only: bool) -> Iterator[str]:
    if not job.todo:
        return
    need = f"the inputs are held in memory, and this sweep needs {show_size(job.memory)}"
    instead = "give a larger --memory, merge fewer tensors, or merge point by point with tmx merge, which streams"
    available = available_memory()
    if job.bound is not None and job.memory > job.bound:
        yield f"{need}, more than the {show_size(job.bound)} it may use: {instead}"
    elif job.bound is None and available is not None and job.memory > available:
        yield f"{need}, but {show_size(available)} are free: {instead.removeprefix('give a larger --memory, ')}"
    if not reports_only:
        to_write = _size_of_point(job)[0] * len(job.todo)
        if problem := space_problem(job.ledger.folder, to_write):
            yield problem


def _size_of_point(job: Job) -> tuple[int, int]:
    """Bytes and number of the weight files of one point."""
    shards = expected_shards(job.inputs.layout, job.options.out_dtype, job.shard)
    return sum(shard.size for shard in shards), len(shards)


def _budget(options: Options, elements: int) -> tuple[int, ...] | None:
    assert options.weights is not None
    return METHODS[options.method](options, len(options.weights)).expected_budget(elements)


def _memory_needed(layout: Layout, options: Options, kernels: Kernels, threads: int | None) -> int:
    """Bytes beyond the interpreter: the inputs, the bit planes, the merged vector where its length is needed, work."""
    sources = len(layout.mergeable[0].infos) if layout.mergeable else 2
    width = 8 if any(tensor.working == "F64" for tensor in layout.mergeable) else 4
    rows = method_of(options, sources - 1).plane_rows
    planes = rows * kernels.plane_bytes(layout.elements + SLOTS * len(layout.mergeable))
    kept = layout.elements * width if options.scale is None else 0
    at_once = working_threads(kernels, threads)
    work = (
        SPARE + at_once * (kernels.chunk * ((sources + 2) * width + 2 * 8) + layout.working_bytes) + layout.factor_bytes
    )
    return sum(info.nbytes for info in tensors_to_read(layout).values()) + planes + kept + work


def tensors_to_read(layout: Layout) -> dict[tuple[int, str], TensorInfo]:
    """What is read of each source, once even where tasks hold one tensor under names that are two in others."""
    return {
        (k, info.name): info
        for tensor in layout.mergeable
        for k, info in enumerate(tensor.infos)
        if k not in layout.derived
    }


def method_of(options: Options, tasks: int) -> Method:
    # Without weights it has the most rows of planes that it can have, so that every point's method fits into them.
    if options.method == "tunable_magmax":
        return TunableMagmax(options, tasks, reusable=True)
    return METHODS[options.method](options, tasks)
