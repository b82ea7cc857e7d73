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
from tunable_magmax.cli.terminal import progress_bars, screen_width, show, table, tell, warn, wrapped_table
from tunable_magmax.errors import InputError, one_line, some_of
from tunable_magmax.files import Progress, show_size
from tunable_magmax.plots.figure import check_picture
from tunable_magmax.showing import plural

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
    reports_only: Annotated[bool, Parameter(help="Write only reports, OUT/NAME.report.json, and no weights.")] = False


@Parameter(name="*", group="Accuracy")
@dataclass(frozen=True)
class Measured:
    """Whether, and on what, each point is measured."""

    data: Annotated[
        Path | None,
        Parameter(
            help="Measure each point on labelled samples: class folders of images, a table, parquet, or a benchmark's "
            "YAML. `test` stands for the run's test data. Needs a RUN_DIR."
        ),
    ] = None
    head: Annotated[Path | None, Parameter(help="The frozen head. Default: the run's.")] = None
    limit: Annotated[int | None, Parameter(help="Of more samples, measure on a seeded draw.")] = None
    device: Annotated[str | None, Parameter(help="Embed on this device. Default: the GPU if there is one.")] = None


_ROUTE, _MERGING, _WRITING, _MEASURED = Route(), Merging(), Writing(), Measured()


def sweep(
    source: Path | None = None,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    route: Route = _ROUTE,
    merging: Merging = _MERGING,
    writing: Writing = _WRITING,
    measured: Measured = _MEASURED,
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
    if measured.data is not None and (source is None or not (source / "run.json").is_file()):
        raise InputError("--data needs a run, whose head turns embeddings into classes: give RUN_DIR")
    if measured.data is not None:
        from tunable_magmax.workflows.sweep_accuracy import check_measurable

        check_measurable(options.get("method") or "tunable_magmax", options)
    from tunable_magmax.workflows.sweep import plan_sweep, sweep_checkpoints

    options |= {"names": recipe.names, **settings_of(writing)}
    if dry_run:
        return _show_plan(plan_sweep(recipe.base, recipe.tasks, out, points, **options), as_json, recipe.names)
    with progress_bars(quiet or as_json) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are in the reports, and shown below
        made = sweep_checkpoints(recipe.base, recipe.tasks, out, points, progress=progress, **options)
        if measured.data is not None and source is not None:
            made = _measure(made, source, out, measured, progress)
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


def _measure(made: Sweep, run_dir: Path, out: Path, measured: Measured, progress: Progress | None) -> Sweep:
    from tunable_magmax.workflows.options import Reading
    from tunable_magmax.workflows.sweep_accuracy import measure_sweep

    data = None if measured.data is not None and str(measured.data) == "test" else measured.data
    options: dict[str, Any] = {"head": measured.head, "limit": measured.limit, "progress": progress}
    return measure_sweep(run_dir, made, out, data, reading=Reading(device=measured.device), **options)


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
    yield f"{out}: {plural(len(made.points), 'point')}{skipped}; {made.elements:,} elements merged by {made.method}"
    owned = made.points[0].counts is not None
    yield "share of elements by task" if owned else "weight by task"
    header = ["point", "scale", "length", *(["leftovers"] if made.points[0].leftovers is not None else [])]
    header += ["accuracy", "its mix", "tailored"] if made.data is not None else []
    rows = [[*header, *(map(one_line, names) if names else (f"task {t}" for t in range(1, made.tasks + 1)))]]
    total = max(made.elements, 1)
    for point in made.points:
        row = [point.name, f"{point.scale:g}", f"{point.merged_length:.4g}"]
        row += [] if point.leftovers is None else [f"{point.leftovers / total:.2%}"]
        if (found := point.accuracy) is not None:
            shares = [found[key] for key in ("overall", "mix", "mix_tailored")]
            row += ["" if share is None else f"{share:.1%}" for share in shares]
        if point.counts is None:
            row += [f"{float(Fraction(weight)):.4f}" for weight in point.weights]
        else:
            row += [f"{count / total:.2%}" for count in point.counts]
        rows.append(row)
    yield from wrapped_table(rows, fixed=len(header), width=screen_width())
    yield f"length: of the merged vector before scaling; the last task's is {made.last_length:.4g}"
    if made.data is not None:
        yield f"accuracy: on {made.data['name']}, {plural(made.data['samples'], 'sample')}; its mix: tasks count"
        yield "  by the point's weights; tailored: with the head that tmx tailor would fit; sweep.csv has each task's"
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
    yield f"method       {planned.method}, {plural(planned.tasks, 'task')}{f': {some_of(names)}' if names else ''}"
    yield f"merges       {planned.elements:,} elements (fewer if no task changed some tensors)"
    yield f"points       {len(planned.points):,}, finished: {len(planned.finished):,}"
    if planned.files_each:
        files = plural(planned.files_each, "file")
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
