"""`tmx eval`: its options, and its result as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import What, read_what
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, screen_width, show, table, wrapped_table
from tunable_magmax.errors import InputError
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.evaluation.accuracy import Accuracy, Share
    from tunable_magmax.evaluation.metrics import AccuracyMatrix
    from tunable_magmax.workflows.evaluate import Evaluation

ALL = "all"
NO_READING = ("data", "head", "run", "prior")


@Parameter(name="*", group=Group("Data and head", sort_key=1))
@dataclass(frozen=True)
class DataAndHead:
    """The data to evaluate on, the head, and how much is read at once."""

    data: Path | None = None
    """Labelled data: class folders of images, a table, parquet or a benchmark's YAML. Default: the run's test data."""
    head: Path | None = None
    """The frozen head. Default: the run's, or one beside the model, or of the run it was merged from."""
    run: Path | None = None
    """The run directory the model comes from: its head, tasks and test data."""
    prior: Literal["auto", "none"] = "auto"
    """The site prior on the head: auto is that of --preference, or the bias in the head's file; none leaves it out."""
    split: str | None = None
    """Of data with several. Of a benchmark: test (default) or train."""
    text_column: str | None = None
    """Default: text, sentence, query, ..."""
    label_column: str | None = None
    """Default: label, class, intent, ..."""
    max_samples: int | None = None
    """Use at most this many samples (a fixed random draw)."""
    batch: int = 64
    """Batch size."""
    device: str | None = None
    """Default: the GPU if there is one."""


_DATA, _WHAT = DataAndHead(), What()


def eval(
    model: Path | None = None,
    /,
    *,
    checkpoint: list[str] | None = None,
    options: DataAndHead = _DATA,
    what: What = _WHAT,
    confusion: bool = False,
    per_class: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Measure a checkpoint, or a merge without writing it: accuracy by task and class, with intervals.

    tmx eval site-model --data site/test
    tmx eval RUN_DIR --preference site.json --data site/test
    tmx eval RUN_DIR --checkpoint all
    tmx eval RUN_DIR

    The last one shows what training measured: accuracies, forgetting and transfer. Options of a merge (as of tmx merge)
    say that a merge is meant; it is made in memory.

    Parameters
    ----------
    model
        A checkpoint (a directory or a file), a run directory, or a YAML configuration of a merge.
    checkpoint
        Of a run: a task's name, base, last or all; repeatable. All give the accuracy matrix and its metrics.
    confusion
        Show for which tasks' classes the samples of each task were taken.
    per_class
        Show the accuracy of each class.
    quiet
        No progress bars; print the accuracy alone, as a number.
    as_json
        Print everything as JSON on stdout.
    """
    from tunable_magmax.workflows.evaluate import evaluate, evaluate_run, kind_of, measured_by_training
    from tunable_magmax.workflows.options import Reading

    kind = None if model is None else kind_of(model)
    merging = any(value is not None for value in asdict(what).values())
    _refuse_unclear(model, kind, merging, checkpoint, options)
    if model is not None and kind == "run" and not merging and checkpoint is None:
        matrix = measured_by_training(model)
        average = matrix.metrics()[0].value
        lines = [f"{model}, as training measured it", *matrix_lines(matrix)]
        _print(matrix.to_dict(), lines, float("nan") if average is None else average, quiet, as_json)
        return
    values = {key: value for key, value in asdict(options).items() if key not in NO_READING}
    reading = Reading(**values)
    prior: Any = options.prior
    if what.preference is not None and prior == "auto":
        from tunable_magmax.preference.preference import Preference

        prior = Preference.load(what.preference)
    with plain_warnings() as messages, progress_bars(quiet or as_json) as progress:
        common: dict[str, Any] = {"head": options.head, "prior": prior, "reading": reading, "progress": progress}
        if model is not None and checkpoint is not None:
            chosen = None if ALL in checkpoint else checkpoint
            found = evaluate_run(model, options.data, checkpoints=chosen, **common)
        else:
            subject = model if model is not None and kind == "checkpoint" else read_what(model, what)
            found = evaluate(subject, options.data, run=model if kind == "run" else options.run, **common)
    shown = evaluation_lines(found, confusion, per_class)
    _print({**found.to_dict(), "warnings": messages}, shown, found.accuracy.overall.value, quiet, as_json)


def _refuse_unclear(
    model: Path | None, kind: str | None, merging: bool, checkpoint: list[str] | None, options: DataAndHead
) -> None:
    """Raise an error that says what can be evaluated, where that is not clear."""
    is_run = kind == "run"
    if checkpoint is not None and not is_run:
        raise InputError(f"--checkpoint names checkpoints of a run directory, which {model or 'nothing'} is not")
    if checkpoint is not None and merging:
        raise InputError("--checkpoint and options of a merge: leave out the one that is not meant")
    if is_run and options.run is not None:
        raise InputError(f"{model} is a run itself: leave out --run")
    if model is None and not merging:
        raise InputError("what should be evaluated? Give a checkpoint, a run directory or a YAML configuration")
    if is_run and not merging and checkpoint is None and (options.data, options.head) != (None, None):
        raise InputError(
            f"what of {model} should be evaluated? Say --checkpoint NAME (a task, base, last or all), or a merge: "
            "--preference FILE, --weights 3,1,0 or --method NAME"
        )
    if merging and kind == "checkpoint":
        raise InputError(
            f"{model} is a checkpoint, so there is nothing to merge: leave out the options of a merge, or give a run "
            "directory"
        )


def _print(record: dict[str, Any], lines: Iterable[str], share: float, quiet: bool, as_json: bool) -> None:
    if as_json:
        show(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    elif quiet:
        show(f"{share:.4f}\n")
    else:
        show("".join(f"{line}\n" for line in lines))


# -- text -------------------------------------------------------------------------------------------------------------


def evaluation_lines(evaluation: Evaluation, confusion: bool, per_class: bool) -> Iterator[str]:
    """Yields the lines about a model, or about checkpoints of a run: all of them with the accuracy matrix."""
    yield f"{evaluation.model} on {evaluation.data}, with the head {evaluation.head}"
    report = evaluation.merge
    if report is not None:
        yield f"  merged in memory by {report.method}, scale {report.scale:g}, seed {report.seed}"
    if evaluation.prior is not None:
        whose = "of the preference" if evaluation.prior == "preference" else "in the head's file"
        yield f"  with the site prior {whose} (--prior none leaves it out)"
    if evaluation.matrix is not None:
        overall = {name: accuracy.overall.value for name, accuracy in evaluation.accuracies.items()}
        yield from matrix_lines(evaluation.matrix, overall)
    if evaluation.matrix is None or confusion or per_class:
        several = len(evaluation.accuracies) > 1 or evaluation.model not in evaluation.accuracies
        for name, accuracy in evaluation.accuracies.items():
            yield from ["", name if name == "base" else f"after {name}"] if several else []
            yield from accuracy_lines(accuracy, confusion, per_class)


def accuracy_lines(accuracy: Accuracy, confusion: bool, per_class: bool) -> Iterator[str]:
    """Yields a table overall and by task, and the tables that were asked for."""
    known = accuracy.known_by_task
    interval = f"{100 * accuracy.level:g}% interval"
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


def matrix_lines(matrix: AccuracyMatrix, overall: dict[str, float] | None = None) -> Iterator[str]:
    """Yields R and its metrics. `overall`: accuracies over all samples."""
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
        yield f"after {matrix.after} of {plural(len(matrix.tasks), 'task')}, so T = {matrix.after}"
    width = max(len(metric.title) for metric in metrics)
    for metric in metrics:
        value = "not known" if metric.value is None else f"{metric.value:.1%}"
        yield f"  {metric.title:<{width}}  {value:>9}"


def _classes(accuracy: Accuracy, interval: str) -> Iterator[str]:
    tasks = zip(accuracy.tasks, accuracy.task_classes, strict=True)
    homes = {k: task for task, members in tasks for k in members}
    shown = accuracy.confusion is not None  # otherwise tasks share classes, or there are none
    yield "by class"
    rows = [
        [name, *([homes.get(k, "-")] if shown else []), *_cells(share, accuracy.level)]
        for k, (name, share) in enumerate(accuracy.by_class.items())
        if share.samples
    ]
    yield from table([["class", *(["task"] if shown else []), "samples", "accuracy", interval], *rows])
    without = len(accuracy.classes) - len(rows)
    if without:
        yield f"  and {plural(without, 'class', 'classes')} of the head without samples"


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


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"
