"""`tmx sweep`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import (
    How,
    Json,
    Loose,
    Merging,
    Quiet,
    What,
    numbers,
    read_what,
    refuse_loose,
    settings_of,
)
from tunable_magmax.cli.terminal import number, progress_bars, screen_width, show, table, tell, warn, wrapped_table
from tunable_magmax.errors import InputError, one_line, some_of
from tunable_magmax.files import show_size
from tunable_magmax.plots.figure import check_picture

if TYPE_CHECKING:
    from tunable_magmax.runs.recipe import Recipe
    from tunable_magmax.workflows.points import Point
    from tunable_magmax.workflows.sweep import Sweep, SweepPlan


@Parameter(name="*", group="The points")
@dataclass(frozen=True)
class Route:
    """Which preferences the sweep merges for."""

    start: Annotated[
        str | None,
        Parameter(
            name="--from", help="Begin the line with these weights, as 1,0,0 or travel=1.", allow_leading_hyphen=True
        ),
    ] = None
    stop: Annotated[
        str | None, Parameter(name="--to", help="End the line with these weights.", allow_leading_hyphen=True)
    ] = None
    steps: Annotated[int | None, Parameter(help="Put so many points on the line, both ends included. Default: 5.")] = (
        None
    )
    grid: Annotated[int | None, Parameter(help="For three tasks: take all weights i,j,k that sum to this number.")] = (
        None
    )
    preference: Annotated[
        list[Path] | None,
        Parameter(help="Take a point from this preference file; give one --preference for each point."),
    ] = None


@Parameter(name="*", group="Output and resources")
@dataclass(frozen=True)
class Writing(How):
    """Where the output goes and what the sweep may use: as for one merge, but for its memory."""

    memory: Annotated[
        str | None, Parameter(help="Refuse a sweep that needs more, such as 4GiB. Default: what is free.")
    ] = None
    overwrite: Annotated[bool, Parameter(help="Replace another sweep in OUT.")] = False
    fresh: Annotated[bool, Parameter(help="Make finished points again; discard unfinished work.")] = False
    reports_only: Annotated[bool, Parameter(help="Write only reports, OUT/NAME.report.json, and no weights.")] = False


_ROUTE, _MERGING, _WRITING = Route(), Merging(), Writing()


def sweep(
    source: Path | None = None,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    route: Route = _ROUTE,
    merging: Merging = _MERGING,
    writing: Writing = _WRITING,
    plot: Path | None = None,
    dry_run: bool = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Merge for many preferences, reading the checkpoints once.

    tmx sweep RUN_DIR --from 1,0,0 --to 0,0,1 --steps 5 -o OUT
    tmx sweep --base B --task A1 --task A2 --task A3 --grid 4 -o OUT
    tmx sweep RUN_DIR --preference a.json --preference b.json -o OUT

    Each point is a checkpoint in OUT, just as tmx merge makes it; OUT/sweep.json sums them up. An interrupted sweep
    continues when the same command is run again.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    out
        A directory; points go into step-00, step-01 and so on (a line), i-j-k (a grid) or 00-NAME (preferences).
    plot
        Draw shares, leftovers and lengths into this file: .png, .svg or .pdf.
    dry_run
        Read headers only and say what would be done, in how much memory.
    """
    refuse_loose("sweep", loose, {"--from": route.start, "--to": route.stop}, source)
    _check_route(route)
    recipe = read_what(source, What(**asdict(merging)))
    options = {name: value for name, value in recipe.options.items() if name not in ("weights", "budget")}
    points = _points(route, recipe, options)
    if out is None:
        raise InputError("where should the results go? Give -o OUT, a directory")
    if plot is not None:
        check_picture(plot)
    from tunable_magmax.workflows.sweep import plan_sweep, sweep_checkpoints

    options |= {"names": recipe.names, **settings_of(writing)}
    if dry_run:
        return _show_plan(plan_sweep(recipe.base, recipe.tasks, out, points, **options), as_json, recipe.names)
    with progress_bars(quiet or as_json) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the reports, and shown below
        made = sweep_checkpoints(recipe.base, recipe.tasks, out, points, progress=progress, **options)
    if plot is not None:
        from tunable_magmax.plots.sweep import save_sweep_picture

        save_sweep_picture(made, plot, "line" if route.start else "grid" if route.grid else "list", recipe.names)
    for warning in made.warnings:
        warn(warning)
    if as_json:
        show(made.to_json())
    elif not quiet:
        show("".join(f"{text}\n" for text in _summary(made, out, plot, recipe.names)))
    return 0


# -- the points -------------------------------------------------------------------------------------------------------


def _check_route(route: Route) -> None:
    line = [route.start, route.stop, route.steps]
    ways = [any(end is not None for end in line), route.grid is not None, route.preference is not None]
    if sum(ways) != 1:
        raise InputError(
            "which preferences? Give one of these: a line with --from, --to and --steps, a --grid, or a --preference "
            "for each point"
        )
    if ways[0] and (route.start is None or route.stop is None):
        missing = "--from" if route.start is None else "--to"
        raise InputError(f"a line has two ends: give {missing} as well, weights such as 1,0,0")


def _points(route: Route, recipe: Recipe, options: dict[str, Any]) -> tuple[Point, ...]:
    from tunable_magmax.workflows.points import grid, line, listed

    if route.grid is not None:
        return grid(route.grid, len(recipe.tasks))
    if route.preference is not None:
        from tunable_magmax.workflows.merge import read_preference

        return listed([(file.stem, list(read_preference(file, recipe, warn).weights)) for file in route.preference])
    ends = {"--from": numbers(route.start, "--from"), "--to": numbers(route.stop, "--to")}
    start, stop = (recipe.in_order(values, option) for option, values in ends.items())
    # Factors mean what they say; shares are shares of something.
    factors = options.get("method") in ("ties", "task_arithmetic")
    return line(start, stop, steps=5 if route.steps is None else route.steps, normalise=not factors)


# -- what is shown ----------------------------------------------------------------------------------------------------


def _summary(made: Sweep, out: Path, plot: Path | None, names: Sequence[str] | None) -> Iterator[str]:
    skipped = f", {len(made.skipped):,} of them made before" if made.skipped else ""
    yield f"{out}: {number(len(made.points), 'point')}{skipped}; {made.elements:,} elements merged by {made.method}"
    owned = made.points[0].counts is not None
    yield "share of elements by task" if owned else "weight by task"
    header = ["point", "scale", "length", *(["leftovers"] if made.points[0].leftovers is not None else [])]
    rows = [[*header, *(map(one_line, names) if names else (f"task {t}" for t in range(1, made.tasks + 1)))]]
    total = max(made.elements, 1)
    for point in made.points:
        row = [point.name, f"{point.scale:g}", f"{point.merged_length:.4g}"]
        row += [] if point.leftovers is None else [f"{point.leftovers / total:.2%}"]
        if point.counts is None:
            row += [f"{float(Fraction(weight)):.4f}" for weight in point.weights]
        else:
            row += [f"{count / total:.2%}" for count in point.counts]
        rows.append(row)
    yield from wrapped_table(rows, fixed=len(header), width=screen_width())
    yield f"length: of the merged vector before scaling; the last task's is {made.last_length:.4g}"
    yield f"summary: {out / 'sweep.json'}"
    if plot is not None:
        yield f"picture: {plot}"


def _show_plan(planned: SweepPlan, as_json: bool, names: Sequence[str] | None) -> int:
    if as_json:
        show(json.dumps(asdict(planned), indent=1) + "\n")
    else:
        show("".join(f"{text}\n" for text in _plan_text(planned, names)))
        for problem in planned.problems:
            tell(f"problem: {problem}\n")
    return 2 if planned.problems else 0


def _plan_text(planned: SweepPlan, names: Sequence[str] | None) -> Iterator[str]:
    yield from (f"warning: {warning}" for warning in planned.warnings)
    yield f"method       {planned.method}, {number(planned.tasks, 'task')}{f': {some_of(names)}' if names else ''}"
    yield f"merges       {planned.elements:,} elements (fewer if no task changed some tensors)"
    yield f"points       {len(planned.points):,}, finished: {len(planned.finished):,}"
    if planned.files_each:
        files = number(planned.files_each, "file")
        yield f"writes       {show_size(planned.bytes_to_write)}: {show_size(planned.bytes_each)} in {files} a point"
    else:
        yield "writes       reports only"
    free = "" if planned.available is None else f"; {show_size(planned.available)} are free"
    yield f"memory       {show_size(planned.memory)} beyond the interpreter{free}"
    yield from (f"note: {note}" for note in planned.notes)
    yield ""
    rows = [["point", "weights", "budget"]]
    for point in planned.points:
        weights = ", ".join(
            weight if len(weight) <= 8 else f"{float(Fraction(weight)):.4f}" for weight in point["weights"]
        )
        rows.append([point["name"], weights, " ".join(f"{n:,}" for n in point["budget"] or ())])
    yield from table(rows)
