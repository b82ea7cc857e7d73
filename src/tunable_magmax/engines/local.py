"""File-to-file merges: streamed under a memory bound, committed atomically."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from tunable_magmax.checkpoints.companions import check_companion
from tunable_magmax.checkpoints.writer import Output as Writer
from tunable_magmax.engines.inputs import Inputs, PathLike
from tunable_magmax.engines.log import Log, finished_report
from tunable_magmax.engines.outputs import (
    Job,
    check_space,
    expected_shards,
    output_companions,
    write_sidecars,
    write_weights,
)
from tunable_magmax.engines.settings import Additions, Output, Place
from tunable_magmax.engines.sources import file_sources
from tunable_magmax.errors import InputError
from tunable_magmax.files import Progress, identities, refuse_link
from tunable_magmax.merging.merge import Merge
from tunable_magmax.merging.methods import read_options
from tunable_magmax.merging.names import by_task, named_tasks
from tunable_magmax.merging.options import Options, takes_options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import (
    Limits,
    kernels_for,
    open_device,
    plan_memory,
    read_threads,
)
from tunable_magmax.version import __version__

COMPLETE = "{out} is complete, made from the same inputs with the same options; overwrite (--overwrite) makes it again"


class Engine(Protocol):
    """Merges files: in this process or on a cluster."""

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        """Raises an error if the resources do not suffice; returns the bytes needed on disk beside the weights."""

    def merge(self, job: Job) -> MergeReport:
        """Merges and writes the weights."""


@takes_options
def merge_checkpoints(
    base: PathLike,
    tasks: Sequence[PathLike] | Mapping[str, PathLike],
    out: PathLike,
    *,
    memory: int | str | None = None,
    shard_size: int | str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    names: Sequence[str] | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    additions: Additions | None = None,
    **options: Any,
) -> MergeReport:
    """Merges checkpoint files or directories into a new one, streamed; `memory` bounds working memory (default 1 GiB).

    The options are those of `Options`, and the result is that of `merge_state_dicts`, to the bit (for `tsv`, within a
    tolerance). A task may be a directory with a LoRA adapter, or have a classifier of its own (docs/merge.md).
    `out` is a directory in Hugging Face layout, or one file if it ends in `.safetensors`. It appears whole or not at
    all; an interrupted merge begins anew. `names` are what report, configuration and model card call the tasks; `tasks`
    may also be a dict by name. Tasks with names may have `weights` and `budget` by name, where a task that is not named
    gets 0.
    `device="cuda"` merges on a GPU. With `engine="ray"`, `workers` share the work, at `ray_address` or here; `memory`
    and `threads` are those of each. `notify` is called with notes, such as which files `memory` does not bound.
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
    read = read_options(len(tasks), **by_task(options, names))
    writing = Output(
        "1GiB" if memory is None else memory, threads, "5GB" if shard_size is None else shard_size, overwrite
    )
    place = Place(engine, device, workers, ray_address)
    target, started = Path(out), time.time()
    bound, shard = writing.memory_bytes, writing.shard_bytes(target)
    if additions is not None and shard is None:
        raise InputError(f"{target} is one file, to which no other files can be added: give a directory")
    with _engine(place, threads) as runs_on, Inputs(base, tasks, read) as inputs:
        inputs.refuse_as_output(target)
        log_file = target.with_name(f"{target.name}.log")
        refuse_link(log_file)
        if shard is not None:
            check_companions(inputs)
        known_by = finished_by(inputs, read, shard, names) if additions is None else additions.fingerprint
        if Writer.recover(target) and notify is not None:
            notify(f"an earlier merge into {out} was interrupted: its unfinished work was removed, and it begins anew")
        if additions is None and not overwrite and (finished := finished_report(target, known_by)) is not None:
            if notify is not None:
                notify(COMPLETE.format(out=out))
            return finished
        Writer.check(target, overwrite)
        spilled = runs_on.check(inputs, read, bound)
        shards = expected_shards(inputs.layout, read.out_dtype, shard)
        check_space(target, sum(file.size for file in shards) + spilled)
        if notify is not None:
            for note in inputs.notes():
                notify(note)
        with Writer(target, overwrite=overwrite) as output:
            job = Job(inputs, read, output, shard, bound, progress, names, additions)
            report = write_output(job, lambda: runs_on.merge(job), Log(log_file, target, started, known_by))
    if not report.elements:
        warnings.warn(report.warnings[-1], stacklevel=2)
    return report


def check_companions(inputs: Inputs) -> None:
    """Raises an `InputError` for a file that is to go along and can't be read, before work is spent on the weights."""
    for name, path, _ in output_companions(inputs):
        check_companion(name, path)


def write_output(job: Job, merge: Callable[[], MergeReport], log: Log) -> MergeReport:
    """Has `merge` write the weights, writes the other files of the output, and commits it; returns the full report."""
    inputs, output = job.inputs, job.output
    if job.shard_size is None:
        output.check_sidecar("report.json")
    report = completed(merge(), inputs, job.names)
    inputs.refuse_changed()
    report = write_sidecars(report, inputs, output, job.additions)
    # Before the commit: a sweep must recognise every point that is there.
    log.write(inputs, report)
    output.commit()
    return report


def completed(report: MergeReport, inputs: Inputs, names: tuple[str, ...] | None) -> MergeReport:
    """Returns a report with what is known of its inputs: sizes, names, adapters, commits on the hub."""
    heads = None if inputs.heads is None else inputs.heads.describe()
    adapters, hub = inputs.described(), inputs.pins()
    return replace(report, inputs=inputs.sizes, names=names, adapters=adapters, hub=hub, heads=heads)


@dataclass(frozen=True, slots=True)
class ThisProcess:
    """The engine that merges in this process, on the CPU or on a GPU."""

    threads: int | None
    device: torch.device

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        kernels = kernels_for(self.device)
        plan = plan_memory(inputs.layout, options, kernels, self.threads, memory)
        return plan.planes if plan.spill else 0

    def merge(self, job: Job) -> MergeReport:
        limits = Limits(self.threads, job.memory, job.output.scratch("planes"), job.progress)
        with torch.no_grad(), merge_of(job.inputs, job.options, limits, self.device) as merge:
            merge.survey()
            merge.decide()
            return write_weights(merge, job)


@contextmanager
def _engine(place: Place, threads: int | None) -> Iterator[Engine]:
    """Yields the engine that merges there."""
    place.check()
    if place.engine == "ray":
        from tunable_magmax.engines.cluster import join_cluster

        each = None if threads is None else read_threads(threads)
        with join_cluster(place.ray_address, place.workers, each) as cluster:
            yield cluster
    else:
        yield ThisProcess(threads, open_device(place.device))


def fingerprint_of(
    inputs: Inputs, options: Options, shard_size: int | None, names: tuple[str, ...] | None
) -> dict[str, Any]:
    """Returns what a merge is recognised by, as JSON."""
    return {
        "version": __version__,
        **{name: _plain(getattr(options, name)) for name in Options.__slots__},
        "shard_size": shard_size or 0,
        **({} if names is None else {"names": list(names)}),
        **({} if inputs.heads is None else {"heads_of": inputs.heads.identity()}),
        "inputs": inputs.identity(),
    }


def finished_by(
    inputs: Inputs, options: Options, shard_size: int | None, names: tuple[str, ...] | None
) -> dict[str, Any]:
    """Returns what a finished merge is recognised by: also the files that go along."""
    files = identities(path for _, path, _ in output_companions(inputs))
    whole = json.dumps([fingerprint_of(inputs, options, shard_size, names), files])
    return {"merge": hashlib.sha256(whole.encode()).hexdigest()}


def _plain(value: Any) -> Any:
    return [str(part) for part in value] if isinstance(value, tuple) else str(value)


def merge_of(inputs: Inputs, options: Options, limits: Limits, device: torch.device | None = None) -> Merge:
    """Returns the merge of opened checkpoints on this machine, by default on the CPU."""
    device = device or torch.device("cpu")
    return Merge(inputs.sources(file_sources(inputs.checkpoints, device)), options, kernels_for(device), limits)
