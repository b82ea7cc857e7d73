"""Many merges of one sequence, each a checkpoint of its own: the inputs are read into memory once."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.layout import Mergeable
from tunable_magmax.checkpoints.tensors import torch_dtype
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import FileVectors, Inputs, PathLike
from tunable_magmax.engines.local import fingerprint_of, resumable
from tunable_magmax.engines.sidecars import log_merge, write_sidecars
from tunable_magmax.engines.weight_files import write_weights
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress, write_atomic
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import kernels_for, read_threads
from tunable_magmax.merging.stream import Merge
from tunable_magmax.workflows.points import Point
from tunable_magmax.workflows.sweep_plan import Job, at_point, looked_at, method_of, problems_of, tensors_to_read

VERSION = 1
LOG = "sweep.log"


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
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    **given: Any,
) -> Sweep:
    """Merge for each of `points` (`line`, `grid` or `listed` make them) into `out/NAME`, reading the inputs once.

    Every output equals that of `merge_checkpoints` with the point's weights, to the byte; so do the options in
    `given`. With `reports_only` there are only reports, `out/NAME.report.json`. Called again, finished points are
    skipped. All inputs are in memory at a time: more than `memory`, or than there is, is refused beforehand.

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
    job_of = looked_at(
        base,
        tasks,
        out,
        points,
        reports_only=reports_only,
        memory=memory,
        shard_size=shard_size,
        threads=threads,
        overwrite=overwrite,
        fresh=fresh,
        digest_inputs=digest_inputs,
        base_model=base_model,
        names=names,
        **given,
    )
    with job_of as job:
        for problem in problems_of(job, reports_only):
            raise InputError(problem)
        reports = dict(job.finished)
        if job.todo:
            digests = job.inputs.digests() if digest_inputs else {}
            with _surveyed(job, threads, progress) as merge:
                job.ledger.begin()
                for point in job.todo:
                    options = at_point(job.options, point)
                    merge.restart(options, method_of(options, len(tasks)), mark=_marks_differ(options))
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


class LoadedVectors:
    """`Vectors` over opened checkpoints, read into memory at once, each tensor in the type that it is stored in.

    Adapters stay where they are: their values are computed from the base's when asked for.
    """

    borrows = False

    def __init__(self, inputs: Inputs, threads: int, progress: Progress | None) -> None:
        self._derived = inputs.layout.derived
        self._files = FileVectors(inputs.checkpoints, inputs.layout.factor_bytes)
        wanted = tensors_to_read(inputs.layout)
        total, done = sum(info.nbytes for info in wanted.values()), 0

        def load(place: tuple[int, str]) -> Tensor:
            info = wanted[place]
            raw = torch.empty(info.nbytes, dtype=torch.uint8)
            checkpoint = inputs.checkpoints[place[0]]
            assert isinstance(checkpoint, Checkpoint)
            checkpoint.read_into(info.name, 0, raw.numpy().data)
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
        if source in self._derived:
            base = self.read(0, tensor, start, stop, scratch)
            return self._files.adapted(source, tensor, start, stop, base, scratch)
        values = self._flat[source, tensor.infos[source].name][start:stop]
        return values if values.dtype == scratch.dtype else scratch.copy_(values)


@contextmanager
def _surveyed(job: Job, threads: int | None, progress: Progress | None) -> Iterator[Merge]:
    """The engine over loaded inputs, after its walk over all of them."""
    inputs, options = job.inputs, job.options
    vectors = LoadedVectors(inputs, read_threads(threads), progress)
    kernels = kernels_for(torch.device("cpu"))
    notes = tuple(inputs.warnings())
    method = method_of(options, len(inputs.labels) - 1)
    with Merge(
        inputs.layout, vectors, options, kernels, labels=inputs.labels, threads=threads, notes=notes, method=method
    ) as merge:
        merge.survey()
        yield merge


def _marks_differ(options: Options) -> bool:
    """Whether candidates depend on the point: only if tasks without a budget are not compared."""
    return options.method == "tunable_magmax" and options.compare == "active"


def _write_point(
    merge: Merge, job: Job, point: Point, digests: Mapping[str, str], base_model: str | None
) -> MergeReport:
    started, target = time.time(), job.ledger.folder / point.name
    fingerprint = fingerprint_of(job.inputs, merge.options, job.shard, base_model, job.names)
    replaces, fresh = job.ledger.may_replace(point.name), job.ledger.fresh
    with Output(target, fingerprint, overwrite=replaces, fresh=fresh) as output, resumable(output):
        try:
            merge.decide()
            report = write_weights(merge, job.inputs, output, job.shard)
        except InputError:
            output.discard()
            raise
        report = replace(report, inputs=digests, names=job.names, adapters=job.inputs.described())
        report = write_sidecars(report, job.inputs, output, base_model)
        output.commit()
    log_merge(job.ledger.folder / LOG, target, job.inputs, report, started)
    return report


def _write_report(merge: Merge, job: Job, point: Point, digests: Mapping[str, str]) -> MergeReport:
    merge.decide()
    merge.measure(merge.places)
    report = replace(merge.report(), inputs=digests, names=job.names, adapters=job.inputs.described())
    write_atomic(job.ledger.folder / job.ledger.report_only(point.name), report.to_json().encode())
    return report


def _summary(job: Job, reports: Mapping[str, MergeReport]) -> Sweep:
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
