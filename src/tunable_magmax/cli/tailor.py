"""`tmx tailor`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, warn, working, wrapped
from tunable_magmax.files import show_size
from tunable_magmax.workflows.options import TailorOptions

if TYPE_CHECKING:
    from tunable_magmax.workflows.tailored import Tailored

INDENT = 10


def tailor(run_dir: Path, /, *, options: TailorOptions = parsed(TailorOptions)) -> None:
    """Make the model that a site needs: find its mixture, merge for it, fit the classifier, and say how good it is.

    tmx tailor RUN_DIR --inputs site/images -o site-model
    tmx tailor RUN_DIR --labels site.csv -o site-model
    tmx tailor RUN_DIR --labelled site/classes -o site-model
    tmx tailor RUN_DIR --weights 3,1,0 -o site-model

    Parameters
    ----------
    run_dir
        The run directory, with run.json, checkpoints, profiles and a head.
    """
    from tunable_magmax.workflows.tailor import tailor as make

    with working() as progress:
        made = make(run_dir, options, progress)
    for text in made.record.warnings:
        warn(text)
    show_result(made.to_dict(), _summary(made))


def _summary(made: Tailored) -> Iterator[str]:
    """Yields what was made and why, in 80 columns."""
    from tunable_magmax.workflows.tailored import record_lines

    if made.complete:
        yield f"{made.out} is complete, made from the same inputs; --overwrite makes it again"
    for title, result, reason in record_lines(made.record):
        yield from wrapped(f"{title:{INDENT}}{result}", INDENT)
        yield from wrapped(f"{'':{INDENT}}{reason}", INDENT)
    size = show_size(sum(file.stat().st_size for file in made.out.rglob("*") if file.is_file()))
    seconds = "" if made.complete else f", {made.seconds:.0f} s"
    yield f"{made.out}: {size}{seconds}; try: tmx predict {shlex.quote(str(made.out))} INPUTS"
