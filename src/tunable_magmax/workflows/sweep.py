"""What `tmx sweep` does: merges a run for many preferences, one after the other, and sums them up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.bench import Bench
from tunable_magmax.evaluation.comparison import sample_weights
from tunable_magmax.evaluation.labelled import Labelled
from tunable_magmax.evaluation.run_models import MergeSpec
from tunable_magmax.files import Progress, write_atomic
from tunable_magmax.merging.budget import read_weights
from tunable_magmax.merging.methods import method_class
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.recipe import Recipe
from tunable_magmax.runs.run import Run, is_run
from tunable_magmax.workflows.evaluate import UsedHead, find_head, open_labelled
from tunable_magmax.workflows.merge import Notify, merge_recipe, preference_for, recipe_of, unheard
from tunable_magmax.workflows.options import SUMMARY, Reading, Route, SweepOptions
from tunable_magmax.workflows.prefer import completed
from tunable_magmax.workflows.site import open_material

FACTORS = ("ties", "task_arithmetic")
"""Methods whose weights are factors and mean what they say; those of the others are shares of their sum."""
Points: TypeAlias = dict[str, tuple[Fraction, ...]]
"""Weights for the tasks in training order, by the name that the output gets."""
Judging: TypeAlias = tuple[Run, UsedHead, Labelled]
"""A run, its head, and the samples that its merges are measured on."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One merge of a sweep. `counts` and `leftovers` are None for methods without owners.

    `weights`: text that reads back exactly, 1/3 is one third. `accuracy`: on all samples, `mix`: on samples that count
    as the weights say (None where the samples' tasks are not known); both None unless it was measured.
    """

    name: str
    weights: tuple[str, ...]
    scale: float
    merged_length: float
    leftovers: int | None
    counts: tuple[int, ...] | None
    accuracy: float | None = None
    mix: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep, and the content of sweep.json. `samples`: how many each point was measured on."""

    method: str
    tasks: tuple[str, ...]
    elements: int
    last_length: float
    points: tuple[SweepPoint, ...]
    warnings: tuple[str, ...] = ()
    samples: int | None = None

    def to_json(self) -> str:
        """Returns JSON text with stable order: equal sweeps give equal bytes."""
        return json.dumps({"version": 1, **asdict(self)}, indent=1) + "\n"


def sweep(source: Path, options: SweepOptions, progress: Progress | None = None, notify: Notify = unheard) -> Sweep:
    """Merges a run directory or a YAML for each point into `out/NAME`, as `merge` does with its weights.

    Finished points are not made again. With `data` each point is then merged again in memory, gets the head that
    `tmx tailor` would fit for its weights, and is measured on the samples.
    """
    out = options.out
    if out is None:
        raise InputError("where should the results go? Give -o OUT, a directory")
    if out.suffix == ".safetensors" or out.is_file():
        raise InputError(f"{out}: a sweep's output is a directory with one checkpoint for each point")
    recipe = recipe_of(source, merging=options.merging, notify=notify)
    method = recipe.options.get("method") or "tunable_magmax"
    if method_class(method).weights == "refused":
        raise InputError(f"method {method!r} takes no weights, so there is nothing to sweep")
    if options.data is not None and not is_run(source):
        raise InputError("samples are measured with the head of a run: give a RUN_DIR, or leave out --data")
    weights_by_name = _points(options.route, recipe, method in FACTORS, notify)
    judging = None if options.data is None else _open_judging(Run.open(source), options.data)  # before it is merged
    reports, points = [], list[SweepPoint]()
    for name, weights in weights_by_name.items():
        merged = recipe.with_options(weights=list(map(str, weights)))
        report = merge_recipe(merged, out / name, overwrite=options.overwrite).report
        reports.append(report)
        shown, length = tuple(map(str, weights)), report.merged_length
        points.append(SweepPoint(name, shown, report.scale, length, report.leftovers, report.counts))
        if progress is not None:
            progress("merge", len(reports), len(weights_by_name))
    samples = None
    if judging is not None:
        scores, samples = _measured(weights_by_name, method, recipe, judging, progress)
        points = [
            replace(point, accuracy=accuracy, mix=mix) for point, (accuracy, mix) in zip(points, scores, strict=True)
        ]
    warnings = tuple(dict.fromkeys(warning for report in reports for warning in report.warnings))
    first, names = reports[0], recipe.named().names or ()
    made = Sweep(first.method, names, first.elements, first.last_length, tuple(points), warnings, samples)
    write_atomic(out / SUMMARY, made.to_json().encode())
    return made


def _open_judging(run: Run, data: Any) -> Judging:
    """Opens the run's head and the samples to measure on."""
    test = str(data) == "test" and not Path("test").exists()
    head = find_head(run.base, None, run)
    return run, head, open_labelled(None if test else data, head.head, run, Reading())[0]


def _measured(
    points: Points, method: str, recipe: Recipe, judging: Judging, progress: Progress | None
) -> tuple[list[tuple[float, float | None]], int]:
    """Returns accuracy and accuracy on the mix of each point, and the number of samples."""
    run, head, labelled = judging
    scores: list[tuple[float, float | None]] = []
    with Bench(run, head=head.frozen, seed=recipe.options.get("seed") or 0, progress=progress) as bench:
        samples = bench.open_labelled("sweep", labelled)
        for weights in points.values():
            preference = completed(Preference.from_weights(list(map(float, weights))), run)
            spec = MergeSpec(method, recipe.options.get("scale"), weights)
            fitted = bench.fit(spec, open_material(bench, preference).all)
            right = bench.logits(spec, samples, fitted.linear).argmax(axis=1) == samples.labels
            known = bool((samples.tasks >= 0).all())
            mix = float(right @ sample_weights(samples.tasks, preference.weights)) if known else None
            scores.append((float(right.mean()), mix))
            if progress is not None:
                progress("measure", len(scores), len(points))
    return scores, len(samples)


# -- the points -------------------------------------------------------------------------------------------------------


def _points(route: Route, recipe: Recipe, factors: bool, notify: Notify) -> Points:
    ends = {"--from": route.start, "--to": route.stop}
    missing = [option for option, weights in ends.items() if weights is None]
    if route.preference:
        if len(missing) < len(ends):
            raise InputError("give a line, --from and --to, or preferences, not both")
        return listed({file.stem: preference_for(recipe, file, notify).weights for file in route.preference})
    if missing:
        raise InputError(f"a line has two ends: give {' and '.join(missing)} as well, weights such as 1,0,0")
    start, stop = (recipe.in_order(weights, option) for option, weights in ends.items())
    return line(start, stop, route.steps, normalise=not factors)


def line(start: Sequence[Any], stop: Sequence[Any], steps: int, normalise: bool = True) -> Points:
    """Returns `steps` evenly spaced points from one preference to another, both included: step-00, step-01 and so on.

    With `normalise` the ends are shares, divided by their sum before anything else, so that shares change evenly.

    >>> {name: list(map(str, weights)) for name, weights in line([3, 1], [0, 1], 3).items()}
    {'step-00': ['3/4', '1/4'], 'step-01': ['3/8', '5/8'], 'step-02': ['0', '1']}
    """
    if steps < 2:
        raise InputError(f"steps is {steps}, expected 2 or more: both ends are steps")
    if len(start) != len(stop):
        raise InputError(f"the line goes from {len(start)} weights to {len(stop)}: give one for each task at both ends")
    ends = [_exact(weights, "an end of the line") for weights in (start, stop)]
    if normalise:
        ends = [tuple(weight / sum(weights) for weight in weights) for weights in ends]
    width = max(2, len(str(steps - 1)))
    return {
        f"step-{k:0{width}d}": tuple(a + (b - a) * Fraction(k, steps - 1) for a, b in zip(*ends, strict=True))
        for k in range(steps)
    }


def listed(weights_by_name: Mapping[str, Sequence[Any]]) -> Points:
    """Returns points for weights by name, numbered so that names sort in the same order: 00-NAME, 01-NAME.

    >>> list(listed({"site a": [3, 1], "home": [0, 1]}))
    ['00-site-a', '01-home']
    """
    width = max(2, len(str(len(weights_by_name) - 1)))
    return {
        f"{k:0{width}d}-{re.sub(r'[^A-Za-z0-9_]+', '-', name)}".rstrip("-"): _exact(weights, name)
        for k, (name, weights) in enumerate(weights_by_name.items())
    }


def _exact(weights: Sequence[Any], what: str) -> tuple[Fraction, ...]:
    try:
        return read_weights(weights, len(weights)) or ()
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
