"""`tmx prefer`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tunable_magmax.cli.loose import Loose, refuse_loose
from tunable_magmax.cli.prefer_options import Finding, Reading, Searching, Sources, details_of, numbers
from tunable_magmax.cli.prefer_progress import following
from tunable_magmax.cli.prefer_summary import elements, starved, summary, written
from tunable_magmax.cli.progress import progress_bars
from tunable_magmax.cli.tables import number
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.runs.run import Run
    from tunable_magmax.workflows.target import Target

_SOURCES, _FINDING, _SEARCHING, _READING = Sources(), Finding(), Searching(), Reading()


def prefer(
    run_dir: Path,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    sources: Sources = _SOURCES,
    finding: Finding = _FINDING,
    searching: Searching = _SEARCHING,
    reading: Reading = _READING,
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
        A run directory: run.json, checkpoints and profiles.
    out
        The preference file (JSON), for tmx merge --preference.
    plot
        Draw weights and intervals into this file: .png, .svg or .pdf.
    quiet
        No progress bars, no summary.
    as_json
        Print preference and budget as JSON on stdout.
    """
    from tunable_magmax.preference.search import Search
    from tunable_magmax.runs.run import Run
    from tunable_magmax.workflows.prefer import find_preference

    lists = {
        "--weights": sources.weights,
        "--strengths": sources.strengths,
        "--search-scale": searching.search_scale,
    }
    refuse_loose("prefer", loose, lists, source=run_dir)
    replaces = out is not None and _holds_preference(out)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"{plot}: a chart's name must end in .png, .svg or .pdf")
    run = Run.open(run_dir)
    details = details_of(finding, searching)
    strengths = None if sources.strengths is None else numbers(sources.strengths, "--strengths")
    given: dict[str, Any] = {"pairs": sources.pairs, "opinions": [*_opinions(run, sources)], "strengths": strengths}
    target = _target(run, sources, finding, reading)
    told: list[str] = []
    with _collected(told):
        if finding.method == "search":
            with following(searching.trials or Search.trials, searching.study, quiet or as_json) as follower:
                target = replace(target, progress=follower.progress)
                details = replace(details, search=replace(details.search, watch=follower.watch))
                preference = find_preference(target, details, **given)
        else:
            with progress_bars(quiet or as_json) as progress:
                preference = find_preference(replace(target, progress=progress), details, **given)
    preference = preference.named(run.names)
    count, trouble = elements(run)
    budget = None if count is None else preference.budget(count)
    told += [trouble] if trouble else starved(run.labels, preference, budget or [], count or 0)
    if out is not None:
        preference.save(out)
    if plot is not None:
        from tunable_magmax.plots.preference import save_chart

        save_chart(preference, plot)
    for warning in told:
        sys.stderr.write(f"warning: {warning}\n")
    if as_json:
        record = {"preference": json.loads(preference.to_json()), "elements": count, "budget": budget}
        sys.stdout.write(json.dumps({**record, "warnings": told}, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        lines = [*summary(run.labels, preference, count, budget), *written(out, plot, preference)]
        lines += [f"replaced the preference that was in {out}"] if replaces else []
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _target(run: Run, sources: Sources, finding: Finding, reading: Reading) -> Target:
    from tunable_magmax.workflows.target import Target

    return Target(
        run,
        labels_file=sources.labels,
        inputs=sources.inputs,
        predictions_file=sources.predictions,
        head=reading.classifier,
        classifier_checkpoint=reading.classifier_checkpoint,
        split=reading.split,
        text_column=reading.text_column,
        label_column=reading.label_column,
        limit=reading.max_samples,
        seed=finding.seed,
        device=reading.device,
    )


def _opinions(run: Run, sources: Sources) -> Iterator[Preference]:
    from tunable_magmax.preference.preference import Preference

    given = [name for name in ("weights", "alpha", "equal") if getattr(sources, name) not in (None, False)]
    if len(given) > 1:
        raise InputError(f"--{' and --'.join(given)} say the same thing in different ways: give one of them")
    tasks = len(run.tasks)
    if sources.weights is not None:
        weights = numbers(sources.weights, "--weights")
        if len(weights) != tasks:
            raise InputError(
                f"{number(len(weights), 'weight')} for {number(tasks, 'task')}: give one for each task, in training "
                "order, 0 for tasks that do not matter"
            )
        yield Preference.from_weights(weights)
    if sources.alpha is not None:
        yield Preference.from_alpha(sources.alpha, tasks)
    if sources.equal:
        yield Preference.equal(tasks)


def _holds_preference(out: Path) -> bool:
    """Whether a preference is there, which is replaced; anything else is not."""
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


@contextmanager
def _collected(told: list[str]) -> Iterator[None]:
    """Warnings for the user, put into `told` instead of printed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told += dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning)
