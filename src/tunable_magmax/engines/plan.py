"""What a merge would do, from headers alone: `merge --dry-run`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.output_name import is_one_file
from tunable_magmax.checkpoints.shards import plan_shards
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.inputs import Inputs, PathLike
from tunable_magmax.engines.local import DEFAULT_MEMORY, DEFAULT_SHARD_SIZE
from tunable_magmax.engines.weight_files import output_tensors
from tunable_magmax.errors import InputError
from tunable_magmax.merging.kernels import kernels_for
from tunable_magmax.merging.memory import MemoryPlan, plan_memory, read_threads
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.merging.options import Options
from tunable_magmax.sizes import parse_size, show_size


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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plan_merge(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike | None = None,
    *,
    memory: int | str | None = None,
    shard_size: int | str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    **given: Any,
) -> MergePlan:
    """Plan a merge without reading values or writing anything; what stands in its way is in `problems`.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("base", "one"):
    ...     save_file({"w": torch.zeros(4)}, folder / f"{name}.safetensors")
    >>> plan = plan_merge(folder / "base.safetensors", [folder / "one.safetensors"])
    >>> plan.elements, plan.problems
    (4, ())
    """
    problems: list[str] = []
    if out is not None:
        problems += _output_problems(Path(out), overwrite)
    try:
        options = Options.read(len(tasks), **given)
        bound = DEFAULT_MEMORY if memory is None else parse_size(memory, "memory")
        limit = DEFAULT_SHARD_SIZE if shard_size is None else parse_size(shard_size, "shard size")
        with Inputs(base, tasks, options) as inputs:
            if out is not None:
                problems += _complaints(inputs.refuse_as_output, Path(out))
            return _planned(inputs, options, bound, limit, threads, Path(out) if out is not None else None, problems)
    except InputError as error:
        problems.append(str(error))
    method = str(given.get("method", "tunable_magmax"))
    return MergePlan(method, len(tasks), (), (), 0, None, 0, 0, 0, 0, 0, 0, tuple(problems), ())


def _planned(
    inputs: Inputs, options: Options, bound: int, limit: int, threads: int | None, out: Path | None, problems: list[str]
) -> MergePlan:
    layout = inputs.layout
    tasks = len(inputs.checkpoints) - 1
    kernels = kernels_for(torch.device("cpu"))
    try:
        memory = plan_memory(layout, options, kernels, read_threads(threads), bound)
    except InputError as error:
        problems.append(str(error))
        memory = MemoryPlan(0, 0, 0, 0, 0)
    if options.budget is not None and sum(options.budget) > layout.elements:
        problems.append(f"the budget sums to {sum(options.budget):,}, but there are only {layout.elements:,} elements")
    merged = {tensor.name: options.out_dtype or tensor.widest for tensor in layout.mergeable}
    single = out is not None and out.name.endswith(".safetensors")
    shards = plan_shards(output_tensors(layout, merged, options.out_dtype), None if single else limit)
    to_write = sum(shard.size for shard in shards)
    if out is not None:
        problems += _space_problems(out, to_write + (memory.planes if memory.spill else 0))
    method = METHODS[options.method](options, tasks)
    method.assume(layout.elements)
    passes, to_read = _reading(inputs, options, memory, tasks)
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
        spilled=memory.planes if memory.spill else 0,
        problems=tuple(problems),
        warnings=(*inputs.warnings(), *layout.warnings),
        notes=tuple(inputs.notes()),
    )


def _reading(inputs: Inputs, options: Options, memory: MemoryPlan, tasks: int) -> tuple[int, int]:
    """Walks over the inputs, and the bytes they read; of an adapter's factors, those that are not read again."""
    layout = inputs.layout
    every = sum(map(inputs.bytes_of, layout.mergeable))
    base = sum(tensor.infos[0].nbytes for tensor in layout.mergeable)
    copied = sum(info.nbytes for info in layout.copied)
    walks = 2 if options.scale is not None else 3
    read = walks * every - (every - base if memory.stash else 0)
    if METHODS[options.method](options, tasks).cuts_by_magnitude:
        # Each task's cut by magnitude: a walk for each digit of the histogram and one for the cut, over base and task.
        digits = 4 if any(tensor.working == "F64" for tensor in layout.mergeable) else 2
        walks += digits + 1
        read += (digits + 1) * (every - base + tasks * base)
    return walks, read + copied


def _output_problems(out: Path, overwrite: bool) -> list[str]:
    if named := _complaints(is_one_file, out):
        return named
    beside = out.with_name(f"{out.name.removesuffix('.safetensors')}.report.json")
    if out.name.endswith(".safetensors") and beside.exists() and not out.exists() and not overwrite:
        return [f"{beside} already exists: move it away, or pass --overwrite to replace it"]
    return _complaints(Output.check, out, overwrite)


def _complaints(check: Any, *arguments: Any) -> list[str]:
    try:
        check(*arguments)
    except InputError as error:
        return [str(error)]
    return []


def _space_problems(out: Path, needed: int) -> list[str]:
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        return [f"{show_size(needed)} would be written, but only {show_size(free)} are free at {folder}"]
    return []
