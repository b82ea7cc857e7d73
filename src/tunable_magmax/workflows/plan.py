"""What a merge would do, from headers alone: `merge --dry-run`; and how long it would take, for a second's work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.output_path import is_one_file, looks_like_torch
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.choice import check_merge, check_workers
from tunable_magmax.engines.cost import RAY_START, Cluster, Estimate, Load, Speeds, estimate_cluster, load_of
from tunable_magmax.engines.cost import estimate as estimate_time
from tunable_magmax.engines.inputs import Inputs, PathLike, read_names
from tunable_magmax.engines.local import DEFAULT_MEMORY, DEFAULT_SHARD_SIZE, fingerprint_of
from tunable_magmax.engines.space import check_space, existing_folder
from tunable_magmax.engines.weight_files import expected_shards
from tunable_magmax.errors import InputError
from tunable_magmax.files import parse_size
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.resources import MemoryPlan, kernels_for, plan_memory, working_threads


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge would do. Values are not read, so tensors that no task changed still count as mergeable here."""

    method: str
    tasks: int
    mergeable: tuple[str, ...]
    copied: tuple[str, ...]
    elements: int
    budget: tuple[int, ...] | None
    passes: int
    bytes_to_read: int
    bytes_to_write: int
    shards: int
    peak_memory: int
    spilled: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What the numbers above leave out."""
    speeds: Speeds | None = None
    """What was measured for the estimate."""
    time: Estimate | None = None
    cluster: ClusterPlan | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "time": None if self.time is None else self.time.to_dict(),
            "cluster": None if self.cluster is None else self.cluster.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to expect of N workers that are each like this machine, under two assumptions about their file system."""

    workers: int
    scaling: Estimate
    """The shared file system gives every worker what it gave this machine."""
    shared: Estimate
    """All workers together get what this machine got."""
    speedup: float
    shared_speedup: float
    most_speedup: float
    """What the first speed-up tends to with ever more workers."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "scaling": self.scaling.to_dict(), "shared": self.shared.to_dict()}


def plan_merge(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike | None = None,
    *,
    memory: int | str | None = None,
    shard_size: int | str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    fresh: bool = False,
    base_model: str | None = None,
    names: Sequence[str] | None = None,
    estimate: bool = False,
    workers: int | None = None,
    start: float = 0.0,
    **given: Any,
) -> MergePlan:
    """Plan a merge without reading values or writing anything; what stands in its way is in `problems`.

    The options are those of `merge_checkpoints`, and the same ones find its unfinished work.
    With `estimate`, measure for about a second how fast this machine reads these files, computes, and writes beside
    `out`, and estimate the merge's time; with `workers`, also on a cluster of so many machines like this one. `start`:
    seconds that the program which merges takes before it does, to be counted in.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("base", "one"):
    ...     save_file({"w": torch.zeros(4)}, folder / f"{name}.safetensors")
    >>> plan = plan_merge(folder / "base.safetensors", [folder / "one.safetensors"])
    >>> plan.elements, plan.problems
    (4, ())
    """
    check_workers(workers)
    if workers is not None and not estimate:
        raise InputError(f"workers is {workers}, which is about the time on a cluster: ask for an estimate as well")
    problems: list[str] = []
    if out is not None:
        problems += _output_problems(Path(out), overwrite)
    try:
        options = Options.read(len(tasks), **given)
        bound = DEFAULT_MEMORY if memory is None else parse_size(memory, "memory")
        limit = DEFAULT_SHARD_SIZE if shard_size is None else parse_size(shard_size, "shard size")
        with Inputs(base, tasks, options) as inputs:
            target = Path(out) if out is not None else None
            if target is not None:
                problems += _complaints(inputs.refuse_as_output, target)
                shard = 0 if _single(target) else limit
                fingerprint = fingerprint_of(inputs, options, shard, base_model, read_names(names, len(tasks)))
                problems += _complaints(Output.check_unfinished, target, fingerprint, fresh)
            plan, load, at_once = _planned(inputs, options, bound, limit, threads, target, problems)
            return _timed(plan, load, inputs, options, at_once, target, workers, start) if estimate else plan
    except InputError as error:
        problems.append(str(error))
    method = str(given.get("method", "tunable_magmax"))
    return MergePlan(method, len(tasks), (), (), 0, None, 0, 0, 0, 0, 0, 0, tuple(problems), ())


def _planned(
    inputs: Inputs, options: Options, bound: int, limit: int, threads: int | None, out: Path | None, problems: list[str]
) -> tuple[MergePlan, Load, int]:
    """The plan, what it has to do, and how many threads do it."""
    layout = inputs.layout
    tasks = len(inputs.checkpoints) - 1
    kernels = kernels_for(torch.device("cpu"))
    try:
        memory = plan_memory(layout, options, kernels, working_threads(kernels, threads), bound)
    except InputError as error:
        problems.append(str(error))
        memory = MemoryPlan(1, 0, 0, 0, 0, 0, 0, 0)
    if options.budget is not None and sum(options.budget) > layout.elements:
        problems.append(f"the budget sums to {sum(options.budget):,}, but there are only {layout.elements:,} elements")
    single = out is not None and _single(out)
    shards = expected_shards(layout, options.out_dtype, None if single else limit)
    to_write = sum(shard.size for shard in shards)
    if out is not None:
        problems += _complaints(check_space, out, to_write + (memory.planes if memory.spill else 0))
    method = METHODS[options.method](options, tasks)
    method.assume(layout.elements)
    load = load_of(layout, options, memory, method, to_write, inputs.bytes_of)
    plan = MergePlan(
        method=options.method,
        tasks=tasks,
        mergeable=tuple(tensor.name for tensor in layout.mergeable),
        copied=tuple(info.name for info in layout.copied),
        elements=layout.elements,
        budget=method.expected_budget(layout.elements),
        passes=load.passes,
        bytes_to_read=load.bytes_to_read,
        bytes_to_write=to_write,
        shards=len(shards),
        peak_memory=memory.peak,
        spilled=memory.planes if memory.spill else 0,
        problems=tuple(problems),
        warnings=(*inputs.warnings(), *layout.warnings),
        notes=tuple(inputs.notes()),
    )
    return plan, load, memory.threads


def _timed(
    plan: MergePlan,
    load: Load,
    inputs: Inputs,
    options: Options,
    threads: int,
    out: Path | None,
    workers: int | None,
    start: float,
) -> MergePlan:
    """The plan with what was measured for it; none of it if something stands in the way of the merge."""
    if plan.problems:
        return plan
    from tunable_magmax.engines.calibration import measure_speeds

    folder = None if out is None else existing_folder(out.absolute().parent)
    speeds = measure_speeds(inputs, options, kernels_for(torch.device("cpu")), threads, folder)
    notes = plan.notes if out is not None else (*plan.notes, "without -o, the time to write is not estimated")
    cluster = None if workers is None else plan_cluster(load, speeds, workers, start)
    here = estimate_time(load, speeds).after(start)
    return replace(plan, speeds=speeds, time=here, cluster=cluster, notes=notes)


def plan_cluster(load: Load, speeds: Speeds, workers: int, start: float = 0.0) -> ClusterPlan:
    """Both ends of what `workers` machines like the measured one can do, after `start` seconds and Ray's own."""
    check_workers(workers)
    here = estimate_time(load, speeds).after(start).seconds
    scaling, shared, endless = (
        estimate_cluster(load, speeds, cluster).after(start + RAY_START)
        for cluster in (Cluster(workers, math.inf), Cluster(workers, speeds.read), Cluster(math.inf, math.inf))
    )
    return ClusterPlan(
        workers=workers,
        scaling=scaling,
        shared=shared,
        speedup=here / scaling.seconds,
        shared_speedup=here / shared.seconds,
        most_speedup=here / endless.seconds,
    )


def plan_place(
    plan: MergePlan, engine: str, workers: int | None, ray_address: str | None, device: str | None
) -> MergePlan:
    """The plan of a merge that is to run elsewhere: what is wrong with the place, and whose numbers these are."""
    problems = (*plan.problems, *_complaints(check_merge, engine, workers, ray_address, device))
    notes = plan.notes
    if engine != "local" or device not in (None, "cpu"):
        there = f"device {device!r}" if engine == "local" else f"engine {engine!r}"
        notes += (f"bytes to read and memory are those of a merge on this machine's CPU; {there} may need others",)
    return replace(plan, problems=problems, notes=notes)


def _output_problems(out: Path, overwrite: bool) -> list[str]:
    if named := _complaints(is_one_file, out):
        return named
    beside = out.with_name(f"{out.name.removesuffix('.safetensors')}.report.json")
    if is_one_file(out) and beside.exists() and not out.exists() and not overwrite:
        return [f"{beside} already exists: move it away, or pass overwrite (--overwrite) to replace it"]
    return _complaints(Output.check, out, overwrite)


def _single(out: Path) -> bool:
    """Whether it is one file; no name is refused here, for that is a problem that has been told."""
    return not looks_like_torch(out) and is_one_file(out)


def _complaints(check: Any, *arguments: Any) -> list[str]:
    try:
        check(*arguments)
    except InputError as error:
        return [str(error)]
    return []
