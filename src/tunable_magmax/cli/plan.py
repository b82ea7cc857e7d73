"""`tmx plan`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
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
    What,
    Where,
    read_what,
    refuse_words,
    settings_of,
)
from tunable_magmax.cli.terminal import show, tell
from tunable_magmax.errors import one_line, some_of
from tunable_magmax.files import show_size
from tunable_magmax.showing import number

if TYPE_CHECKING:
    from tunable_magmax.runs.recipe import Recipe
    from tunable_magmax.workflows.plan import MergePlan

LEAST = 0.1
"""Seconds below which a number would promise more than an estimate can know."""
WORTHWHILE = 1.1
"""Times faster, below which a cluster is not worth its trouble."""


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
    return show_plan(read_what(source, what), out, how, as_json, estimate, workers)


def show_plan(
    recipe: Recipe,
    out: Path | None,
    how: How,
    as_json: bool,
    estimate: bool = False,
    workers: int | None = None,
    where: Where = WHERE,
) -> int:
    """Prints what a merge would do and what prevents it; returns the exit code."""
    began = time.perf_counter()
    from tunable_magmax.workflows.plan import plan_elsewhere, plan_merge

    start = time.perf_counter() - began  # a merge has the same to import
    settings = {**recipe.options, "names": recipe.names, **settings_of(how)}
    planned = plan_merge(recipe.base, recipe.tasks, out, estimate=estimate, workers=workers, start=start, **settings)
    planned = plan_elsewhere(planned, **asdict(where))
    if as_json:
        show(json.dumps(planned.to_dict(), indent=1) + "\n")
    else:
        show("".join(f"{line}\n" for line in _plan_lines(planned)))
        for problem in planned.problems:
            tell(f"problem: {problem}\n")
    return 2 if planned.problems else 0


def _plan_lines(planned: MergePlan) -> Iterator[str]:
    yield from (f"warning: {warning}" for warning in planned.warnings)
    if planned.elements or planned.copied:
        some = some_of(planned.copied, limit=3)
        yield f"method       {planned.method}, {number(planned.tasks, 'task')}"
        yield (
            f"merges       {planned.elements:,} elements in {number(len(planned.mergeable), 'tensor')}"
            " (fewer if no task changed some)"
        )
        yield f"copies       {number(len(planned.copied), 'tensor')}{some and f': {some}'}"
        if planned.budget is not None:
            names = [f"{one_line(name)} " for name in planned.names or ()] or [""] * planned.tasks
            yield "budget       " + ", ".join(f"{name}{n:,}" for name, n in zip(names, planned.budget, strict=True))
        yield f"reads        {show_size(planned.bytes_to_read)} in {number(planned.passes, 'pass', 'passes')}"
        yield f"writes       {show_size(planned.bytes_to_write)} in {number(planned.shards, 'file')}"
        spilled = f", {show_size(planned.spilled)} on disk meanwhile" if planned.spilled else ""
        yield f"memory       {show_size(planned.peak_memory)} beyond the interpreter{spilled}"
    yield from time_lines(planned)
    yield from (f"note: {note}" for note in planned.notes)


def time_lines(planned: MergePlan) -> Iterator[str]:
    """Yields lines on time and its parts; none if the plan has no estimate."""
    if planned.time is None or planned.speeds is None:
        return
    here, speeds = planned.time, planned.speeds
    if here.seconds < 1:
        yield "time         about a second or less here"
    else:
        phases = ", ".join(f"{phase.name} {seconds(phase.seconds)}" for phase in here.phases)
        within = f"{seconds(here.low)} to {seconds(here.high)}"
        yield f"time         about {seconds(here.seconds)} here ({within}): {phases}"
    yield f"  reading    {seconds(sum(phase.reading for phase in here.phases))} by itself, {show_size(speeds.read)}/s"
    yield f"  computing  {seconds(sum(phase.computing for phase in here.phases))} by itself"
    if speeds.write is not None:
        writing = seconds(sum(phase.writing for phase in here.phases))
        yield f"  writing    {writing} by itself, {show_size(speeds.write)}/s"
    if (cluster := planned.cluster) is not None:
        gain = f"{cluster.speedup:.1f} times faster" if cluster.speedup >= WORTHWHILE else "not worth it"
        best = "at best, if the file system gives each of them what it gives this machine"
        yield f"{cluster.workers} workers    {gain}: about {seconds(cluster.seconds)} {best}"


def seconds(amount: float) -> str:
    """Formats seconds for people.

    >>> seconds(0.0004), seconds(0.34), seconds(12.3), seconds(400), seconds(10_000)
    ('less than 0.1 s', '0.34 s', '12 s', '6.7 min', '2.8 h')
    """
    if amount < LEAST:
        return f"less than {LEAST} s"
    if amount < 120:
        return f"{amount:.2g} s" if amount < 10 else f"{amount:.0f} s"
    return f"{amount / 60:.1f} min" if amount < 7200 else f"{amount / 3600:.1f} h"
