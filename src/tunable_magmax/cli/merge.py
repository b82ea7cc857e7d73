"""`tmx merge`."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import (
    HOW,
    WHAT,
    WHERE,
    How,
    Json,
    Loose,
    Quiet,
    What,
    Where,
    read_what,
    refuse_words,
    settings_of,
)
from tunable_magmax.cli.plan import show_plan
from tunable_magmax.cli.terminal import note, progress_bars, show, warn
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.runs.recipe import Recipe


def merge(
    source: Path | None = None,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    what: What = WHAT,
    how: How = HOW,
    where: Where = WHERE,
    dry_run: bool = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Merge a base and its task checkpoints into one checkpoint.

    tmx merge --base B --task A1 --task A2 --weights 3,1 -o OUT
    tmx merge RUN_DIR --preference site.json -o OUT
    tmx merge config.yml -o OUT

    An interrupted merge continues when the same command is run again.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    out
        A directory, or one file if it ends in .safetensors.
    dry_run
        Read headers only and say what would be done.
    """
    refuse_words("merge", loose, source, what)
    recipe = read_what(source, what)
    if dry_run:
        return show_plan(recipe, out, how, as_json, where=where)
    if out is None:
        raise InputError("where should the result go? Give -o OUT, a directory or a name that ends in .safetensors")
    from tunable_magmax.workflows.merge import merge_recipe

    def notify(text: str) -> None:
        if not quiet:
            note(text)

    # Ray prints messages about dying nodes to stdout, where the result goes.
    with progress_bars(quiet or as_json) as progress, redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the report, and shown below
        result = merge_recipe(recipe, out, notify, progress=progress, **settings_of(how), **asdict(where))
    report = result.report
    for warning in report.warnings:
        warn(warning)
    if as_json:
        # Notes are not in the report beside the weights: they name paths, and equal merges must give equal bytes.
        show(replace(report, warnings=(*report.warnings, *result.notes, *result.lacking)).to_json())
    elif not quiet:
        show(_summary(report, out, recipe))
        show("".join(f"note: {text}\n" for text in result.lacking))
    return 0


def _summary(report: MergeReport, out: Path, recipe: Recipe) -> str:
    """Returns one line for the merge and one for each task, under its name or path."""
    if report.options["scale"] == "matched":
        whence = "matched"
    else:
        whence = "given" if recipe.options.get("scale") is not None else f"the default of {report.method}"
    lines = [
        f"{out}: {report.elements:,} elements merged by {report.method}, scale {report.scale:g} ({whence}), "
        f"seed {report.seed}"
    ]
    total = max(report.elements, 1)
    if report.counts is not None:
        width = max(len(f"{count:,}") for count in report.counts)
        names = recipe.names or [str(path) for path in recipe.tasks]
        lines += [
            f"  task {t:<3} {n:>{width},} elements {n / total:7.2%}  {name}"
            for t, (n, name) in enumerate(zip(report.counts, names, strict=True), start=1)
        ]
    if report.leftovers:
        lines.append(f"  {report.leftovers:,} of them ({report.leftovers / total:.2%}) by lottery")
    return "".join(f"{line}\n" for line in lines)
