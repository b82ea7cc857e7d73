"""`tmx tailor`: its options in groups, the command, and what it prints."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import HOW, How, Json, Loose, Quiet, refuse_loose, settings_of
from tunable_magmax.cli.prefer import SIGNED, ReadingOptions, SourceOptions, read_weights
from tunable_magmax.cli.terminal import progress_bars, show, warn
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.runs.run import Run
    from tunable_magmax.workflows.tailor import TailorOptions as Options
    from tunable_magmax.workflows.tailored import Tailored

WIDTH = 80
COMPLETE = "{out} is complete, made from the same inputs with the same options; --overwrite makes it again"


@Parameter(name="*", group=Group("How the model is made", sort_key=2))
@dataclass(frozen=True)
class TailorOptions:
    """The options of estimate, merge and checks."""

    preference: Path | None = None
    """Use this preference file instead of samples; --labelled may be added, to choose by labels."""
    method: str = "auto"
    """Merge by this method: tunable_magmax, tsv, average, magmax, ... auto tries several."""
    scale: Annotated[str | None, SIGNED] = None
    """Scale the merged step by this number, or matched. Default: the preference's, or the best of those tried."""
    head: Literal["auto", "fitted", "old"] = "auto"
    """The classifier: fitted to the merged encoder, the old one, or the better of the two."""
    estimator: Literal["auto", "label", "probe", "ot", "cosine", "mmd"] = "auto"
    """How weights are estimated from samples, as tmx prefer --method."""
    seed: int = 0
    """The seed of everything that is drawn: folds, and the keys of the merge."""


_SOURCES, _TAILORING, _READING = SourceOptions(), TailorOptions(), ReadingOptions()


def tailor(
    run_dir: Path,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    sources: SourceOptions = _SOURCES,
    tailoring: TailorOptions = _TAILORING,
    reading: ReadingOptions = _READING,
    how: How = HOW,
    dry_run: bool = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Make the model that a site needs: find its mixture, merge for it, fit the classifier, and say how good it is.

    tmx tailor RUN_DIR --inputs site/images -o site-model
    tmx tailor RUN_DIR --labels site.csv -o site-model
    tmx tailor RUN_DIR --labelled site/classes -o site-model
    tmx tailor RUN_DIR --weights 3,1,0 -o site-model

    Parameters
    ----------
    run_dir
        The run directory, with run.json, checkpoints, profiles and a head.
    out
        A directory for the model and all that the site needs.
    dry_run
        Say what would be done. Reads headers only.
    """
    from tunable_magmax.runs.run import Run
    from tunable_magmax.workflows.options import Reading
    from tunable_magmax.workflows.site import SiteSources
    from tunable_magmax.workflows.tailor import check_tailoring
    from tunable_magmax.workflows.tailor import tailor as make

    refuse_loose("tailor", loose, {"--weights": sources.weights}, run_dir)
    known = SiteSources(**{**vars(sources), "weights": read_weights(sources.weights)})
    run, options, read = Run.open(run_dir), _options(tailoring, how), Reading(**vars(reading))
    preference = None if tailoring.preference is None else _read_preference(tailoring.preference, run)
    if dry_run:
        facts = check_tailoring(run, known, out, options, read, preference)
        shown = "".join(f"{key:10}{value}\n" for key, value in facts.items())
        show(json.dumps(facts, indent=1) + "\n" if as_json else shown)
        return 0
    if out is None:
        raise InputError("where should the model go? Give -o OUT, a directory")
    with progress_bars(quiet or as_json) as progress, redirect_stdout(sys.stderr):
        made = make(run, known, out, options, read, preference=preference, progress=progress)
    for text in made.warnings:
        warn(text)
    if as_json:
        show(json.dumps(made.to_dict(), indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        show("".join(f"{line}\n" for line in _summary(made)))
    return 0


def _options(given: TailorOptions, how: How) -> Options:
    from tunable_magmax.merging.options import Options as MergeOptions
    from tunable_magmax.workflows.tailor import TailorOptions as Options

    scale = given.scale if given.scale in (None, "matched") else MergeOptions.read(1, scale=given.scale).scale
    return Options(given.method, scale, given.head, given.estimator, given.seed, settings_of(how))


def _read_preference(file: Path, run: Run) -> Preference:
    from tunable_magmax.runs.recipe import Recipe
    from tunable_magmax.workflows.merge import read_preference

    preference = read_preference(file, Recipe(run.base, run.tasks, names=run.names), warn)
    if len(preference.weights) != len(run.tasks):
        raise InputError(
            f"{file} has {plural(len(preference.weights), 'weight')}, and {run.path} has "
            f"{plural(len(run.tasks), 'task')}: it is a preference of another run"
        )
    return preference


# -- what it prints ---------------------------------------------------------------------------------------------------


def _summary(made: Tailored) -> Iterator[str]:
    """Yields what was made and why."""
    from tunable_magmax.workflows.tailored import told

    if made.complete:
        yield COMPLETE.format(out=made.out)
    for title, result, reason in told(made.record):
        yield from textwrap.wrap(f"{title:10}{result}", WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
        yield from textwrap.wrap(reason, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
    size = show_size(sum(file.stat().st_size for file in made.out.rglob("*") if file.is_file()))
    seconds = "" if made.complete else f", {made.seconds:.0f} s"
    yield f"{made.out}: {size}{seconds}; try: tmx predict {made.out} INPUTS"
