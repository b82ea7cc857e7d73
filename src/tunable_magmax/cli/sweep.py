"""`tmx sweep`."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import note, show_result, table, warn, working
from tunable_magmax.errors import one_line, plural
from tunable_magmax.workflows.options import SUMMARY, SweepOptions

if TYPE_CHECKING:
    from tunable_magmax.workflows.sweep import Sweep


def sweep(source: Path, /, *, options: SweepOptions = parsed(SweepOptions)) -> None:
    """Merge for many preferences, and measure each of the models.

    tmx sweep RUN_DIR --from 1,0,0 --to 0,0,1 --steps 5 -o OUT
    tmx sweep RUN_DIR --preference a.json --preference b.json -o OUT
    tmx sweep RUN_DIR --from 1,0 --to 0,1 --data labelled.csv -o OUT

    Each point is a checkpoint in OUT, just as tmx merge makes it; OUT/sweep.json sums them up.

    Parameters
    ----------
    source
        A run directory, or a YAML configuration.
    """
    from tunable_magmax.workflows.sweep import sweep as run

    with working() as progress:
        made = run(source, options, progress, note)
    for warning in made.warnings:
        warn(warning)
    show_result(made.to_json(), _summary(made, options))


def _summary(made: Sweep, options: SweepOptions) -> Iterator[str]:
    yield f"{options.out}: {plural(len(made.points), 'point')}, {made.elements:,} elements merged by {made.method}"
    owned, measured = made.points[0].counts is not None, made.samples is not None
    yield "share of elements by task" if owned else "weight by task"
    header = ["point", "scale", *(["accuracy", "its mix"] if measured else [])]
    shares = [[float(Fraction(weight)) for weight in point.weights] for point in made.points]
    used = [t for t in range(len(made.tasks)) if any(row[t] for row in shares)]
    rows = []
    for point, weights in zip(made.points, shares, strict=True):
        row = [point.name, f"{point.scale:g}"]
        if measured:
            row += ["-" if share is None else f"{share:.1%}" for share in (point.accuracy, point.mix)]
        if point.counts is None:
            row += [f"{weights[t]:.4f}" for t in used]
        else:
            row += [f"{point.counts[t] / max(made.elements, 1):.2%}" for t in used]
        rows.append(row)
    yield from table(rows, [*header, *(one_line(made.tasks[t]) for t in used)], fixed=len(header))
    if made.samples is not None:
        yield f"accuracy: of the model with a head fitted to it, on {plural(made.samples, 'sample')}"
        yield "its mix: the tasks count by the point's weights"
    yield f"summary: {options.out and options.out / SUMMARY}"
