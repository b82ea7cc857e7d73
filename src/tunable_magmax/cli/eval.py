"""`tmx eval`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import given_warnings, show_result, table, working
from tunable_magmax.errors import plural
from tunable_magmax.workflows.options import EvalOptions, flat

if TYPE_CHECKING:
    from tunable_magmax.evaluation.accuracy import Accuracy, AccuracyMatrix, Share
    from tunable_magmax.workflows.evaluate import Evaluation

INTERVAL = "95% interval"


def eval(model: Path, /, *, options: EvalOptions = parsed(EvalOptions)) -> None:
    """Measure a checkpoint, or a merge without writing it: accuracy by task and class, with intervals.

    tmx eval site-model --data site/test
    tmx eval RUN_DIR --preference site.json --data site/test
    tmx eval RUN_DIR

    The last one measures every checkpoint on every task: accuracies, forgetting and transfer. Options of a merge (as of
    tmx merge) say that a merge is meant; it is made in memory.

    Parameters
    ----------
    model
        A checkpoint (a directory or a file), a run directory, or a YAML configuration of a merge.
    """
    from tunable_magmax.workflows.evaluate import evaluate

    with working() as progress:
        found = evaluate(model, progress=progress, **flat(options))
    show_result({**found.to_dict(), "warnings": given_warnings()}, _evaluation(found, options))


def _evaluation(found: Evaluation, options: EvalOptions) -> Iterator[str]:
    """Yields the lines about a model, or about checkpoints of a run: all of them with the accuracy matrix."""
    yield f"{found.model} on {found.data}"
    yield f"  head: {found.head}"
    if (report := found.merge) is not None:
        yield f"  merged in memory by {report.method}, scale {report.scale:g}, seed {report.seed}"
    if found.matrix is not None:
        yield from _matrix(found.matrix, {name: each.overall.value for name, each in found.accuracies.items()})
    if found.matrix is None or options.per_class:
        for name, accuracy in found.accuracies.items():
            yield from ["", name if name == "base" else f"after {name}"] if name != found.model else []
            yield from _accuracy(accuracy)
            yield from _classes(accuracy) if options.per_class else []


def _accuracy(accuracy: Accuracy) -> Iterator[str]:
    """Yields a table overall and by task."""
    header = ["", "samples", "accuracy", INTERVAL]
    if not accuracy.by_task:
        yield from table([["all", *_cells(accuracy.overall)]], header)
        return
    shares = {"all": (accuracy.overall, accuracy.known)}
    shares |= {name: (share, accuracy.known_by_task[name]) for name, share in accuracy.by_task.items() if share.samples}
    rows = [[name, *_cells(unknown), *_cells(known)[1:]] for name, (unknown, known) in shares.items()]
    yield from table(rows, [*header, "task known", INTERVAL])


def _matrix(matrix: AccuracyMatrix, overall: Mapping[str, float]) -> Iterator[str]:
    """Yields R, of tasks with samples, and its metrics where they are known. `overall`: accuracies over all samples."""
    yield "accuracy after each task (rows) on each task (columns), the task unknown"
    named = [("base", "base", matrix.base)] if matrix.base is not None else []
    named += [(name, f"after {name}", row) for name, row in zip(matrix.tasks, matrix.rows, strict=False)]
    measured = [t for t in range(len(matrix.tasks)) if not all(math.isnan(row[t]) for row in matrix.rows)]
    rows = [[title, _percent(overall[name]), *(_percent(row[t]) for t in measured)] for name, title, row in named]
    yield from table(rows, ["", "all samples", *(matrix.tasks[t] for t in measured)], 2)
    if len(matrix.rows) < len(matrix.tasks):
        yield f"after {len(matrix.rows)} of {plural(len(matrix.tasks), 'task')}, so T = {len(matrix.rows)}"
    yield from table([[name, f"{value:.1%}"] for name, value in matrix.metrics().items() if value is not None])


def _classes(accuracy: Accuracy) -> Iterator[str]:
    owner = {name: task for task, members in accuracy.task_classes.items() for name in members}
    every = [name for members in accuracy.task_classes.values() for name in members]
    shown = 0 < len(every) == len(set(every))  # otherwise tasks share classes, or there are none
    yield "by class"
    rows = [
        [name, *([owner.get(name, "-")] if shown else []), *_cells(share)]
        for name, share in accuracy.by_class.items()
        if share.samples
    ]
    yield from table(rows, ["class", *(["task"] if shown else []), "samples", "accuracy", INTERVAL])
    if without := len(accuracy.by_class) - len(rows):
        yield f"  and {plural(without, 'class', 'classes')} of the head without samples"


def _cells(share: Share) -> list[str]:
    if not share.samples:
        return ["0", "-", "-"]
    low, high = share.interval()
    return [f"{share.samples:,}", f"{share.value:.1%}", f"{100 * low:.1f} to {100 * high:.1f}%"]


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"
