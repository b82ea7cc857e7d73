"""What `tmx plan` and `--dry-run` do: say from headers alone what a merge would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.hub import previewed
from tunable_magmax.checkpoints.writer import Output, is_one_file
from tunable_magmax.engines.inputs import Inputs, PathLike, named_heads
from tunable_magmax.engines.outputs import check_space, expected_shards
from tunable_magmax.engines.settings import OutputSettings, Resources
from tunable_magmax.errors import InputError
from tunable_magmax.merging.methods import METHODS, Method, read_options
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return asdict(self)


def plan_merge(
    base: PathLike,
    tasks: Sequence[PathLike] | Mapping[str, PathLike],
    out: PathLike | None = None,
    **options: Any,
) -> MergePlan:
    """Plans a merge without reading values or writing anything; what prevents it is in `problems`.

    The options are those of `merge_checkpoints`, less engine and device.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("base", "one"):
    ...     save_file({"w": torch.zeros(4)}, folder / f"{name}.safetensors")
    >>> plan = plan_merge(folder / "base.safetensors", [folder / "one.safetensors"])
    >>> plan.elements, plan.problems
    (4, ())
    """
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
            if target is not None:
                problems += _problems(inputs.refuse_as_output, target)
            plan = _planned(inputs, read, resources, settings, target)
            problems += plan.problems
            names, notes = settings.task_names(len(tasks)), (*plan.notes, *downloads)
            return replace(plan, problems=tuple(problems), names=names, notes=notes)
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
) -> MergePlan:
    """Returns the plan; problems of the output's place are not in it."""
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
    passes, to_read = _reads(inputs, options, memory, method)
    return MergePlan(
        method=options.method,
        tasks=tasks,
        mergeable=tuple(tensor.name for tensor in layout.mergeable),
        copied=tuple(info.name for info in layout.copied),
        elements=layout.elements,
        budget=method.expected_budget(layout.elements),
        passes=passes,
        bytes_to_read=to_read,
        bytes_to_write=to_write,
        shards=len(shards),
        peak_memory=memory.peak,
        spilled=spilled,
        problems=tuple(problems),
        warnings=tuple(dict.fromkeys([*inputs.warnings(), *layout.warnings])),
        notes=tuple(inputs.notes()),
    )


def _reads(inputs: Inputs, options: Options, memory: MemoryPlan, method: Method) -> tuple[int, int]:
    """Returns how often a merge walks over its inputs, and the bytes that it reads. The method knows the elements."""
    layout, size = inputs.layout, inputs.bytes_of
    base = sum(size(tensor, 0) for tensor in layout.mergeable)
    survey = base + sum(size(tensor, t + 1) for tensor in layout.mergeable for t in range(method.tasks))
    taken = [(tensor, method.combined(k, tensor.size)) for k, tensor in enumerate(layout.mergeable)]
    combined = sum(size(tensor, t + 1) for tensor, own in taken for t in own)
    pairs = combined + sum(size(tensor, 0) * len(own) for tensor, own in taken)
    # A cut by magnitude reads base and task for a histogram of magnitudes and again to cut. The bins are 1/256 of a
    # magnitude wide, so about one element in 256 is in the one that matters; if these are too many to list, they are
    # counted more closely before the cut.
    largest = max((tensor.size for tensor in layout.mergeable), default=0)
    crowded = (layout.elements if options.scope == "model" else largest) // 256
    looks = (2 if crowded <= memory.room else 3) if method.cuts_by_magnitude else 0
    measures = options.scale is None and (method.plane_rows > 0 or method.whole)
    measure = base + combined if measures else 0
    # A matrix that is merged whole is made from the base's values before these are read again for the output.
    made = base if method.whole and not memory.stash else 0
    render = base + made + sum(info.nbytes for info in layout.copied) + (0 if memory.stash else combined)
    return 2 + looks + measures, survey + looks * pairs + measure + render


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
