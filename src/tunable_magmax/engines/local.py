"""File-to-file merges on this machine: streamed under a memory bound, resumable, committed atomically."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import yaml
from torch import Tensor

import tunable_magmax
from tunable_magmax.checkpoints.card import (
    CARD,
    CONFIG,
    REPORT,
    base_name,
    effective_config,
    model_card,
    retyped_config,
    tag_along,
)
from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.layout import Layout, Mergeable, Signature, build_layout
from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import BITS, TensorInfo, torch_dtype
from tunable_magmax.checkpoints.writer import Output, Shard, index_json, plan_shards
from tunable_magmax.errors import InputError, StorageError
from tunable_magmax.merging.kernels import Kernels, kernels_for
from tunable_magmax.merging.memory import plan_memory, read_threads
from tunable_magmax.merging.options import Options
from tunable_magmax.merging.ownership import Piece
from tunable_magmax.merging.report import MergeReport
from tunable_magmax.merging.stream import Merge, Progress, cast_copied
from tunable_magmax.sizes import parse_size

DEFAULT_MEMORY = 1 << 30
DEFAULT_SHARD_SIZE = 5_000_000_000
COPY_BLOCK = 1 << 20
PathLike = str | Path


class Inputs:
    """Base and tasks, opened together: their headers matched (`layout`), their files known. A context manager."""

    def __init__(self, base: PathLike, tasks: Sequence[PathLike], options: Options) -> None:
        self._stack = ExitStack()
        self.labels = ["base", *(f"task {t}" for t in range(1, len(tasks) + 1))]
        self.paths = [Path(base), *map(Path, tasks)]
        try:
            self.checkpoints = [self._stack.enter_context(checkpoint) for checkpoint in self._open_all()]
            signatures = [Signature(checkpoint.tensors, checkpoint.aliases) for checkpoint in self.checkpoints]
            names = [f"{label} ({path})" for label, path in zip(self.labels, self.paths, strict=True)]
            self.layout = build_layout(signatures, names, options.include, options.exclude)
        except BaseException:
            self._stack.close()
            raise

    def _open_all(self) -> list[Checkpoint]:
        """Open all checkpoints; if some cannot be opened, one error says everything that is wrong."""
        opened: list[Checkpoint] = []
        problems: list[str] = []
        for label, path in zip(self.labels, self.paths, strict=True):
            try:
                opened.append(open_checkpoint(path))
            except InputError as error:
                problems.append(f"{label}: {error}")
        if problems:
            for checkpoint in opened:
                checkpoint.close()
            raise InputError(
                problems[0] if len(problems) == 1 else "several checkpoints can't be opened:\n" + "\n".join(problems)
            )
        return opened

    @property
    def base(self) -> Checkpoint:
        return self.checkpoints[0]

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def warnings(self) -> Iterator[str]:
        for label, path in zip(self.labels[1:], self.paths[1:], strict=True):
            if path.resolve() == self.paths[0].resolve():
                yield f"{label} is the base checkpoint itself"
        first: dict[Path, str] = {}
        for label, path in zip(self.labels[1:], self.paths[1:], strict=True):
            if first.setdefault(path.resolve(), label) != label:
                yield f"{label} is the same checkpoint as {first[path.resolve()]}"

    def identity(self) -> list[Any]:
        """What tells these files from others without reading them: for recognising interrupted work, not for output."""
        stats = [(file, file.stat()) for checkpoint in self.checkpoints for file in checkpoint.files]
        return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]

    def digests(self) -> dict[str, str]:
        """SHA-256 of every input file, by role."""
        found = {}
        for label, checkpoint in zip(self.labels, self.checkpoints, strict=True):
            for file in checkpoint.files:
                with open(file, "rb") as stream:
                    found[f"{label}: {file.name}"] = hashlib.file_digest(stream, "sha256").hexdigest()
        return found

    def refuse_as_output(self, out: Path) -> None:
        """An output may not replace an input."""
        for label, checkpoint in zip(self.labels, self.checkpoints, strict=True):
            if checkpoint.would_be_replaced_by(out):
                raise InputError(f"the output {out} would replace {label} ({checkpoint.path}); choose another output")


class FileVectors:
    """`Vectors` over opened checkpoints: bytes go straight to the scratch, or through a raw buffer if types differ."""

    borrows = True

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._checkpoints = checkpoints
        self._local = threading.local()

    def read(self, source: int, tensor: Mergeable, start: int, stop: int, scratch: Tensor) -> Tensor:
        info = tensor.infos[source]
        size = BITS[info.dtype] // 8
        stored = torch_dtype(info.dtype)
        assert stored is not None
        if stored == scratch.dtype:
            self._checkpoints[source].read_into(info.name, start * size, scratch.numpy().data)
            return scratch
        raw = self._raw((stop - start) * size)
        self._checkpoints[source].read_into(info.name, start * size, raw.numpy().data)
        return scratch.copy_(raw.view(stored))

    def _raw(self, size: int) -> Tensor:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < size:
            self._local.buffer = buffer = torch.empty(size, dtype=torch.uint8)
        assert isinstance(buffer, Tensor)
        return buffer[:size]


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
    progress: Progress | None = None,
) -> MergeReport:
    """Merge checkpoint files or directories into a new one, streamed; `memory` bounds working memory (default 1 GiB).

    `out` is a directory in Hugging Face layout, or one file if it ends in `.safetensors`. It appears whole or not at
    all; an interrupted merge goes on from `<out>.partial` when called again. The other options are those of
    `merge_state_dicts`, and the result is the same to the bit.

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
    bound = DEFAULT_MEMORY if memory is None else parse_size(memory, "memory")
    shard = DEFAULT_SHARD_SIZE if shard_size is None else parse_size(shard_size, "shard size")
    target = Path(out)
    single = target.name.endswith(".safetensors")
    started = time.time()
    with Inputs(base, tasks, options) as inputs:
        inputs.refuse_as_output(target)
        for path in tag_along(inputs.paths[0]):
            retyped_config(path, options.out_dtype)  # a broken one is better found now than after the merge
        kernels = kernels_for(torch.device("cpu"))
        fingerprint = fingerprint_of(inputs, options, 0 if single else shard, base_model)
        # Here, because what is asked for must not cost the finished shards of an earlier run.
        plan_memory(inputs.layout, options, kernels, read_threads(threads) if kernels.threads else 1, bound)
        with Output(target, fingerprint, overwrite=overwrite, fresh=fresh) as output, resumable(output):
            try:
                if single:
                    output.check_sidecar("report.json")
                spill = output.scratch("planes")
                with merge_of(inputs, options, kernels, threads, bound, spill, progress) as merge:
                    merge.survey()
                    merge.decide()
                    report = write_weights(merge, inputs, output, None if single else shard)
                report = replace(report, inputs=inputs.digests() if digest_inputs else {})
                report = write_sidecars(report, inputs, output, base_model)
            except InputError:
                output.discard()
                raise
            output.commit()
        log_merge(target.with_name(f"{target.name}.log"), target, inputs, report, started)
    if not report.elements:
        warnings.warn(report.warnings[-1], stacklevel=2)
    return report


def fingerprint_of(inputs: Inputs, options: Options, shard_size: int, base_model: str | None) -> dict[str, Any]:
    """What an interrupted merge is recognised by, as JSON."""
    return {
        "version": tunable_magmax.__version__,
        **{name: _plain(getattr(options, name)) for name in Options.__slots__},
        "shard_size": shard_size,
        "base_model": base_model,
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
        FileVectors(inputs.checkpoints),
        options,
        kernels,
        labels=inputs.labels,
        threads=threads,
        memory=memory,
        spill=spill,
        progress=progress,
        notes=tuple(inputs.warnings()),
    )


def output_tensors(layout: Layout, merged: Mapping[str, str], out_dtype: str | None) -> list[TensorInfo]:
    """What the output holds, widest types first (so that all data is aligned); `merged` maps names to types."""
    infos = [
        TensorInfo(tensor.name, merged[tensor.name], tensor.shape)
        for tensor in layout.mergeable
        if tensor.name in merged
    ]
    kept = [TensorInfo(tensor.name, tensor.infos[0].dtype, tensor.shape) for tensor in layout.mergeable]
    for info in [*(info for info in kept if info.name not in merged), *layout.copied]:
        infos.append(TensorInfo(info.name, out_dtype, info.shape) if out_dtype and info.is_float else info)
    return sorted(infos, key=lambda info: (-BITS[info.dtype], info.name))


def write_weights(merge: Merge, inputs: Inputs, output: Output, shard_size: int | None) -> MergeReport:
    """Write what was decided, as one file if there is no shard size, less the shards that an earlier call finished."""
    layout = merge.layout
    merged = {layout.mergeable[s.tensor].name: merge.out_dtype(layout.mergeable[s.tensor]) for s in merge.stretches}
    tensors = output_tensors(layout, merged, merge.options.out_dtype)
    shards = plan_shards(tensors, shard_size, aliases=layout.ties)
    files: dict[str, str] = {}
    for shard in shards:
        done = output.finished(shard)
        if done is None:
            files[shard.name] = output.write_shard(shard, shard_data(merge, inputs, shard))
        else:
            files[shard.name] = done
            merge.measure([s for s in merge.stretches if layout.mergeable[s.tensor].name in _names(shard)])
    if len(shards) > 1:
        name = "model.safetensors.index.json"
        files[name] = output.write_file(name, index_json(shards))
    return replace(merge.report(), files=files)


def shard_data(merge: Merge, inputs: Inputs, shard: Shard) -> Iterator[memoryview]:
    """A shard's data in order: merged tensors from the engine, others from the base. A view lasts until the next."""
    by_name = {merge.layout.mergeable[s.tensor].name: s for s in merge.stretches}
    stretches = [by_name[info.name] for info in shard.tensors if info.name in by_name]
    buffers = _Buffers(merge.memory.chunk)

    def into(piece: Piece) -> Tensor:
        dtype = torch_dtype(merge.out_dtype(merge.layout.mergeable[piece.stretch.tensor]))
        assert dtype is not None
        return buffers.take(piece.stop - piece.start, dtype)

    rendered = merge.render(into, stretches)
    for info in shard.tensors:
        if info.name not in by_name:
            yield from _copied(inputs.base, info)
            continue
        left = info.numel
        while left:
            piece, values = next(rendered)
            yield values.view(torch.uint8).numpy().data
            buffers.give(values)
            left -= piece.stop - piece.start


class _Buffers:
    """Output buffers that go round: the writer hands them back."""

    def __init__(self, chunk: int) -> None:
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._bytes = chunk * 8

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = torch.empty(self._bytes, dtype=torch.uint8)
        return buffer[: size * dtype.itemsize].view(dtype)

    def give(self, values: Tensor) -> None:
        self._free.put(values.view(torch.uint8).as_strided((self._bytes,), (1,)))


def _copied(base: Checkpoint, info: TensorInfo) -> Iterator[memoryview]:
    """A tensor of the base, block by block, cast if the output asks for another type."""
    stored = base.tensors[info.name if info.name in base.tensors else base.aliases[info.name]]
    if stored.dtype == info.dtype:
        for start in range(0, info.nbytes, COPY_BLOCK):
            block = memoryview(bytearray(min(COPY_BLOCK, info.nbytes - start)))
            base.read_into(stored.name, start, block)
            yield block
        return
    source, target = torch_dtype(stored.dtype), torch_dtype(info.dtype)
    assert source is not None
    assert target is not None
    step = COPY_BLOCK // source.itemsize
    for start in range(0, info.numel, step):
        raw = torch.empty(min(step, info.numel - start), dtype=source)
        base.read_into(stored.name, start * source.itemsize, raw.view(torch.uint8).numpy().data)
        yield cast_copied(raw, target, info.name).view(torch.uint8).numpy().data


def _names(shard: Shard) -> set[str]:
    return {info.name for info in shard.tensors}


def write_sidecars(report: MergeReport, inputs: Inputs, output: Output, base_model: str | None) -> MergeReport:
    """The report, and in a directory also the base's own files, the configuration and a model card."""
    if output.out.name.endswith(".safetensors"):
        output.write_file("report.json", report.to_json().encode())
        return report
    digests = dict(report.files)
    for path in tag_along(inputs.paths[0]):
        changed = retyped_config(path, report.options["out_dtype"])
        digests[path.name] = (
            output.copy_file(path.name, path) if changed is None else output.write_file(path.name, changed)
        )
    name = base_name(inputs.paths[0], base_model)
    config = yaml.safe_dump(effective_config(report.options, report.method, report.tasks, name), sort_keys=False)
    note = "# Models are named here, not located: put in their paths before merging by this again.\n"
    digests[CONFIG] = output.write_file(CONFIG, (note + config).encode())
    digests[CARD] = output.write_file(CARD, model_card(name, report.method, _shares(report), config).encode())
    report = replace(report, files=digests)
    output.write_file(REPORT, report.to_json().encode())
    return report


def _shares(report: MergeReport) -> list[tuple[str, str]]:
    """What each task gave, in words."""
    names = [f"task {t}" for t in range(1, report.tasks + 1)]
    if report.counts is not None:
        total = max(report.elements, 1)
        return [(n, f"{c:,} elements ({c / total:.1%})") for n, c in zip(names, report.counts, strict=True)]
    weights = report.options["weights"] or ["1"] * report.tasks
    return [(n, f"weight {weight}") for n, weight in zip(names, weights, strict=True)]


def log_merge(log: Path, out: Path, inputs: Inputs, report: MergeReport, started: float) -> None:
    """What depends on clock, host and path stays out of the output: it goes to a log beside it."""
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": socket.gethostname(),
        "versions": {
            "tunable-magmax": tunable_magmax.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "base": str(inputs.paths[0].resolve()),
        "tasks": [str(path.resolve()) for path in inputs.paths[1:]],
        "out": str(out.resolve()),
        "files": dict(report.files),
    }
    # The output is complete, so a full disk must not make it look as if it were not.
    with suppress(OSError), open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
