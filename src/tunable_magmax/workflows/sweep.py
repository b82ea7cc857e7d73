"""What `tmx sweep` does: merges one sequence for many preferences; the inputs are read into memory once."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.companions import REPORT, is_module_folder
from tunable_magmax.checkpoints.writer import Output, looks_like_torch
from tunable_magmax.engines import settings as engine_settings
from tunable_magmax.engines.inputs import Inputs, PathLike
from tunable_magmax.engines.local import check_companions, completed, fingerprint_of, write_output
from tunable_magmax.engines.log import Log
from tunable_magmax.engines.outputs import Job, expected_shards, space_problem, write_weights
from tunable_magmax.engines.sources import loaded_sources, tensors_to_load
from tunable_magmax.errors import InputError
from tunable_magmax.files import (
    Progress,
    parse_json,
    read_whole,
    refuse_link,
    remove_unfinished,
    show_size,
    write_atomic,
)
from tunable_magmax.merging.budget import read_weights
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.methods import METHODS, Method, read_options
from tunable_magmax.merging.names import named_tasks
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import (
    Limits,
    available_memory,
    kernels_for,
    matrix_bytes,
    plan_memory,
    read_threads,
    triples_bytes,
)
from tunable_magmax.workflows.points import Point

VERSION = 1
SUMMARY, LOG = "sweep.json", "sweep.log"
REPORT_ONLY = ".report.json"
"""How the name of a report without weights ends, after the point's name."""
SPARE = 16 << 20
"""Bytes for the auction's short lists and the like."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One merge of a sweep. `counts` and `leftovers` are None for methods without owners."""

    name: str
    weights: tuple[str, ...]
    """One for each task, as text that reads back exactly: 1/3 is one third."""
    report: str
    """The path of the merge's report, from the sweep's folder."""
    scale: float
    merged_length: float
    leftovers: int | None
    counts: tuple[int, ...] | None
    accuracy: Mapping[str, Any] | None = None
    """Where it was measured; see `sweep_accuracy.PointAccuracy`."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep; `to_json` is the file sweep.json."""

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
    data: Mapping[str, Any] | None = None
    """The samples that the points were measured on, if they were."""

    def to_json(self) -> str:
        """Returns JSON text with stable order: equal sweeps give equal bytes, however often they were interrupted."""
        record = {key: value for key, value in asdict(self).items() if key != "skipped"}
        if self.data is None:  # the file of a sweep that was not measured says nothing of it
            del record["data"]
            for point in record["points"]:
                del point["accuracy"]
        return json.dumps({"version": VERSION, **record}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep would do, from headers alone. Sizes in bytes; `available` is None where the system can't tell."""

    method: str
    tasks: int
    elements: int
    points: tuple[Mapping[str, Any], ...]
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


def sweep_checkpoints(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike,
    points: Sequence[Point],
    *,
    reports_only: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Sweep:
    """Merges for each of `points` (`line`, `grid` or `listed` make them) into `out/NAME`, reading the inputs once.

    Every output equals that of `merge_checkpoints` with the point's weights, to the byte. The options are those of
    `merge_checkpoints`, less weights, budget, engine and device. With `reports_only` there are only reports,
    `out/NAME.report.json`. Called again, it skips finished points. All inputs are in memory at a time: a sweep that
    needs more than `memory`, or than is free, is refused beforehand.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import save_file
    >>> from tunable_magmax.workflows.points import line
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
    folder = Path(out)
    with _opened(base, tasks, folder, points, reports_only, options) as opened:
        for problem in opened.problems():
            raise InputError(problem)
        reports = dict(opened.finished)
        if opened.todo:
            with _loaded(opened, progress) as merge:
                merge.survey()
                (folder / SUMMARY).unlink(missing_ok=True)
                for point in opened.todo:
                    merge.restart(_at_point(opened.options, point), _method_at(opened.options, point))
                    merge.decide()
                    reports[point.name] = _write_point(merge, opened, point)
                    if progress is not None:
                        progress("points", len(reports), len(points))
        sweep = _summary(opened, reports)
        write_atomic(folder / SUMMARY, sweep.to_json().encode())
        for left in (SUMMARY, *(f"{point.name}{REPORT_ONLY}" for point in points)):
            remove_unfinished(folder / left)
        for name in opened.replaced:
            _remove(folder, name)
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
    **options: Any,
) -> SweepPlan:
    """Returns what `sweep_checkpoints` would do and what prevents it; reads no values and writes nothing."""
    with _opened(base, tasks, Path(out), points, reports_only, options) as opened:
        layout = opened.inputs.layout
        sizes = opened.file_sizes()
        return SweepPlan(
            method=opened.options.method,
            tasks=len(tasks),
            elements=layout.elements,
            points=tuple(
                {
                    "name": point.name,
                    "weights": tuple(map(str, point.weights)),
                    "budget": _method_at(opened.options, point).expected_budget(layout.elements),
                }
                for point in points
            ),
            finished=tuple(opened.finished),
            files_each=len(sizes),
            bytes_each=sum(sizes),
            bytes_to_write=sum(sizes) * len(opened.todo),
            memory=opened.memory_needed(),
            available=available_memory(),
            problems=tuple(opened.problems()),
            warnings=(*opened.inputs.warnings(), *layout.warnings),
            notes=tuple(opened.inputs.notes()),
        )


# -- before anything is read ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Opened:
    """A sweep whose inputs are open and whose folder was looked at; nothing is written yet."""

    inputs: Inputs
    options: Options
    """Of all merges; without weights."""
    points: Sequence[Point]
    folder: Path
    reports_only: bool
    writing: engine_settings.Output
    names: tuple[str, ...] | None
    memory: int | str | None
    """None: what is free."""
    finished: Mapping[str, MergeReport]
    replaced: Set[str]
    """Points of another sweep in the folder, which this one removes."""

    @property
    def todo(self) -> list[Point]:
        return [point for point in self.points if point.name not in self.finished]

    def file_sizes(self) -> list[int]:
        """Returns the size of each weight file of one point."""
        shards = expected_shards(self.inputs.layout, self.options.out_dtype, self.writing.shard_bytes(self.folder))
        return [] if self.reports_only else [shard.size for shard in shards]

    def memory_needed(self) -> int:
        """Returns bytes beyond the interpreter: inputs, bit planes, the merged vector for a matched scale, buffers.

        Methods that merge matrices whole need room for the largest, and for the singular vectors of all tasks.
        """
        layout, kernels = self.inputs.layout, kernels_for(torch.device("cpu"))
        plan = plan_memory(layout, self.options, kernels, self.writing.threads, None, borrows=False)
        width = 8 if any(tensor.working == "F64" for tensor in layout.mergeable) else 4
        each = plan.chunk * ((len(self.inputs.paths) + 2) * width + 16)
        loaded = sum(info.nbytes for info in tensors_to_load(layout).values())
        whole = matrix_bytes(layout, self.options)
        whole += triples_bytes(layout, self.options, len(self.inputs.paths) - 1)
        return loaded + plan.planes + plan.cached_delta + SPARE + plan.threads * each + layout.factor_bytes + whole

    def problems(self) -> Iterator[str]:
        """Yields what prevents the sweep: too little memory, or too little space on disk."""
        if not self.todo:
            return
        needed, available = self.memory_needed(), available_memory()
        need = f"the inputs are held in memory, and this sweep needs {show_size(needed)}"
        instead = "merge fewer tensors, or merge point by point with tmx merge, which streams"
        if self.memory is not None and needed > self.writing.memory_bytes:
            allowed = show_size(self.writing.memory_bytes)
            yield f"{need}, more than the {allowed} it may use: give a larger --memory, {instead}"
        elif self.memory is None and available is not None and needed > available:
            yield f"{need}, but {show_size(available)} are free: {instead}"
        if problem := space_problem(self.folder, sum(self.file_sizes()) * len(self.todo)):
            yield problem

    def fingerprint(self, point: Point) -> dict[str, Any]:
        """Returns what a finished point is recognised by, as JSON."""
        options = _at_point(self.options, point)
        return fingerprint_of(self.inputs, options, self.writing.shard_bytes(self.folder / point.name), self.names)


@contextmanager
def _opened(
    base: PathLike,
    tasks: Sequence[PathLike],
    folder: Path,
    points: Sequence[Point],
    reports_only: bool,
    arguments: Mapping[str, Any],
) -> Iterator[_Opened]:
    """Opens the inputs and checks everything that can be checked before values are read."""
    rest = dict(arguments)
    _, names = named_tasks(tasks, rest.pop("names", None))
    memory = rest.pop("memory", None)
    shared = {name: rest.pop(name) for name in ("threads", "shard_size", "overwrite") if rest.get(name) is not None}
    writing = engine_settings.Output(memory or "1GiB", **shared)
    rest = {name: value for name, value in rest.items() if name not in ("threads", "shard_size", "overwrite")}
    options = _read_options(len(tasks), points, rest)
    if folder.name.endswith(".safetensors") or looks_like_torch(folder) or folder.is_file():
        raise InputError(f"{folder}: a sweep's output is a directory with one checkpoint for each point")
    with Inputs(base, tasks, options) as inputs:
        recorded = _recorded(folder)
        replaced = recorded.keys() - {point.name for point in points}
        opened = _Opened(inputs, options, points, folder, reports_only, writing, names, memory, {}, replaced)
        finished: dict[str, MergeReport] = {}
        different: dict[str, None] = {}
        for point in points:
            inputs.refuse_as_output(folder / point.name)
            if point.name not in recorded:
                continue
            (old, files), new = recorded[point.name], opened.fingerprint(point)
            report = _finished_report(folder, point.name, reports_only)
            if old != new:
                different |= dict.fromkeys(key for key in {**old, **new} if old.get(key) != new.get(key))
            # The log is written before the commit: an older output may still be there.
            elif report is not None and dict(report.files) == files:
                finished[point.name] = report
        _refuse_other(folder, [*different, *(["points"] if replaced else [])], writing.overwrite)
        refuse_link(folder / LOG)
        if not reports_only:
            check_companions(inputs)
        for point in points:
            if point.name not in finished and not reports_only:
                target, replaces = folder / point.name, writing.overwrite or point.name in recorded
                Output.check(target, replaces)
        yield replace(opened, finished=finished)


def _read_options(tasks: int, points: Sequence[Point], arguments: Mapping[str, Any]) -> Options:
    """Reads the options that all points share, and checks every point's weights."""
    if arguments.keys() & {"weights", "budget"}:
        raise InputError("the points of a sweep are its weights: leave out weights and budget")
    options = read_options(tasks, **arguments)
    if METHODS[options.method].weights == "refused":
        usable = ", ".join(name for name, method in METHODS.items() if method.weights != "refused")
        raise InputError(f"method {options.method!r} takes no weights, so there is nothing to sweep; use {usable}")
    if not points:
        raise InputError("a sweep needs points: make some with line, grid or listed")
    names = [point.name for point in points]
    for point in points:
        if names.count(point.name) > 1:
            raise InputError(f"{point.name!r} names two points of the sweep: their outputs would be in the same place")
        try:
            read_weights(point.weights, tasks)
        except InputError as error:
            raise InputError(f"point {point.name}: {error}") from None
    return options


# -- the folder -------------------------------------------------------------------------------------------------------


def _refuse_other(folder: Path, different: Sequence[str], overwrite: bool) -> None:
    """Raises an `InputError` if the folder holds points of another sweep that may not be replaced."""
    complete = (folder / SUMMARY).exists()
    if not different or overwrite:
        return
    what = "another sweep" if complete else "unfinished work of another sweep"
    words = ", ".join(key.replace("_", " ") for key in different)
    raise InputError(
        f"{folder} holds {what} (different: {words}): choose another output, or pass overwrite (--overwrite) to "
        "replace it"
    )


def _recorded(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """Returns fingerprint and files of each point that a sweep wrote to the folder and that is still there, by name."""
    recorded = {}
    with suppress(OSError, UnicodeDecodeError):
        for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line cut short by a kill, or one without fingerprint
                entry = parse_json(line, odd_names=True)
                recorded[Path(entry["out"]).name] = dict(entry["fingerprint"]), dict(entry["files"])
    places = {name: (folder / name, folder / f"{name}{REPORT_ONLY}") for name in recorded}
    return {name: recorded[name] for name in recorded if any(path.exists() for path in places[name])}


def _finished_report(folder: Path, name: str, reports_only: bool) -> MergeReport | None:
    """Returns the report of a point with all its files; None if it has to be made."""
    for where in [f"{name}/{REPORT}", *([f"{name}{REPORT_ONLY}"] if reports_only else [])]:
        with suppress(OSError, ValueError):
            report = MergeReport.from_json(read_whole(folder / where).decode())
            if all((folder / name / file).is_file() for file in report.files):
                return report
    return None


def _remove(folder: Path, name: str) -> None:
    """Removes a point of another sweep, unless it holds something that no merge writes."""
    point = folder / name
    if (point / REPORT).is_file() and all(item.is_file() or is_module_folder(item) for item in point.iterdir()):
        shutil.rmtree(point)
    with suppress(InputError, OSError):
        Output.recover(point)
    (folder / f"{name}{REPORT_ONLY}").unlink(missing_ok=True)


# -- merging ----------------------------------------------------------------------------------------------------------


def _loaded(opened: _Opened, progress: Progress | None) -> Merge:
    """Loads the inputs and returns the merge of them."""
    inputs, options, threads = opened.inputs, opened.options, opened.writing.threads
    sources = inputs.sources(
        loaded_sources(inputs.checkpoints, inputs.layout, read_threads(threads), progress), in_memory=True
    )
    # Without weights it has the most rows of planes that it can have, so that every point's method fits into them.
    method = METHODS[options.method](options, len(inputs.paths) - 1, reusable=True)
    return Merge(sources, options, kernels_for(torch.device("cpu")), Limits(threads), method)


def _at_point(options: Options, point: Point) -> Options:
    return replace(options, weights=read_weights(point.weights, len(point.weights)))


def _method_at(options: Options, point: Point) -> Method:
    return METHODS[options.method](_at_point(options, point), len(point.weights), reusable=True)


def _write_point(merge: Merge, opened: _Opened, point: Point) -> MergeReport:
    """Writes the checkpoint of a point that was decided, or its report alone."""
    inputs, target = opened.inputs, opened.folder / point.name
    log = Log(opened.folder / LOG, target, time.time(), opened.fingerprint(point))
    report_only = opened.folder / f"{point.name}{REPORT_ONLY}"
    if opened.reports_only:
        merge.measure(merge.places)
        report = completed(merge.report(), inputs, opened.names)
        inputs.refuse_changed()
        write_atomic(report_only, report.to_json().encode())
        log.write(inputs, report)
        return report
    # It was checked that what is there may be replaced.
    with Output(target, overwrite=True) as output:
        job = Job(inputs, merge.options, output, opened.writing.shard_bytes(target), 0, names=opened.names)
        report = write_output(job, lambda: write_weights(merge, job), log)
    report_only.unlink(missing_ok=True)
    return report


def _summary(opened: _Opened, reports: Mapping[str, MergeReport]) -> Sweep:
    ordered = [reports[point.name] for point in opened.points]
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
                report=f"{point.name}/{REPORT}" if report.files else f"{point.name}{REPORT_ONLY}",
                scale=report.scale,
                merged_length=report.merged_length,
                leftovers=report.leftovers,
                counts=report.counts,
            )
            for point, report in zip(opened.points, ordered, strict=True)
        ),
        warnings=tuple(dict.fromkeys(warning for report in ordered for warning in report.warnings)),
        skipped=tuple(opened.finished),
    )
