"""`tmx studio`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tunable_magmax.cli.merge_options import Json, Loose, Quiet, refuse_loose
from tunable_magmax.cli.terminal import show, tell
from tunable_magmax.errors import InputError


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
        A folder for models, preferences and uploaded samples. Default: RUN_DIR-studio.
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
    from tunable_magmax.runs.run import Run
    from tunable_magmax.studio.server import serve
    from tunable_magmax.studio.session import Studio, StudioOptions

    run = Run.open(run_dir)
    folder = out or run_dir.resolve().with_name(f"{run_dir.resolve().name}-studio")
    options = StudioOptions(data, inputs, labels, labelled, preference, samples, seed, device)

    def announce(address: str) -> None:
        record = {"address": address, "out": str(folder)}
        show(f"{json.dumps(record) if as_json else address}\n")
        if not (quiet or as_json):
            tell(f"models go to {folder}; Ctrl-C ends the studio\n")

    serve(Studio(run, folder, options), port, not no_browser, announce)
