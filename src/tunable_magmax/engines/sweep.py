"""Many merges of one sequence, each a checkpoint of its own: the inputs are read into memory once."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunable_magmax.checkpoints.layout import Layout, Mergeable
from tunable_magmax.checkpoints.shards import plan_shards
from tunable_magmax.checkpoints.tensors import TensorInfo, torch_dtype
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.local import (
    DEFAULT_SHARD_SIZE,
    Inputs,
    PathLike,
    fingerprint_of,
    log_merge,
    output_tensors,
    resumable,
    write_sidecars,
    write_weights,
)
from tunable_magmax.engines.sweep_ledger import Ledger
from tunable_magmax.errors import InputError
from tunable_magmax.merging.budget import read_weights
from tunable_magmax.merging.kernels import SLOTS, Kernels, kernels_for
from tunable_magmax.merging.memory import read_threads
from tunable_magmax.merging.methods import METHODS, Method, TunableMagmax
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.stream import Merge, Progress
from tunable_magmax.preference.atomic import write_atomic
from tunable_magmax.preference.points import Point
from tunable_magmax.sizes import parse_size, show_size

VERSION = 1
LOG = "sweep.log"
SPARE = 16 << 20
"""For the auction's short lists and the like, in bytes."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One merge of a sweep. `counts` and `leftovers` are None for methods without owners."""

    name: str
    weights: tuple[str, ...]
    """One for each task, as text that reads back exactly: 1/3 is one third."""
    report: str
    """Where the merge's report is, from the sweep's folder."""
    scale: float
    merged_length: float
    leftovers: int | None
    counts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep made; `to_json` is the file sweep.json."""

    method: str
    tasks: int
    elements: int
    last_length: float
    options: Mapping[str, Any]
    """The options of all merges, less weights."""
    points: tuple[SweepPoint, ...]
    warnings: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    """Points that an earlier call had finished. It says nothing about the sweep, so it is not in the file."""

    def to_json(self) -> str:
        """JSON text with stable order: equal sweeps give equal bytes, however often they were interrupted."""
        record = {key: value for key, value in asdict(self).items() if key != "skipped"}
        return json.dumps({"version": VERSION, **record}, indent=1) + "\n"


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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        points = [{"name": n, "weights": w, "budget": b} for n, w, b in self.points]
        return {**asdict(self), "points": points}


@dataclass(frozen=True, slots=True)
class _Job:
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

    @property
    def todo(self) -> list[Point]:
        return [point for point in self.points if point.name not in self.finished]


def sweep_checkpoints(
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
    progress: Progress | None = None,
    **given: Any,
) -> Sweep:
    """Merge for each of `points` (`line`, `grid` or `listed` make them) into `out/NAME`, reading the inputs once.

    Every output equals that of `merge_checkpoints` with the point's weights, to the byte; so do the options in
    `given`. With `reports_only` there are only reports, `out/NAME.report.json`. Called again, finished points are
    skipped. All inputs are in memory at a time: more than `memory`, or than there is, is refused beforehand.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from tunable_magmax.preference.points import line
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, value in {"base": 0.0, "one": 1.0, "two": 2.0}.items():
    ...     save_file({"w": torch.full((4,), value)}, folder / f"{name}.safetensors")
    >>> sweep = sweep_checkpoints(folder / "base.safetensors", [folder / "one.safetensors", folder / "two.safetensors"],
    ...     folder / "sweep", line([1, 0], [0, 1], 3))
    >>> [(point.name, point.counts, point.scale) for point in sweep.points]
    [('step-00', (4, 0), 2.0), ('step-01', (2, 2), 1.26491), ('step-02', (0, 4), 1.0)]
    >>> sorted(path.name for path in (folder / "sweep").iterdir() if path.is_dir())
    ['step-00', 'step-01', 'step-02']
    """
    resources = (memory, shard_size, threads)
    job_of = _looked_at(
        base, tasks, out, points, given, resources, reports_only, overwrite, fresh, digest_inputs, base_model
    )
    with job_of as job:
        for problem in _problems(job, reports_only):
            raise InputError(problem)
        reports = dict(job.finished)
        if job.todo:
            digests = job.inputs.digests() if digest_inputs else {}
            with _surveyed(job, threads, progress) as merge:
                job.ledger.begin()
                for point in job.todo:
                    options = _at(job.options, point)
                    merge.restart(options, _method(options, len(tasks)), mark=_marks_differ(options))
                    if reports_only:
                        reports[point.name] = _write_report(merge, job, point, digests)
                    else:
                        reports[point.name] = _write_point(merge, job, point, digests, base_model)
                    job.ledger.note(point.name, reports_only)
                    if progress is not None:
                        progress("points", len(reports), len(job.points))
        sweep = _summary(job, reports)
        job.ledger.finish(sweep.to_json().encode())
    if not sweep.elements:
        warnings.warn(sweep.warnings[-1], stacklevel=2)
    return sweep


def plan_sweep(
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
    **given: Any,
) -> SweepPlan:
    """Say what `sweep_checkpoints` would do; read no values, write nothing. What stands in its way is in `problems`."""
    resources = (memory, shard_size, threads)
    job_of = _looked_at(
        base, tasks, out, points, given, resources, reports_only, overwrite, fresh, digest_inputs, base_model
    )
    with job_of as job:
        layout = job.inputs.layout
        size, files = _size_of_point(job)
        return SweepPlan(
            method=job.options.method,
            tasks=len(tasks),
            elements=layout.elements,
            points=tuple(
                (point.name, tuple(map(str, point.weights)), _budget(_at(job.options, point), layout.elements))
                for point in job.points
            ),
            finished=tuple(job.finished),
            files_each=0 if reports_only else files,
            bytes_each=0 if reports_only else size,
            bytes_to_write=0 if reports_only else size * len(job.todo),
            memory=job.memory,
            available=available_memory(),
            problems=tuple(_problems(job, reports_only)),
            warnings=(*job.inputs.warnings(), *layout.warnings),
        )


# -- looking ----------------------------------------------------------------------------------------------------------


@contextmanager
def _looked_at(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike,
    points: Sequence[Point],
    given: Mapping[str, Any],
    resources: tuple[int | str | None, int | str | None, int | None],
    reports_only: bool,
    overwrite: bool,
    fresh: bool,
    digest_inputs: bool,
    base_model: str | None,
) -> Iterator[_Job]:
    """Read and check everything that can be known before values are read."""
    memory, shard_size, threads = resources
    options = _read_options(len(tasks), points, given)
    bound = None if memory is None else parse_size(memory, "memory")
    shard = DEFAULT_SHARD_SIZE if shard_size is None else parse_size(shard_size, "shard size")
    folder = Path(out)
    with Inputs(base, tasks, options) as inputs:
        for point in points:
            inputs.refuse_as_output(folder / point.name)
        fingerprint = {
            **fingerprint_of(inputs, options, shard, base_model),
            "digest_inputs": digest_inputs,
            "points": {point.name: list(map(str, point.weights)) for point in points},
        }
        names = [point.name for point in points]
        ledger = Ledger(folder, fingerprint, names, overwrite=overwrite, fresh=fresh)
        reports = {name: ledger.finished(name, reports_only) for name in names}
        finished = {name: report for name, report in reports.items() if report is not None}
        if not reports_only:
            ledger.check([name for name in names if name not in finished])
        needed = _memory_needed(inputs.layout, options, kernels_for(torch.device("cpu")), read_threads(threads))
        yield _Job(inputs, options, tuple(points), shard, ledger, finished, needed, bound)


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
            _at(options, point, tasks)
        except InputError as error:
            raise InputError(f"point {point.name}: {error}") from None
    return options


def _at(options: Options, point: Point, tasks: int | None = None) -> Options:
    return replace(options, weights=read_weights(point.weights, len(point.weights) if tasks is None else tasks))


def _problems(job: _Job, reports_only: bool) -> Iterator[str]:
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
        place = job.ledger.folder.absolute()
        while not place.exists():
            place = place.parent
        if to_write > (free := shutil.disk_usage(place).free):
            yield f"{show_size(to_write)} would be written, but only {show_size(free)} are free at {place}"


def _size_of_point(job: _Job) -> tuple[int, int]:
    """Bytes and number of the weight files of one point."""
    layout, asked = job.inputs.layout, job.options.out_dtype
    merged = {tensor.name: asked or tensor.widest for tensor in layout.mergeable}
    shards = plan_shards(output_tensors(layout, merged, asked), job.shard, aliases=layout.ties)
    return sum(shard.size for shard in shards), len(shards)


def _budget(options: Options, elements: int) -> tuple[int, ...] | None:
    assert options.weights is not None
    return METHODS[options.method](options, len(options.weights)).expected_budget(elements)


def _memory_needed(layout: Layout, options: Options, kernels: Kernels, threads: int) -> int:
    """Bytes beyond the interpreter: the inputs, the bit planes, the merged vector where its length is needed, work."""
    sources = len(layout.mergeable[0].infos) if layout.mergeable else 2
    width = 8 if any(tensor.working == "F64" for tensor in layout.mergeable) else 4
    rows = _method(options, sources - 1).plane_rows
    planes = rows * kernels.plane_bytes(layout.elements + SLOTS * len(layout.mergeable))
    kept = layout.elements * width if options.scale is None else 0
    work = SPARE + (threads if kernels.threads else 1) * kernels.chunk * ((sources + 2) * width + 2 * 8)
    return sum(info.nbytes for info in _wanted(layout).values()) + planes + kept + work


def available_memory() -> int | None:
    """Bytes that this process may still use, as far as the system tells."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # a container's own limit, whose page cache can be dropped
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = sum(int(line.split()[1]) for line in stat if line.startswith(("inactive_file ", "active_file ")))
        found.append(limit - used + cached)
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


# -- merging ----------------------------------------------------------------------------------------------------------


class LoadedVectors:
    """`Vectors` over opened checkpoints, read into memory at once, each tensor in the type that it is stored in."""

    borrows = False

    def __init__(self, inputs: Inputs, threads: int, progress: Progress | None) -> None:
        wanted = _wanted(inputs.layout)
        total, done = sum(info.nbytes for info in wanted.values()), 0

        def load(place: tuple[int, str]) -> Tensor:
            info = wanted[place]
            raw = torch.empty(info.nbytes, dtype=torch.uint8)
            inputs.checkpoints[place[0]].read_into(info.name, 0, raw.numpy().data)
            stored = torch_dtype(info.dtype)
            assert stored is not None
            return raw.view(stored)

        self._flat: dict[tuple[int, str], Tensor] = {}
        with ThreadPoolExecutor(threads) as pool:
            for place, values in zip(wanted, pool.map(load, wanted), strict=True):
                self._flat[place] = values
                done += values.nbytes
                if progress is not None:
                    progress("survey", done, total)

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        values = self._flat[source, tensor.infos[source].name][start:stop]
        return values if values.dtype == scratch.dtype else scratch.copy_(values)


def _wanted(layout: Layout) -> dict[tuple[int, str], TensorInfo]:
    """What is read of each source, once even where tasks hold one tensor under names that are two in others."""
    return {(k, info.name): info for tensor in layout.mergeable for k, info in enumerate(tensor.infos)}


@contextmanager
def _surveyed(job: _Job, threads: int | None, progress: Progress | None) -> Iterator[Merge]:
    """The engine over loaded inputs, after its walk over all of them."""
    inputs, options = job.inputs, job.options
    vectors = LoadedVectors(inputs, read_threads(threads), progress)
    kernels = kernels_for(torch.device("cpu"))
    notes = tuple(inputs.warnings())
    method = _method(options, len(inputs.labels) - 1)
    with Merge(
        inputs.layout, vectors, options, kernels, labels=inputs.labels, threads=threads, notes=notes, method=method
    ) as merge:
        merge.survey()
        yield merge


def _method(options: Options, tasks: int) -> Method:
    # Without weights it has the most rows of planes that it can have, so that every point's method fits into them.
    if options.method == "tunable_magmax":
        return TunableMagmax(options, tasks, reusable=True)
    return METHODS[options.method](options, tasks)


def _marks_differ(options: Options) -> bool:
    """Whether candidates depend on the point: only if tasks without a budget are not compared."""
    return options.method == "tunable_magmax" and options.compare == "active"


def _write_point(
    merge: Merge, job: _Job, point: Point, digests: Mapping[str, str], base_model: str | None
) -> MergeReport:
    started, target = time.time(), job.ledger.folder / point.name
    fingerprint = fingerprint_of(job.inputs, merge.options, job.shard, base_model)
    replaces, fresh = job.ledger.may_replace(point.name), job.ledger.fresh
    with Output(target, fingerprint, overwrite=replaces, fresh=fresh) as output, resumable(output):
        try:
            merge.decide()
            report = write_weights(merge, job.inputs, output, job.shard)
        except InputError:
            output.discard()
            raise
        report = write_sidecars(replace(report, inputs=digests), job.inputs, output, base_model)
        output.commit()
    log_merge(job.ledger.folder / LOG, target, job.inputs, report, started)
    return report


def _write_report(merge: Merge, job: _Job, point: Point, digests: Mapping[str, str]) -> MergeReport:
    merge.decide()
    merge.measure(merge.stretches)
    report = replace(merge.report(), inputs=digests)
    write_atomic(job.ledger.folder / job.ledger.report_only(point.name), report.to_json().encode())
    return report


def _summary(job: _Job, reports: Mapping[str, MergeReport]) -> Sweep:
    ordered = [reports[point.name] for point in job.points]
    first = ordered[0]
    return Sweep(
        method=first.method,
        tasks=first.tasks,
        elements=first.elements,
        last_length=first.last_length,
        options={name: value for name, value in first.options.items() if name not in ("weights", "budget")},
        points=tuple(
            SweepPoint(
                name=point.name,
                weights=tuple(report.options["weights"]),
                report=job.ledger.where(point.name),
                scale=report.scale,
                merged_length=report.merged_length,
                leftovers=report.leftovers,
                counts=report.counts,
            )
            for point, report in zip(job.points, ordered, strict=True)
        ),
        warnings=tuple(dict.fromkeys(warning for report in ordered for warning in report.warnings)),
        skipped=tuple(job.finished),
    )
