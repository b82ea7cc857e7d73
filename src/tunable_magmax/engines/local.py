"""File-to-file merges: streamed under a memory bound, committed atomically."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.companions import check_companion
from tunable_magmax.checkpoints.writer import Output as Writer
from tunable_magmax.engines.inputs import Inputs, PathLike, file_sources
from tunable_magmax.engines.outputs import (
    Job,
    append_log,
    check_space,
    expected_shards,
    log_of,
    output_companions,
    write_sidecars,
    write_weights,
)
from tunable_magmax.engines.settings import Additions, Output, Place, take
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress, refuse_link
from tunable_magmax.merging.budget import named_tasks
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.options import Options, takes_options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.walker import Limits, MemoryPlan, kernels_for, open_device, plan_memory, read_threads


@takes_options(Options, Output, Place)
def merge_checkpoints(
    base: PathLike,
    tasks: Sequence[PathLike] | Mapping[str, PathLike],
    out: PathLike,
    *,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    additions: Additions | None = None,
    **options: Any,
) -> MergeReport:
    """Merges checkpoint files or directories into a new one, streamed; `memory` bounds working memory (default 1 GiB).

    The options are those of `Options`, `Output` and `Place`; the result is that of `merge_state_dicts`, to the bit (for
    `tsv`, within a tolerance). A task may be a directory with a LoRA adapter, or have a classifier of its own
    (docs/merge.md).
    `out` is a directory in Hugging Face layout, or one file if it ends in `.safetensors`. It appears whole or not at
    all; an interrupted merge begins anew. `names` are what report, configuration and model card call the tasks; `tasks`
    may also be a dict by name. Tasks with names may have `weights` and `budget` by name, where a task that is not named
    gets 0.
    `device="cuda"` merges on a GPU. With `engine="ray"`, `workers` share the work, at `ray_address` or here; `memory`
    and `threads` are those of each. With `adapter`, a rank, tasks that are LoRA adapters become one of that rank.
    `notify` is called with notes, such as which files `memory` does not bound.
    `additions` make more files of an output directory, which appear with it and are in the report.

    >>> import tempfile, torch
    >>> from safetensors.torch import load_file, save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, value in {"base": 0.0, "one": 1.0, "two": 2.0}.items():
    ...     save_file({"w": torch.full((4,), value)}, folder / f"{name}.safetensors")
    >>> report = merge_checkpoints(
    ...     folder / "base.safetensors", [folder / "one.safetensors", folder / "two.safetensors"],
    ...     folder / "merged.safetensors", method="average", scale=1)
    >>> load_file(folder / "merged.safetensors")["w"]
    tensor([1.5000, 1.5000, 1.5000, 1.5000])
    """
    tasks, names = named_tasks(tasks, names)
    writing, place = take(Output, options), take(Place, options)
    read = read_options(len(tasks), names, **options)
    target, started = Path(out), time.time()
    bound, shard, notify = writing.memory_bytes, writing.shard_bytes(target), notify or (lambda note: None)
    if additions is not None and shard is None:
        raise InputError(f"{target} is one file, to which no other files can be added: give a directory")
    with _engine(place, writing.threads) as (each, merge), Inputs(base, tasks, read) as inputs:
        if Writer.recover(target):
            notify(f"an earlier merge into {out} was interrupted: its unfinished work was removed, and it begins anew")
        plan_merge(inputs, read, replace(writing, threads=each), place, target)
        for note in inputs.notes():
            notify(note)
        with Writer(target, overwrite=writing.overwrite) as output:
            job = Job(inputs, read, output, shard, bound, progress, names, additions)
            if shard is None:
                output.check_sidecar("report.json")
            report = _finish(merge(job), job)
            append_log(job, started, report)  # before the commit: it knows every output there is
            output.commit()
    if not report.elements:
        warnings.warn(report.warnings[-1], stacklevel=2)
    return report


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge would take, as if all mergeable tensors had changed."""

    memory: MemoryPlan
    sizes: tuple[int, ...]
    """Of the weight files, in bytes."""


def plan_merge(inputs: Inputs, options: Options, writing: Output, place: Place, out: Path | None = None) -> MergePlan:
    """Checks from headers alone all that could prevent a merge, into `out` if it is given; reads no values."""
    layout = inputs.layout
    if options.budget is not None and sum(options.budget) > layout.elements:
        raise InputError(f"the budget sums to {sum(options.budget):,}, but there are {layout.elements:,} elements")
    if out is not None:
        inputs.refuse_as_output(out)
        refuse_link(log_of(out))
        Writer.check(out, writing.overwrite)
    limit = writing.shard_bytes(out or Path("out"))
    if limit is not None:  # a broken one must not cost the work on the weights
        for name, path, _ in output_companions(inputs):
            check_companion(name, path)
    memory = plan_memory(layout, options, kernels_for(open_device(place.device)), writing.threads, writing.memory_bytes)
    if options.adapter is not None:
        from tunable_magmax.engines.adapters import adapter_bytes

        if limit is None or place.engine != "local":
            raise InputError("an adapter is written by this machine, into a directory: give another output or engine")
        sizes: tuple[int, ...] = (adapter_bytes(inputs, options.adapter),)
    else:
        sizes = tuple(shard.size for shard in expected_shards(layout, options.out_dtype, limit))
    if out is not None:
        check_space(out, sum(sizes) + (memory.planes if memory.spill and place.engine == "local" else 0))
    return MergePlan(memory, sizes)


def _finish(report: MergeReport, job: Job) -> MergeReport:
    """Writes the files beside the weights; returns the full report."""
    inputs = job.inputs
    inputs.refuse_changed()
    heads = None if inputs.heads is None else inputs.heads.describe()
    adapters, hub = inputs.described(), inputs.pins()
    report = replace(report, inputs=inputs.sizes, names=job.names, adapters=adapters, hub=hub, heads=heads)
    return write_sidecars(report, inputs, job.output, job.additions)


@contextmanager
def _engine(place: Place, threads: int | None) -> Iterator[tuple[int | None, Callable[[Job], MergeReport]]]:
    """Yields the threads of each process that merges (None: one for each core), and what merges and writes weights."""
    place.check()
    if place.engine == "local":
        yield threads, lambda job: _merge_here(job, threads, open_device(place.device))
        return
    from tunable_magmax.engines.cluster import join_cluster

    with join_cluster(place.ray_address, place.workers, None if threads is None else read_threads(threads)) as engine:
        yield engine


def _merge_here(job: Job, threads: int | None, device: torch.device) -> MergeReport:
    """Merges in this process, on the CPU or on a GPU, and writes the weights."""
    sources = job.inputs.sources(file_sources(job.inputs.checkpoints, device))
    limits = Limits(threads, job.memory, job.output.scratch("planes"), job.progress)
    with torch.no_grad(), Merge(sources, job.options, kernels_for(device), limits) as merge:
        merge.survey()
        merge.decide()
        if job.options.adapter is None:
            return write_weights(merge, job)
        from tunable_magmax.engines.adapters import write_adapter

        return write_adapter(merge, job, job.options.adapter)
