"""What `tmx eval` tells: shares with intervals, the accuracy matrix, and what the numbers mean."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunable_magmax.cli.tables import number, screen_width, table, wrapped_table

if TYPE_CHECKING:
    from tunable_magmax.evaluation.accuracy import Accuracy
    from tunable_magmax.evaluation.metrics import AccuracyMatrix
    from tunable_magmax.evaluation.share import Share
    from tunable_magmax.workflows.evaluate import Evaluation, RunEvaluation


def evaluation_lines(found: Evaluation, confusion: bool, per_class: bool) -> Iterator[str]:
    """One checkpoint or merge."""
    yield f"{found.model} on {found.data}, with the head {found.head}"
    if found.merge is not None:
        yield f"  merged in memory by {found.merge.method}, scale {found.merge.scale:g}, seed {found.merge.seed}"
    yield from accuracy_lines(found.accuracy, confusion, per_class)


def run_lines(found: RunEvaluation, confusion: bool, per_class: bool) -> Iterator[str]:
    """Some checkpoints of a run, or all and what follows from them."""
    yield f"{found.run} on {found.data}, with the head {found.head}"
    if found.matrix is not None:
        overall = {name: accuracy.overall.value for name, accuracy in found.accuracies.items()}
        yield from matrix_lines(found.matrix, overall)
    if found.matrix is None or confusion or per_class:
        for name, accuracy in found.accuracies.items():
            yield ""
            yield name if name == "base" else f"after {name}"
            yield from accuracy_lines(accuracy, confusion, per_class)


def accuracy_lines(accuracy: Accuracy, confusion: bool, per_class: bool) -> Iterator[str]:
    """Overall and for each task, then what was asked for, then what it means."""
    known = accuracy.known_by_task
    interval = _level(accuracy)
    header = ["", "samples", "accuracy", interval]
    rows = [["all", *_cells(accuracy.overall, accuracy.level)]]
    rows += [[name, *_cells(share, accuracy.level)] for name, share in accuracy.by_task.items()]
    if accuracy.known is not None and known is not None:
        header += ["task known", interval]
        shares = [accuracy.known, *known.values()]
        rows = [[*row, *_cells(share, accuracy.level)[1:]] for row, share in zip(rows, shares, strict=True)]
    yield from table([header, *rows])
    if per_class:
        yield from _classes(accuracy, interval)
    if confusion:
        yield from _confusion(accuracy)
    yield from _wrapped(
        f"accuracy: the largest score among all {number(len(accuracy.classes), 'class', 'classes')} of the head"
        + ("; task known: among those of the sample's own task" if accuracy.known is not None else "")
        + f"; intervals: Wilson, {_level(accuracy).split()[0]}"
    )


def matrix_lines(matrix: AccuracyMatrix, overall: dict[str, float] | None = None) -> Iterator[str]:
    """R and its metrics. `overall`: the accuracy over all samples, of each checkpoint."""
    yield "accuracy after each task (rows) on each task (columns), the task unknown"
    extra = [] if overall is None else ["all samples"]
    rows = [["", *extra, *matrix.tasks]]
    named = [("base", "base", matrix.base)] if matrix.base is not None else []
    named += [(name, f"after {name}", row) for name, row in zip(matrix.tasks, matrix.rows, strict=True)]
    for name, title, row in named:
        if row is not None and not all(map(math.isnan, row)):
            totals = [] if overall is None else [_percent(overall[name])]
            rows.append([title, *totals, *map(_percent, row)])
    yield from wrapped_table(rows, 1 + len(extra), screen_width())
    metrics = matrix.metrics()
    if 0 < matrix.after < len(matrix.tasks):
        yield f"after {matrix.after} of {number(len(matrix.tasks), 'task')}, so T = {matrix.after}"
    width = max(len(metric.title) for metric in metrics)
    for metric in metrics:
        value = "not known" if metric.value is None else f"{metric.value:.1%}"
        lead = f"  {metric.title:<{width}}  {value:>9}  "
        yield from textwrap.wrap(
            metric.definition, screen_width(), initial_indent=lead, subsequent_indent=" " * len(lead)
        )


def _classes(accuracy: Accuracy, interval: str) -> Iterator[str]:
    homes: dict[int, list[str]] = {}
    for task, members in zip(accuracy.tasks, accuracy.task_classes, strict=True):
        for k in members:
            homes.setdefault(k, []).append(task)
    yield "by class"
    alone = all(len(tasks) == 1 for tasks in homes.values())
    shown = bool(homes) and alone
    rows = [
        [name, *([homes.get(k, ["-"])[0]] if shown else []), *_cells(share, accuracy.level)]
        for k, (name, share) in enumerate(accuracy.by_class.items())
        if share.samples
    ]
    yield from table([["class", *(["task"] if shown else []), "samples", "accuracy", interval], *rows])
    without = len(accuracy.classes) - len(rows)
    if without:
        yield f"  and {number(without, 'class', 'classes')} of the head without samples"


def _confusion(accuracy: Accuracy) -> Iterator[str]:
    if accuracy.confusion is None or accuracy.elsewhere is None:
        shared = bool(accuracy.tasks)
        yield "no confusion between tasks: " + (
            "they share their classes" if shared else "the tasks are not known; --run RUN_DIR tells them"
        )
        return
    yield "samples of a task (rows) taken for classes of a task (columns)"
    other = any(accuracy.elsewhere)
    rows = [["", *accuracy.tasks, *(["no task"] if other else [])]]
    for name, row, lost in zip(accuracy.tasks, accuracy.confusion, accuracy.elsewhere, strict=True):
        rows.append([name, *(f"{count:,}" for count in row), *([f"{lost:,}"] if other else [])])
    yield from wrapped_table(rows, 1, screen_width())


def _cells(share: Share, level: float) -> list[str]:
    if not share.samples:
        return ["0", "-", "-"]
    low, high = share.interval(level)
    return [f"{share.samples:,}", f"{share.value:.1%}", f"{100 * low:.1f} to {100 * high:.1f}%"]


def _level(accuracy: Accuracy) -> str:
    return f"{100 * accuracy.level:g}% interval"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, screen_width())
