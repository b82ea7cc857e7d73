"""`tmx plan`."""

from __future__ import annotations

import json
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
from tunable_magmax.showing import plural

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
    as_json: Json = False,
) -> int:
    """Say what a merge would do, from headers alone: same as merge --dry-run.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    out
        Where the result would go.
    """
    refuse_words("plan", loose, source, what)
    return show_plan(read_what(source, what), out, how, as_json)


def show_plan(recipe: Recipe, out: Path | None, how: How, as_json: bool, where: Where = WHERE) -> int:
    """Prints what a merge would do and what prevents it; returns the exit code."""
    from tunable_magmax.workflows.plan import plan_elsewhere, plan_merge

    settings = {**recipe.options, "names": recipe.names, **settings_of(how)}
    planned = plan_merge(recipe.base, recipe.tasks, out, **settings)
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
        yield f"method       {planned.method}, {plural(planned.tasks, 'task')}"
        yield (
            f"merges       {planned.elements:,} elements in {plural(len(planned.mergeable), 'tensor')}"
            " (fewer if no task changed some)"
        )
        yield f"copies       {plural(len(planned.copied), 'tensor')}{some and f': {some}'}"
        if planned.budget is not None:
            names = [f"{one_line(name)} " for name in planned.names or ()] or [""] * planned.tasks
            yield "budget       " + ", ".join(f"{name}{n:,}" for name, n in zip(names, planned.budget, strict=True))
        yield f"reads        {show_size(planned.bytes_to_read)} in {plural(planned.passes, 'pass', 'passes')}"
        yield f"writes       {show_size(planned.bytes_to_write)} in {plural(planned.shards, 'file')}"
        spilled = f", {show_size(planned.spilled)} on disk meanwhile" if planned.spilled else ""
        yield f"memory       {show_size(planned.peak_memory)} beyond the interpreter{spilled}"
    yield from (f"note: {note}" for note in planned.notes)
