"""What `tmx convert` does: writes any readable checkpoint as safetensors, streamed; of a pickle only the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunable_magmax.checkpoints.checkpoint import Checkpoint
from tunable_magmax.checkpoints.companions import (
    MODEL_CONFIG,
    changed_companion,
    check_companion,
    companion_files,
    companion_notes,
    missing_config_note,
)
from tunable_magmax.checkpoints.hub import located
from tunable_magmax.checkpoints.safetensors_file import INDEX, Shard, index_json, plan_shards
from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.checkpoints.tensors import BITS, FORMAT_KEY
from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.engines import settings
from tunable_magmax.engines.outputs import check_space
from tunable_magmax.errors import InputError, closest
from tunable_magmax.files import Progress

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion wrote: `files` are the SHA-256 of each file, `tied` the further names of tied tensors."""

    source: str
    out: str
    tensors: int
    elements: int
    bytes: int
    tied: Mapping[str, str]
    files: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What the result still lacks."""


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    shard_size: int | str | None = None,
    strip_prefix: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Writes a checkpoint as safetensors: a directory, or one file if `out` ends in `.safetensors`.

    Values and types stay as they are; tied tensors are written once. From directory to directory, configuration and
    tokenizer files are copied. The output appears whole or not at all. `strip_prefix` is taken off the names that begin
    with it: so a model with a head gets the names of the bare one.

    >>> convert_checkpoint("pytorch_model.bin", "model.safetensors").tensors  # doctest: +SKIP
    201
    """
    target = Path(out)
    limit = settings.Output(shard_size=shard_size or "5GB").shard_bytes(target)
    single, source = limit is None, located(source)
    with open_checkpoint(source) as checkpoint:
        if checkpoint.would_be_replaced_by(target):
            raise InputError(f"{target} is the checkpoint that is converted: choose another output")
        stripped = _stripped(checkpoint, strip_prefix)
        tied = {stripped[alias]: stripped[kept] for alias, kept in checkpoint.aliases.items()}
        stored = {stripped[name]: name for name in checkpoint.tensors}
        if (kept := tied.pop(FORMAT_KEY, None)) is not None:
            stored[FORMAT_KEY] = stored[kept]
        # Widest types first, so that all data is aligned.
        tensors = sorted(
            (replace(checkpoint.tensors[name], name=new) for new, name in stored.items()),
            key=lambda info: (-BITS[info.dtype], info.name),
        )
        shards = plan_shards(tensors, limit, aliases=tied)
        companions = [] if single else list(companion_files(source))
        for name, path in companions:
            check_companion(name, path)
        check_space(target, sum(shard.size for shard in shards))
        with Output(target, overwrite=overwrite) as output:
            files = _write(checkpoint, stored, output, shards, progress)
            checkpoint.refuse_changed()
            for name, path in companions:
                changed = changed_companion(name, path)
                files[name] = output.write_file(name, path if changed is None else changed)
            output.commit()
    elements, size = sum(info.numel for info in tensors), sum(info.nbytes for info in tensors)
    lacking = None if single or MODEL_CONFIG in files else missing_config_note(target)
    notes = [*([lacking] if lacking else ()), *(() if single else companion_notes(source))]
    return Conversion(str(source), str(target), len(tensors), elements, size, tied, files, tuple(notes))


def _stripped(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    """Returns the new name of each tensor; two that would get one name are refused, as is a prefix that none has."""
    names = [*checkpoint.tensors, *checkpoint.aliases]
    if prefix and not any(name.startswith(prefix) for name in names):
        prefixes = list(dict.fromkeys(f"{name.split('.')[0]}." for name in names if "." in name))
        raise InputError(f"{checkpoint.path}: no name has the prefix {prefix!r}{closest(prefix, prefixes)}")
    stripped = {name: name.removeprefix(prefix) for name in names}
    holders = Counter(stripped.values())
    for name, new in stripped.items():
        if not new or (new != name and holders[new] > 1):
            problem = "there is a tensor of that name already" if new else "nothing is left of it"
            raise InputError(f"{checkpoint.path}: {name!r} can't become {new!r}, {problem}; strip another prefix")
    return stripped


def _write(
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    output: Output,
    shards: Sequence[Shard],
    progress: Progress | None,
) -> dict[str, str]:
    """Writes the shards, and an index if there are several; `stored` maps new names to the checkpoint's."""
    total, written = sum(shard.data_size for shard in shards), 0

    def data(shard: Shard) -> Iterator[memoryview]:
        done = written
        for info in shard.tensors:
            for start in range(0, info.nbytes, _BLOCK):
                block = memoryview(bytearray(min(_BLOCK, info.nbytes - start)))
                checkpoint.read_into(stored[info.name], start, block)
                yield block
                done += block.nbytes
                if progress is not None:
                    progress("convert", done, total)

    files: dict[str, str] = {}
    for shard in shards:
        files[shard.name] = output.write_shard(shard, data(shard))
        written += shard.data_size
    if len(shards) > 1:
        files[INDEX] = output.write_file(INDEX, index_json(shards))
    return files
