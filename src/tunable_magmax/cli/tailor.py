"""`tmx tailor`: its options in groups, the command, and what it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import HOW, How, Json, Loose, Quiet, refuse_loose, settings_of
from tunable_magmax.cli.prefer import (
    SIGNED,
    ReadingOptions,
    SourceOptions,
    read_numbers,
    read_prior,
    read_temper,
    read_weights,
)
from tunable_magmax.cli.terminal import progress_bars, show, table, tell, warn
from tunable_magmax.errors import InputError
from tunable_magmax.files import show_size
from tunable_magmax.showing import number

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.runs.run import Run
    from tunable_magmax.workflows.site_model import Tailored
    from tunable_magmax.workflows.tailor_plan import TailorPlan
    from tunable_magmax.workflows.tailoring import Tailoring

COMPLETE = "{out} is complete, made from the same inputs with the same options; --overwrite makes it again"
SHOWN = 12
"""Tasks that the table shows, those of largest weight; the others are summed up in a line."""


@Parameter(name="*", group=Group("How the model is made", sort_key=2))
@dataclass(frozen=True)
class TailorOptions:
    """The options of estimate, merge and checks."""

    preference: Path | None = None
    """Use this preference file instead of samples; --pairs may be added, to choose by labels."""
    method: str = "auto"
    """Merge by this method: tunable_magmax, tsv, average, magmax, ... auto depends on how many tasks matter."""
    scale: Annotated[str | None, SIGNED] = None
    """Scale the merged step by this number, or matched. Default: the preference's, or what pairs choose; else 1 with a
    site prior, and without one the method's own."""
    choose: Literal["auto", "none"] = "auto"
    """With --pairs: let cross-validation choose model and scale, or keep the defaults."""
    check: Literal["auto", "none"] = "auto"
    """Compare the result with the base, without labels by a probe, and warn if the merged step may overshoot."""
    estimator: Literal["auto", "label", "probe", "shift", "em", "least_squares", "pseudo", "ot", "cosine", "mmd"] = (
        "auto"
    )
    """How weights are estimated from samples, as tmx prefer --method."""
    temper: Annotated[str | None, SIGNED] = None
    """How far to move estimated weights towards equal ones: from 0 (off) to 1, or auto."""
    prior: str = "auto"
    """The site prior for the head: auto, none, or a number, the share that is spread evenly over all classes."""
    heads: str | None = None
    """Of classifiers that the tasks have themselves: stack, last, drop or a task's name (docs/heads.md)."""
    seed: int = 0
    """The seed of everything that is drawn: intervals, folds, and the lottery of the merge."""


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
    """Make the model that a site needs: find its preference, merge, and give the head the site's prior.

    tmx tailor RUN_DIR --inputs site/images -o site-model
    tmx tailor RUN_DIR --labels site.csv -o site-model
    tmx tailor RUN_DIR --pairs site/classes -o site-model
    tmx tailor RUN_DIR --weights 3,1,0 -o site-model

    Started again after an interruption, it continues.

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
    from tunable_magmax.workflows.tailor_plan import plan_tailor
    from tunable_magmax.workflows.target import TargetReading, TargetSources

    lists = {"--weights": sources.weights, "--strengths": sources.strengths}
    refuse_loose("tailor", loose, lists, run_dir)
    weights, strengths = read_weights(sources.weights), read_numbers(sources.strengths, "--strengths")
    known = TargetSources(**{**vars(sources), "weights": weights, "strengths": strengths})
    run, options, read = Run.open(run_dir), _options(tailoring, how), TargetReading(**vars(reading))
    preference = None if tailoring.preference is None else _read_preference(tailoring.preference, run)
    if dry_run:
        return _show_plan(plan_tailor(run, known, out, options, read, preference), out, as_json)
    if out is None:
        raise InputError("where should the model go? Give -o OUT, a directory")
    from tunable_magmax.workflows.tailor import tailor as make

    told: list[str] = []

    def notify(note: str) -> None:
        told.append(note)
        if not quiet:
            tell(f"note: {note}\n")

    with progress_bars(quiet or as_json) as progress, redirect_stdout(sys.stderr):
        made = make(run, known, out, options, read, preference=preference, progress=progress, notify=notify)
    for text in made.warnings:
        warn(text)
    if as_json:
        show(json.dumps(made.to_dict(), indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        show("".join(f"{line}\n" for line in _summary(made, told)))
    return 0


def _options(given: TailorOptions, how: How) -> Tailoring:
    from tunable_magmax.workflows.prefer import Estimation
    from tunable_magmax.workflows.tailoring import Tailoring, read_scale

    own: dict[str, Any] = {"temper": read_temper(given.temper), "prior": read_prior(given.prior)}
    estimation = Estimation(method=given.estimator, seed=given.seed, **own)
    scale = given.scale if given.scale in (None, "matched") else read_scale(given.scale)
    chosen = given.method, scale, given.choose, given.check, given.seed
    return Tailoring(*chosen, estimation, settings_of(how), given.heads)


def _read_preference(file: Path, run: Run) -> Preference:
    from tunable_magmax.runs.recipe import Recipe
    from tunable_magmax.workflows.merge import read_preference

    preference = read_preference(file, Recipe(run.base, run.tasks, names=run.names), warn)
    if len(preference.weights) != len(run.tasks):
        raise InputError(
            f"{file} has {number(len(preference.weights), 'weight')}, and {run.path} has "
            f"{number(len(run.tasks), 'task')}: it is a preference of another run"
        )
    return preference


# -- what it prints ---------------------------------------------------------------------------------------------------


def _summary(made: Tailored, told: Sequence[str]) -> Iterator[str]:
    """Yields what was made and why; `told` are notes that were shown already."""
    from tunable_magmax.workflows.site_model import evidence_lines, weights_error, weights_words

    record, preference = made.record, made.preference
    found, merge = record["preference"], record["merge"]
    if made.complete:
        yield COMPLETE.format(out=made.out)
    samples = f", from {number(found['samples'], 'sample')}" if isinstance(found["samples"], int) else ""
    yield f"{weights_words(found['method'])}{samples}{weights_error(found)}"
    order = sorted(range(len(made.labels)), key=lambda t: (-preference.weights[t], t))[:SHOWN]
    columns = [["task", *(made.labels[t] for t in order)], ["weight", *(f"{preference.weights[t]:.4f}" for t in order)]]
    if (ends := preference.intervals) is not None:
        columns.append(["90% interval", *(f"{ends[t][0]:.3f} to {ends[t][1]:.3f}" for t in order)])
    yield from table([*zip(*columns, strict=True)])
    if len(made.labels) > len(order):
        rest = 1 - sum(preference.weights[t] for t in order)
        yield f"  and {number(len(made.labels) - len(order), 'task')} with {max(0.0, rest):.4f} in all"
    if preference.prior is not None:
        yield _prior_line(record["prior"])
    yield f"merged by {merge['method']} ({merge['why']}), scale {merge['scale']:g} ({merge['scale_from']})"
    if record["choice"] is not None:
        yield from _tried(record["choice"])
    yield from evidence_lines(record)
    yield from (f"note: {note}" for note in made.notes if note not in told)
    if made.seconds:
        total = sum(made.seconds.values())
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in made.seconds.items())
        yield f"where the time went: {parts}; {total:.1f} s in all"
    yield f"{made.out}: {show_size(sum(f.stat().st_size for f in made.out.rglob('*') if f.is_file()))}; to use it:"
    yield f"  tmx predict {made.out} INPUTS"


def _prior_line(prior: Mapping[str, Any]) -> str:
    """Returns a line on the likeliest classes, with their shares in the head."""
    shown = ", ".join(f"{name} {share:.1%}" for name, share in [*prior["likeliest"].items()][:3])
    refined = ", refined by the site's labels" if prior["source"] == "labels" else ""
    even = f"{prior['eps']:.1%} of it is spread over all classes"
    return f"site prior: {shown} ...; {even}{refined} (--prior none leaves it out)"


def _tried(choice: Mapping[str, Any]) -> Iterator[str]:
    """Yields the table of models that were tried on pairs."""
    from tunable_magmax.workflows.choice import TITLES

    rows = [["model", "right", "accuracy", "95% interval"]]
    for tried in choice["tried"]:
        low, high = tried["interval"]
        mark = "*" if tried["name"] == choice["chosen"] else ""
        right = f"{tried['right']} of {tried['samples']}"
        interval = f"{100 * low:.0f} to {100 * high:.0f}%"
        rows.append([TITLES.get(tried["name"], tried["name"]) + mark, right, f"{tried['accuracy']:.0%}", interval])
    yield from table(rows)


def _show_plan(plan: TailorPlan, out: Path | None, as_json: bool) -> int:
    if as_json:
        show(json.dumps(plan.to_dict(), indent=1) + "\n")
        return 2 if plan.problems else 0
    known = "" if plan.samples is None else f", {number(plan.samples, 'sample')}"
    lines = [f"weights      {plan.preference}{known}", f"method       {plan.method}", f"scale        {plan.scale}"]
    if plan.classes is not None:
        lines.append(f"head         {number(plan.classes, 'class', 'classes')}, {plan.head}")
    merge = plan.merge
    if merge.elements:
        lines.append(f"merges       {merge.elements:,} elements of {number(merge.tasks, 'task')}")
        lines.append(f"reads        {show_size(merge.bytes_to_read)} in {number(merge.passes, 'pass', 'passes')}")
        lines.append(
            f"writes       {show_size(merge.bytes_to_write)} in {number(merge.shards, 'file')}, and small files"
        )
        lines.append(f"memory       {show_size(merge.peak_memory)} beyond the interpreter and the encoder")
    if plan.complete:
        lines.append(f"note: {COMPLETE.format(out=out)}")
    show("".join(f"{line}\n" for line in lines))
    for problem in plan.problems:
        tell(f"problem: {problem}\n")
    return 2 if plan.problems else 0
