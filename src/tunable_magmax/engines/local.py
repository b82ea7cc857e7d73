"""File-to-file merges on this machine: streamed under a memory bound, resumable, committed atomically."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunable_magmax.checkpoints.card import retyped_config, tag_along
from tunable_magmax.checkpoints.output_path import is_one_file
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines.choice import check_merge
from tunable_magmax.engines.inputs import FileVectors, Inputs, PathLike, read_names
from tunable_magmax.engines.place import Errand, Place
from tunable_magmax.engines.sidecars import log_merge, write_sidecars
from tunable_magmax.engines.space import check_space
from tunable_magmax.engines.weight_files import expected_shards, output_tensors, shard_data, write_weights
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.files import Progress, parse_size
from tunable_magmax.merging.kernels import Kernels
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.resources import factor_room, kernels_for, plan_memory, read_threads, working_threads
from tunable_magmax.merging.stream import Merge
from tunable_magmax.version import __version__

__all__ = [
    "DEFAULT_MEMORY",
    "DEFAULT_SHARD_SIZE",
    "Inputs",
    "fingerprint_of",
    "merge_checkpoints",
    "merge_of",
    "output_tensors",
    "resumable",
    "shard_data",
]

DEFAULT_MEMORY = 1 << 30
DEFAULT_SHARD_SIZE = 5_000_000_000


def merge_checkpoints(
    base: PathLike,
    tasks: Sequence[PathLike],
    out: PathLike,
    *,
    method: str = "tunable_magmax",
    weights: Sequence[Any] | None = None,
    budget: Sequence[int] | None = None,
    scale: float | str = "matched",
    scope: str = "model",
    compare: str = "all",
    keep: str = "random",
    density: float = 0.2,
    seed: int = 0,
    out_dtype: torch.dtype | str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    memory: int | str | None = None,
    shard_size: int | str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    fresh: bool = False,
    digest_inputs: bool = False,
    base_model: str | None = None,
    names: Sequence[str] | None = None,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> MergeReport:
    """Merge checkpoint files or directories into a new one, streamed; `memory` bounds working memory (default 1 GiB).

    A task may be a directory with a LoRA adapter (docs/lora.md).
    `out` is a directory in Hugging Face layout, or one file if it ends in `.safetensors`. It appears whole or not at
    all; an interrupted merge goes on from `<out>.partial` when called again. The other options are those of
    `merge_state_dicts`, and the result is the same to the bit. `names` are what report and model card call the tasks.
    `device="cuda"` merges on a GPU. With `engine="ray"`, `workers` share the work, at `ray_address` or here; `memory`
    and `threads` are of each. `notify` is told what the plan notes, such as files that `memory` does not bound.

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
    options = Options.read(
        len(tasks),
        method=method,
        weights=weights,
        budget=budget,
        scale=scale,
        scope=scope,
        compare=compare,
        keep=keep,
        density=density,
        seed=seed,
        out_dtype=out_dtype,
        include=include,
        exclude=exclude,
    )
    called = read_names(names, len(tasks))
    bound = DEFAULT_MEMORY if memory is None else parse_size(memory, "memory")
    shard = DEFAULT_SHARD_SIZE if shard_size is None else parse_size(shard_size, "shard size")
    target = Path(out)
    single = is_one_file(target)
    started = time.time()
    with _place(engine, workers, ray_address, threads, device) as place, Inputs(base, tasks, options) as inputs:
        inputs.refuse_as_output(target)
        for name, path in tag_along(inputs.paths[0]):
            retyped_config(name, path, options.out_dtype)  # a broken one is better found now than after the merge
        fingerprint = fingerprint_of(inputs, options, 0 if single else shard, base_model, called)
        # Here, because what is asked for must not cost the finished shards of an earlier run.
        spilled = place.check(inputs, options, bound)
        shards = expected_shards(inputs.layout, options.out_dtype, None if single else shard)
        check_space(target, sum(file.size for file in shards) + spilled)
        if notify is not None:
            for note in inputs.notes():
                notify(note)
        with Output(target, fingerprint, overwrite=overwrite, fresh=fresh) as output, resumable(output):
            try:
                if single:
                    output.check_sidecar("report.json")
                report = place.merge(Errand(inputs, options, output, None if single else shard, bound, progress))
                digests = inputs.digests() if digest_inputs else {}
                report = replace(report, inputs=digests, names=called, adapters=inputs.described())
                report = write_sidecars(report, inputs, output, base_model)
            except InputError:
                output.discard()
                raise
            output.commit()
        log_merge(target.with_name(f"{target.name}.log"), target, inputs, report, started)
    if not report.elements:
        warnings.warn(report.warnings[-1], stacklevel=2)
    return report


@dataclass(frozen=True, slots=True)
class Here:
    """This process."""

    threads: int | None

    def check(self, inputs: Inputs, options: Options, memory: int) -> int:
        kernels = kernels_for(torch.device("cpu"))
        plan = plan_memory(inputs.layout, options, kernels, working_threads(kernels, self.threads), memory)
        return plan.planes if plan.spill else 0

    def merge(self, errand: Errand) -> MergeReport:
        kernels, spill = kernels_for(torch.device("cpu")), errand.output.scratch("planes")
        how = self.threads, errand.memory, spill, errand.progress
        with merge_of(errand.inputs, errand.options, kernels, *how) as merge:
            merge.survey()
            merge.decide()
            return write_weights(merge, errand.inputs, errand.output, errand.shard_size)


@contextmanager
def _place(
    engine: str, workers: int | None, address: str | None, threads: int | None, device: str | None
) -> Iterator[Place]:
    check_merge(engine, workers, address, device)
    if engine == "local":
        if device is None or device == "cpu":
            yield Here(threads)
            return
        from tunable_magmax.engines.on_device import OnDevice, open_device

        yield OnDevice(open_device(device), threads)
        return
    from tunable_magmax.engines.cluster import join_cluster

    with join_cluster(address, workers, None if threads is None else read_threads(threads)) as cluster:
        yield cluster


def fingerprint_of(
    inputs: Inputs, options: Options, shard_size: int, base_model: str | None, names: tuple[str, ...] | None
) -> dict[str, Any]:
    """What an interrupted merge is recognised by, as JSON."""
    return {
        "version": __version__,
        **{name: _plain(getattr(options, name)) for name in Options.__slots__},
        "shard_size": shard_size,
        "base_model": base_model,
        **({} if names is None else {"names": list(names)}),
        "inputs": inputs.identity(),
    }


def _plain(value: Any) -> Any:
    return [str(part) for part in value] if isinstance(value, tuple) else str(value)


@contextmanager
def resumable(output: Output) -> Iterator[None]:
    """Failures to read or write, whatever raised them, are `StorageError`s that say where the finished work is kept."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) and str(output.partial) in str(error):
            raise
        raise StorageError(
            f"{error}. Finished shards are kept in {output.partial}: put that right and run the same command again "
            "to continue"
        ) from error


def merge_of(
    inputs: Inputs,
    options: Options,
    kernels: Kernels,
    threads: int | None,
    memory: int,
    spill: Path | None,
    progress: Progress | None,
) -> Merge:
    """The engine over opened checkpoints."""
    return Merge(
        inputs.layout,
        FileVectors(inputs.checkpoints, factor_room(inputs.layout, memory)),
        options,
        kernels,
        labels=inputs.labels,
        threads=threads,
        memory=memory,
        spill=spill,
        progress=progress,
        notes=tuple(inputs.warnings()),
    )
