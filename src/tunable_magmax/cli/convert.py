"""`tmx convert`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, working
from tunable_magmax.errors import InputError, plural
from tunable_magmax.files import show_size
from tunable_magmax.workflows.options import ConvertOptions, flat


def convert(source: Path, /, *, options: ConvertOptions = parsed(ConvertOptions)) -> None:
    """Write a checkpoint as safetensors: from torch files, or into other shards.

    tmx convert model.bin -o out/
    tmx convert checkpoint/ -o model.safetensors

    Of torch files only tensors are read: no code of theirs is run. Values and types stay as they are.

    Parameters
    ----------
    source
        A torch file, a safetensors file, or a directory that holds one or several.
    """
    from tunable_magmax.workflows.convert import convert_checkpoint

    if options.out is None:
        raise InputError("where should the result go? Give -o OUT, a directory or a name that ends in .safetensors")
    with working() as progress:
        done = convert_checkpoint(source, progress=progress, **flat(options))
    weights = sum(name.endswith(".safetensors") for name in done.files)  # not the index or the configuration
    tied = f", {plural(len(done.tied), 'tied name')} kept" if done.tied else ""
    line = (
        f"{done.out}: {plural(done.tensors, 'tensor')}, {plural(done.elements, 'element')}, "
        f"{show_size(done.bytes)}{tied}, in {plural(weights, 'weight file')}"
    )
    show_result(asdict(done), [line, *(f"note: {note}" for note in done.notes)])
