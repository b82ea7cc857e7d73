"""`tmx convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tunable_magmax.cli.terminal import progress_bars, show
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size
from tunable_magmax.showing import plural


def convert(
    source: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    shard_size: str = "5GB",
    strip_prefix: str = "",
    overwrite: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Write a checkpoint as safetensors: from torch files, or into other shards.

    Torch files are opened weights-only: no code of theirs is run. Values and types stay as they are.

    Parameters
    ----------
    source
        A torch file, a safetensors file, or a directory that holds one or several.
    out
        A directory, or one file if it ends in .safetensors.
    shard_size
        Largest file of an output directory.
    strip_prefix
        Take this off the names that begin with it, such as model. where a model with a head meets a bare one.
    overwrite
        Replace an existing output.
    quiet
        No progress bar, no summary.
    as_json
        Print the result as JSON on stdout.
    """
    if out is None:
        raise InputError("where should the result go? Give -o OUT, a directory or a name that ends in .safetensors")
    from tunable_magmax.workflows.convert import convert_checkpoint

    with progress_bars(quiet or as_json) as progress:
        done = convert_checkpoint(
            source,
            out,
            shard_size=shard_size,
            strip_prefix=strip_prefix,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        show(json.dumps(done.to_dict(), indent=1) + "\n")
    elif not quiet:
        weights = sum(name.endswith(".safetensors") for name in done.files)  # not the index or the configuration
        tied = f", {plural(len(done.tied), 'tied name')} kept" if done.tied else ""
        show(
            f"{out}: {plural(done.tensors, 'tensor')}, {plural(done.elements, 'element')}, "
            f"{show_size(done.bytes)}{tied}, in {plural(weights, 'weight file')}\n"
        )
        show("".join(f"note: {note}\n" for note in done.notes))
