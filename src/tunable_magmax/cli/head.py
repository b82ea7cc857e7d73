"""`tmx head`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tunable_magmax.cli.terminal import progress_bars, show
from tunable_magmax.errors import InputError
from tunable_magmax.showing import plural
from tunable_magmax.workflows.head import HeadSource

_SOURCE = HeadSource()


def head(
    model: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    source: Annotated[HeadSource, Parameter(name="*")] = _SOURCE,
    overwrite: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Make a head file for an encoder: from class names, or from labelled samples.

    tmx head clip --names cat,dog -o head.safetensors
    tmx head encoder --data train.csv -o head.safetensors

    Parameters
    ----------
    model
        The encoder: a directory with config.json and weights.
    out
        The head's file, which ends in .safetensors.
    overwrite
        Replace an existing file.
    quiet
        No progress bar, no summary.
    as_json
        Print the result as JSON on stdout.
    """
    if out is None or out.suffix != ".safetensors":
        raise InputError("where should the head go? Give -o FILE, a name that ends in .safetensors")
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists already: choose another name, or give --overwrite")
    from tunable_magmax.models.head import save_head
    from tunable_magmax.workflows.head import make_head

    with progress_bars(quiet or as_json) as progress:
        made = make_head(model, source, progress)
    save_head(made, out)
    if as_json:
        record = {"out": str(out), "classes": list(made.classes), "width": made.weight.shape[1]}
        show(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        classes = plural(len(made.classes), "class", "classes")
        show(f"{out}: {classes}, rows of width {made.weight.shape[1]}\n")
