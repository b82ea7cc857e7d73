"""`tmx studio`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import Json, Loose, Quiet, refuse_loose
from tunable_magmax.cli.terminal import progress_bars, show, tell
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size
from tunable_magmax.showing import plural

LARGE_ERROR = 0.05

if TYPE_CHECKING:
    from tunable_magmax.studio.session import Studio


def studio(
    run_dir: Path,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    data: Path | None = None,
    inputs: Path | None = None,
    labels: Path | None = None,
    labelled: Path | None = None,
    preference: Path | None = None,
    samples: int = 400,
    export: Path | None = None,
    points: int | None = None,
    port: int = 0,
    no_browser: bool = False,
    seed: int = 0,
    device: str | None = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find the right preference by hand and eye, on a page of this machine, and leave with a model.

    tmx studio RUN_DIR
    tmx studio RUN_DIR --inputs site/images --data site/test

    The page is for this machine only: it listens on 127.0.0.1, and its address holds a secret. Ctrl-C ends it. Needs
    the extras train and studio.

    Parameters
    ----------
    run_dir
        A run directory.
    out
        A folder for models, preferences, uploaded samples and measured points. Default: RUN_DIR-studio.
    data
        Labelled samples of the site to measure on: class folders of images, a table, parquet. The run's test data are
        used as well, where they are found.
    inputs
        Samples of the site to begin with, without labels.
    labels
        A file of labels of the site to begin with.
    labelled
        Samples of the site with labels to begin with.
    preference
        A preference file to begin with.
    samples
        Measure on at most so many samples.
    export
        Instead of a server, write the page into this .html file, with so many measured points; it works offline. Run
        again, it goes on.
    points
        Measure so many points for --export, with and without the site prior. Default: 60.
    port
        Listen on this port. Default: any that is free.
    no_browser
        Print the address, and open no browser.
    seed
        The seed of the merges.
    device
        Embed on this device. Default: the GPU if there is one.
    """
    refuse_loose("studio", loose, {}, run_dir)
    if inputs is not None and labelled is not None:
        raise InputError("--inputs and --labelled are both samples of the site: give one of them")
    if samples < 1:
        raise InputError(f"--samples is {samples}, expected at least 1")
    if points is not None and export is None:
        raise InputError("--points is for --export FILE")
    from tunable_magmax.runs.run import Run
    from tunable_magmax.studio.server import serve
    from tunable_magmax.studio.session import Studio, StudioOptions

    run = Run.open(run_dir)
    folder = out or run_dir.resolve().with_name(f"{run_dir.resolve().name}-studio")
    options = StudioOptions(data, inputs, labels, labelled, preference, samples, seed, device)
    if export is not None:
        _export(Studio(run, folder, options), export, 60 if points is None else points, quiet, as_json)
        return

    def announce(address: str) -> None:
        record = {"address": address, "out": str(folder)}
        show(f"{json.dumps(record) if as_json else address}\n")
        if not (quiet or as_json):
            tell(f"models go to {folder}; Ctrl-C ends the studio\n")

    serve(Studio(run, folder, options), port, not no_browser, announce)


def _export(studio: Studio, file: Path, points: int, quiet: bool, as_json: bool) -> None:
    from tunable_magmax.studio.export import export_page

    with progress_bars(quiet or as_json) as progress:
        try:
            data = export_page(studio, file, points, progress)
        finally:
            studio.close()
    about = data["interpolation"]
    if as_json:
        show(json.dumps({"file": str(file), "bytes": file.stat().st_size, **about}, indent=1) + "\n")
    elif not quiet:
        size, count = show_size(file.stat().st_size), plural(about["points"], "point")
        show(f"{file}: {size}, {count}{_doubt(about['error'])}\n")


def _doubt(error: float | None) -> str:
    """Says how far the page is off between its points, and what helps where that is much.

    >>> _doubt(0.221)
    "; a task's accuracy between them is off by 22.1 points on average (more --points make it smaller)"
    >>> _doubt(0.05)
    "; a task's accuracy between them is off by 5.0 points on average"
    """
    if error is None:
        return ""
    hint = " (more --points make it smaller)" if error > LARGE_ERROR else ""
    return f"; a task's accuracy between them is off by {100 * error:.1f} points on average{hint}"
