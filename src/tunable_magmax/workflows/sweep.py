"""What `tmx sweep` does: merges a run for many preferences, one after the other, and sums them up."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.checkpoints.writer import Output
from tunable_magmax.errors import InputError, StorageError, plural
from tunable_magmax.evaluation.accuracy import Labelled
from tunable_magmax.evaluation.bench import Bench
from tunable_magmax.evaluation.comparison import sample_weights
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.files import Progress, write_atomic
from tunable_magmax.merging.budget import read_weights
from tunable_magmax.merging.methods import method_class
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import completed
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run, is_run
from tunable_magmax.workflows.evaluate import find_head, open_labelled
from tunable_magmax.workflows.material import open_material
from tunable_magmax.workflows.merge import Notify, merge_recipe, preference_for, recipe_of, unheard
from tunable_magmax.workflows.options import SUMMARY, Reading, SweepOptions

FACTORS = ("ties", "task_arithmetic")
"""Methods whose weights are factors and mean what they say; those of the others are shares of their sum."""
Points: TypeAlias = dict[str, tuple[Fraction, ...]]
"""Weights for the tasks in training order, by the name that the output gets."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One merge of a sweep. `counts`: None for methods without owners.

    `weights`: text that reads back exactly, 1/3 is one third. `accuracy`: on all samples, `mix`: on samples that count
    as the weights say (None where the samples' tasks are not known); both None unless it was measured.
    """

    name: str
    weights: tuple[str, ...]
    scale: float
    counts: tuple[int, ...] | None
    accuracy: float | None = None
    mix: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep, and the content of sweep.json. `samples`: how many each point was measured on."""

    method: str
    tasks: tuple[str, ...]
    elements: int
    points: tuple[SweepPoint, ...]
    warnings: tuple[str, ...] = ()
    samples: int | None = None

    def to_json(self) -> str:
        """Returns JSON text with stable order: equal sweeps give equal bytes."""
        return json.dumps({"version": 1, **asdict(self)}, indent=1) + "\n"


def sweep(source: Path, options: SweepOptions, progress: Progress | None = None, notify: Notify = unheard) -> Sweep:
    """Merges a run directory or a YAML for each point into `out/NAME`, as `merge` does with its weights.

    With `data` each point is then merged again in memory, gets the head that `tmx tailor` would fit for its weights,
    and is measured on the samples.
    """
    if (out := options.out) is None:
        raise InputError("where should the results go? Give -o OUT, a directory")
    recipe = recipe_of(source, merging=options.merging, notify=notify)
    method = recipe.options.get("method") or "tunable_magmax"
    if method_class(method).weights == "refused":
        raise InputError(f"method {method!r} takes no weights, so there is nothing to sweep")
    if options.data is not None and not is_run(source):
        raise InputError("samples are measured with the head of a run: give a RUN_DIR, or leave out --data")
    weights_by_name = _points(options, recipe, method in FACTORS, notify)
    run = None if options.data is None else Run.current(source)
    labelled = None  # opened before anything is merged
    if run is not None:
        labelled, _ = open_labelled(options.data, find_head(run.base, None, run).head, run, Reading())
    for name in weights_by_name:
        Output.check(out / name, options.overwrite)
    reports, points, samples = [], list[SweepPoint](), None
    try:
        for name, weights in weights_by_name.items():
            shown = tuple(map(str, weights))
            report = merge_recipe(recipe.with_options(weights=shown), out / name, overwrite=options.overwrite)
            reports.append(report)
            points.append(SweepPoint(name, shown, report.scale, report.counts))
            if progress is not None:
                progress("merge", len(reports), len(weights_by_name))
        if run is not None and labelled is not None:
            points, samples = _measured(points, method, recipe, run, labelled, progress)
    except (KeyboardInterrupt, StorageError) as stop:
        if reports:
            done = f"{len(reports)} of {plural(len(weights_by_name), 'point')} are complete in {out}"
            stop.add_note(f"{done}; with --overwrite the same command makes all of them again")
        raise
    warnings = tuple(dict.fromkeys(warning for report in reports for warning in report.warnings))
    names = recipe.named().names or ()
    made = Sweep(reports[0].method, names, reports[0].elements, tuple(points), warnings, samples)
    write_atomic(out / SUMMARY, made.to_json().encode())
    return made


def _measured(
    points: Sequence[SweepPoint],
    method: str,
    recipe: Recipe,
    run: Run,
    labelled: Labelled,
    progress: Progress | None,
) -> tuple[list[SweepPoint], int]:
    """Returns the points with their accuracy and that on their mix, and the number of samples."""
    measured: list[SweepPoint] = []
    with Bench(run, seed=recipe.options.get("seed") or 0, progress=progress) as bench:
        samples = bench.open_labelled("sweep", labelled)
        for point in points:
            weights = tuple(map(Fraction, point.weights))
            preference = completed(Preference.from_weights(list(map(float, weights))), run)
            spec = MergeSpec(method, recipe.options.get("scale"), weights)
            fitted = bench.fit(spec, open_material(bench, preference).all)
            right = bench.logits(spec, samples, fitted.linear).argmax(axis=1) == samples.labels
            known = bool((samples.tasks >= 0).all())
            mix = float(right @ sample_weights(samples.tasks, preference.weights)) if known else None
            measured.append(replace(point, accuracy=float(right.mean()), mix=mix))
            if progress is not None:
                progress("measure", len(measured), len(points))
    return measured, len(samples)


# -- the points -------------------------------------------------------------------------------------------------------


def _points(options: SweepOptions, recipe: Recipe, factors: bool, notify: Notify) -> Points:
    ends = (options.start, options.stop)
    if options.preference and ends == (None, None):
        return listed([(file.stem, preference_for(recipe, file, notify).weights) for file in options.preference])
    if options.preference or None in ends:
        raise InputError("give a line, weights such as 1,0,0 as --from and --to, or preferences")
    start, stop = (recipe.in_order(weights, name) for name, weights in zip(("--from", "--to"), ends, strict=True))
    return line(start, stop, options.steps, normalise=not factors)


def line(start: Sequence[Any], stop: Sequence[Any], steps: int, normalise: bool = True) -> Points:
    """Returns `steps` evenly spaced points from one preference to another, both included: step-00, step-01 and so on.

    With `normalise` the ends are shares, divided by their sum before anything else, so that shares change evenly.

    >>> {name: list(map(str, weights)) for name, weights in line([3, 1], [0, 1], 3).items()}
    {'step-00': ['3/4', '1/4'], 'step-01': ['3/8', '5/8'], 'step-02': ['0', '1']}
    """
    if steps < 2:
        raise InputError(f"steps is {steps}, expected 2 or more: both ends are steps")
    ends = [read_weights(weights, len(start)) or () for weights in (start, stop)]
    if normalise:
        ends = [tuple(weight / sum(weights) for weight in weights) for weights in ends]
    width = max(2, len(str(steps - 1)))
    return {
        f"step-{k:0{width}d}": tuple(a + (b - a) * Fraction(k, steps - 1) for a, b in zip(*ends, strict=True))
        for k in range(steps)
    }


def listed(named: Sequence[tuple[str, Sequence[Any]]]) -> Points:
    """Returns points for weights with names, numbered so that names sort in the same order: 00-NAME, 01-NAME.

    >>> list(listed([("site a", [3, 1]), ("home", [0, 1])]))
    ['00-site-a', '01-home']
    """
    width = max(2, len(str(len(named) - 1)))
    return {
        f"{k:0{width}d}-{re.sub(r'[^A-Za-z0-9_]+', '-', name)}".rstrip("-"): read_weights(weights, len(weights)) or ()
        for k, (name, weights) in enumerate(named)
    }
