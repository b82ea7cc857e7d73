"""`tmx plan`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tunable_magmax.cli.loose import Loose
from tunable_magmax.cli.merge_options import (
    HOW,
    WHAT,
    WHERE,
    How,
    Json,
    What,
    Where,
    recipe_of,
    refuse_words,
    settings_of,
)
from tunable_magmax.cli.plan_time import time_lines
from tunable_magmax.cli.tables import number
from tunable_magmax.errors import InputError, some_of
from tunable_magmax.files import show_size

if TYPE_CHECKING:
    from tunable_magmax.runs.recipe import Recipe
    from tunable_magmax.workflows.plan import MergePlan


def plan(
    source: Path | None = None,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    what: What = WHAT,
    how: How = HOW,
    estimate: bool = False,
    workers: int | None = None,
    as_json: Json = False,
) -> int:
    """Say what a merge would do, from headers alone: same as merge --dry-run.

    With --estimate, say how long it would take: this reads a sample of the inputs and writes a file that is removed.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    out
        Where the result would go.
    estimate
        Measure this machine for a second, and estimate the time.
    workers
        With --estimate: the time on a cluster of so many machines like this one, too.
    """
    refuse_words("plan", loose, source, what)
    if workers is not None and not estimate:
        raise InputError("--workers is about the time on a cluster: give --estimate as well")
    return tell_plan(recipe_of(source, what), out, how, as_json, estimate, workers)


def tell_plan(
    recipe: Recipe,
    out: Path | None,
    how: How,
    as_json: bool,
    estimate: bool = False,
    workers: int | None = None,
    where: Where = WHERE,
) -> int:
    """Say what a merge would do, and what stands in its way; the exit code."""
    began = time.perf_counter()
    import torch

    from tunable_magmax.merging.resources import kernels_for
    from tunable_magmax.workflows.plan import plan_merge, plan_place

    if estimate:
        kernels_for(torch.device("cpu"))
    start = time.perf_counter() - began  # a merge has the same to import
    asked: dict[str, Any] = {"estimate": estimate, "workers": workers, "start": start}
    planned = plan_merge(recipe.base, recipe.tasks, out, **asked, **settings_of(recipe, how))
    planned = plan_place(planned, where.engine, where.workers, where.ray_address, where.device)
    if as_json:
        sys.stdout.write(json.dumps(planned.to_dict(), indent=1) + "\n")
    else:
        sys.stdout.write(_plan_text(planned))
        for problem in planned.problems:
            sys.stderr.write(f"problem: {problem}\n")
    return 2 if planned.problems else 0


def _plan_text(planned: MergePlan) -> str:
    lines = [f"warning: {warning}" for warning in planned.warnings]
    copied = some_of(planned.copied, limit=3)
    if planned.elements or planned.copied:
        lines += [
            f"method       {planned.method}, {number(planned.tasks, 'task')}",
            f"merges       {planned.elements:,} elements in {number(len(planned.mergeable), 'tensor')}"
            " (fewer if no task changed some)",
            f"copies       {number(len(planned.copied), 'tensor')}{copied and f': {copied}'}",
        ]
        if planned.budget is not None:
            lines.append("budget       " + ", ".join(f"{n:,}" for n in planned.budget))
        lines += [
            f"reads        {show_size(planned.bytes_to_read)} in {number(planned.passes, 'pass', 'passes')}",
            f"writes       {show_size(planned.bytes_to_write)} in {number(planned.shards, 'file')}",
            f"memory       {show_size(planned.peak_memory)} beyond the interpreter"
            + (f", {show_size(planned.spilled)} on disk meanwhile" if planned.spilled else ""),
        ]
    lines += time_lines(planned)
    lines += [f"note: {note}" for note in planned.notes]
    return "".join(f"{line}\n" for line in lines)
