"""What `tmx plan` and `--dry-run` do: say from headers alone what a merge would do, and how long it would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.hub import previewed
from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.engines.cost import RAY_START, Estimate, Load, Speeds, load_of, measure_speeds
from tunable_magmax.engines.cost import estimate as estimate_time
from tunable_magmax.engines.inputs import Inputs, PathLike, named_heads
from tunable_magmax.engines.local import COMPLETE, fingerprint_of, finished_by
from tunable_magmax.engines.log import finished_report
from tunable_magmax.engines.outputs import check_space, existing_folder, expected_shards
from tunable_magmax.engines.settings import OutputSettings, Resources, check_workers
from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import METHODS, read_options
from tunable_magmax.merging.names import in_order, named_tasks
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.resources import MemoryPlan, kernels_for, plan_memory


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge would do. Values are not read, so tensors that no task changed still count as mergeable here."""

    method: str
    tasks: int
    names: tuple[str, ...] | None = None
    mergeable: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    elements: int = 0
    budget: tuple[int, ...] | None = None
    passes: int = 0
    bytes_to_read: int = 0
    bytes_to_write: int = 0
    shards: int = 0
    peak_memory: int = 0
    spilled: int = 0
    problems: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    """Every tensor that does not match; `problems` shows some of them."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What the numbers above leave out."""
    speeds: Speeds | None = None
    """What was measured for the estimate."""
    time: Estimate | None = None
    cluster: ClusterTime | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return {**asdict(self), "time": None if self.time is None else self.time.to_dict()}


@dataclass(frozen=True, slots=True)
class ClusterTime:
    """The time on `workers` machines like this one, if their file system serves each of them as it serves this one."""

    workers: int
    seconds: float
    speedup: float


def plan_merge(
    base: PathLike,
    tasks: Sequence[PathLike] | Mapping[str, PathLike],
    out: PathLike | None = None,
    *,
    estimate: bool = False,
    workers: int | None = None,
    start: float = 0.0,
    **options: Any,
) -> MergePlan:
    """Plans a merge without reading values or writing anything; what prevents it is in `problems`.

    The options are those of `merge_checkpoints`, less engine and device; the same ones find its unfinished work. With
    `estimate`, this measures for about a second how fast the machine reads these files, computes, and writes beside
    `out`, and estimates the merge's time; with `workers`, also on a cluster of so many machines like this one. `start`:
    seconds that the program which merges takes to start, if they are to be counted.

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
        raise InputError(f"workers is {workers}, which is about the time on a cluster: give --estimate as well")
    began = time.perf_counter()
    kernels = kernels_for(torch.device("cpu"))
    start += time.perf_counter() - began if start else 0.0
    target = None if out is None else Path(out)
    tasks, options["names"] = named_tasks(tasks, options.get("names"))
    for name in ("weights", "budget"):
        options[name] = in_order(options.get(name), options["names"], name)
    settings = OutputSettings.take(options)
    resources = Resources(memory=options.pop("memory", None), threads=options.pop("threads", None))
    problems = [] if target is None else _output_problems(target, settings.overwrite)
    if target is not None and _problems(is_one_file, target):
        target = None  # its name was refused
    try:
        heads = named_heads(options.pop("heads", None), settings.names, tasks)
        read = read_options(len(tasks), **options, heads=heads)
        with previewed([base, *tasks]) as (places, downloads), Inputs(places[0], places[1:], read) as inputs:
            if downloads and estimate:
                raise InputError(f"the time is measured on the files themselves, but {'; '.join(downloads)}")
            complete: tuple[str, ...] = ()
            if target is not None:
                fingerprint = fingerprint_of(inputs, read, settings, target)
                known_by = finished_by(fingerprint, inputs, settings)
                if not settings.overwrite and finished_report(target, known_by) is not None:
                    problems, complete = [], (COMPLETE.format(out=out),)
                problems += _problems(inputs.refuse_as_output, target)
                problems += _problems(Output.check_unfinished, target, fingerprint, settings.fresh)
            plan, load, memory = _planned(inputs, read, resources, settings, target)
            problems += plan.problems
            names, notes = settings.task_names(len(tasks)), (*complete, *plan.notes, *downloads)
            plan = replace(plan, problems=tuple(problems), names=names, notes=notes)
            if not estimate or problems:
                return plan
            folder = None if target is None else existing_folder(target.absolute().parent)
            speeds = measure_speeds(inputs, read, kernels, memory.threads, folder)
            return _timed(plan, load, speeds, workers, start)
    except InputError as error:
        problems.append(str(error))
        mismatches = error.problems
    method = str(options.get("method", "tunable_magmax"))
    return MergePlan(method, len(tasks), problems=tuple(problems), mismatches=mismatches)


def plan_elsewhere(plan: MergePlan, **resources_given: Any) -> MergePlan:
    """Returns the plan of a merge on the engine and device given, as `Resources` names them: with their problems."""
    resources = Resources(**resources_given)
    notes = plan.notes
    if resources.engine != "local" or not resources.on_cpu:
        there = f"device {resources.device!r}" if resources.engine == "local" else f"engine {resources.engine!r}"
        notes += (f"bytes to read and memory are those of a merge on this machine's CPU; {there} may need others",)
    problems = [*_problems(resources.check), *_problems(resources.check_method, plan.method)]
    return replace(plan, problems=(*plan.problems, *problems), notes=notes)


def _planned(
    inputs: Inputs, options: Options, resources: Resources, settings: OutputSettings, out: Path | None
) -> tuple[MergePlan, Load, MemoryPlan]:
    """Returns the plan, what the merge has to do, and how it divides its memory."""
    layout, tasks, problems = inputs.layout, len(inputs.paths) - 1, []
    kernels = kernels_for(torch.device("cpu"))
    try:
        memory = plan_memory(layout, options, kernels, resources.threads, resources.memory_bytes)
    except InputError as error:
        problems.append(str(error))
        memory = MemoryPlan(1, 0, 0, 0, 0, 0, 0, 0)
    if options.budget is not None and sum(options.budget) > layout.elements:
        problems.append(f"the budget sums to {sum(options.budget):,}, but there are only {layout.elements:,} elements")
    shards = expected_shards(layout, options.out_dtype, settings.shard_bytes(out or Path("out")))
    to_write, spilled = sum(shard.size for shard in shards), memory.planes if memory.spill else 0
    if out is not None:
        problems += _problems(check_space, out, to_write + spilled)
    method = METHODS[options.method](options, tasks)
    method.assume(layout.elements)
    load = load_of(inputs, options, memory, method, to_write)
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
        spilled=spilled,
        problems=tuple(problems),
        warnings=tuple(dict.fromkeys([*inputs.warnings(), *layout.warnings])),
        notes=tuple(inputs.notes()),
    )
    return plan, load, memory


def _timed(plan: MergePlan, load: Load, speeds: Speeds, workers: int | None, start: float) -> MergePlan:
    """Returns the plan with the times that the speeds make."""
    here, cluster = estimate_time(load, speeds, start), None
    if workers is not None:
        there = start + RAY_START + (here.seconds - start) / workers
        cluster = ClusterTime(workers, there, here.seconds / there)
    notes = plan.notes if speeds.write is not None else (*plan.notes, "without -o, the time to write is not estimated")
    if METHODS[plan.method].whole:
        notes = (*notes, "the time for singular vectors, most of the work on large matrices, is not estimated")
    return replace(plan, speeds=speeds, time=here, cluster=cluster, notes=notes)


def _output_problems(out: Path, overwrite: bool) -> list[str]:
    if named := _problems(is_one_file, out):
        return named
    beside = out.with_name(f"{out.name.removesuffix('.safetensors')}.report.json")
    if is_one_file(out) and beside.exists() and not out.exists() and not overwrite:
        return [f"{beside} already exists: move it away, or pass overwrite (--overwrite) to replace it"]
    return _problems(Output.check, out, overwrite)


def _problems(check: Callable[..., object], *arguments: Any) -> list[str]:
    """Returns the message of the `InputError` that a check raises, if it raises one."""
    try:
        check(*arguments)
    except InputError as error:
        return [str(error)]
    return []
