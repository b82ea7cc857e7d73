"""`tmx prefer`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import Loose, refuse_loose
from tunable_magmax.cli.prefer_options import (
    EstimationOptions,
    ReadingOptions,
    SearchOptions,
    SourceOptions,
    estimation_of,
    sources_of,
)
from tunable_magmax.cli.prefer_output import search_progress, summary, written
from tunable_magmax.cli.progress import progress_bars
from tunable_magmax.errors import InputError

_SOURCES, _ESTIMATING, _SEARCHING, _READING = SourceOptions(), EstimationOptions(), SearchOptions(), ReadingOptions()


def prefer(
    run_dir: Path,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    sources: SourceOptions = _SOURCES,
    estimating: EstimationOptions = _ESTIMATING,
    searching: SearchOptions = _SEARCHING,
    reading: ReadingOptions = _READING,
    plot: Path | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Find how much each task matters to a target, from what is known of it.

    tmx prefer RUN_DIR --inputs site/images -o site.json
    tmx prefer RUN_DIR --labels site.csv --plot site.png
    tmx prefer RUN_DIR --pairs site/classes --method search --study site.journal -o site.json
    tmx prefer RUN_DIR --weights 3,1,0 -o site.json

    Labels and inputs are compared with the tasks' profiles, which `tmx profile` makes.

    Parameters
    ----------
    run_dir
        The run directory, with run.json, checkpoints and profiles.
    out
        Write the preference to this file (JSON), for tmx merge --preference.
    plot
        Draw weights and intervals into this file: .png, .svg or .pdf.
    quiet
        Print no progress bars and no summary.
    as_json
        Print preference and budget as JSON on stdout.
    """
    from tunable_magmax.workflows.prefer import prefer as find
    from tunable_magmax.workflows.target import TargetReading

    lists = {
        "--weights": sources.weights,
        "--strengths": sources.strengths,
        "--search-scale": searching.search_scale,
    }
    refuse_loose("prefer", loose, lists, source=run_dir)
    replaces = out is not None and _holds_preference(out)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"{plot}: a chart's name must end in .png, .svg or .pdf")
    estimation = estimation_of(estimating, searching)
    evidence = (run_dir, sources_of(sources), estimation, TargetReading(**vars(reading)))
    if estimating.method == "search":
        with search_progress(estimation.search.trials, searching.study, quiet or as_json) as (progress, watch):
            result = find(*evidence, progress=progress, watch=watch)
    else:
        with progress_bars(quiet or as_json) as progress:
            result = find(*evidence, progress=progress)
    if out is not None:
        result.preference.save(out)
    if plot is not None:
        from tunable_magmax.plots.preference import save_chart

        save_chart(result.preference, plot)
    for warning in result.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    if as_json:
        record = {"preference": json.loads(result.preference.to_json()), "elements": result.elements}
        record |= {"budget": result.budget, "warnings": result.warnings}
        sys.stdout.write(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        lines = [*summary(result), *written(out, plot, result.preference)]
        lines += [f"replaced the preference that was in {out}"] if replaces else []
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _holds_preference(out: Path) -> bool:
    """Says whether a preference is there, which is replaced; refuses to replace anything else."""
    from tunable_magmax.preference.preference import Preference

    if out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'site.json'}")
    if out.exists():
        try:
            Preference.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no preference file: choose another name") from None
        return True
    return False
