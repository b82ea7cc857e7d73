"""`tmx train`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.terminal import show_result, table, working
from tunable_magmax.showing import plural
from tunable_magmax.training.options import TrainOptions

if TYPE_CHECKING:
    from tunable_magmax.training.config import TrainingPlan
    from tunable_magmax.training.sequence import TrainedRun


def train(config: Path, /, *, options: TrainOptions = TrainOptions()) -> None:
    """Train a model on a sequence of tasks, with a checkpoint and a profile for each.

    tmx train run.yaml -o run/
    tmx train run.yaml -o run/ --set train.lr=3e-5 --set seed=4

    Started again, it goes on after the last finished task.

    Parameters
    ----------
    config
        What to train, on what, and how: a YAML file (docs/training.md).
    """
    from tunable_magmax.training.config import plan_training, read_config

    chosen, place = read_config(config, options.changes), options.out or config.with_suffix("")
    if options.dry_run:
        plan = plan_training(chosen)
        show_result(asdict(plan), _planned(plan, place))
        return
    from tunable_magmax.training.sequence import train_sequence

    reading: dict[str, Any] = {"device": options.device, "strict": options.strict}
    with working() as work:
        run = train_sequence(chosen, place, **reading, progress=work.progress, watch=work.watch)
    show_result(_record(run), _summary(run))


def _planned(plan: TrainingPlan, place: Path) -> Iterator[str]:
    yield f"{place}: {plan.model} through {plural(len(plan.tasks), 'task')} of {plan.benchmark}"
    rows = [
        [task.name, *(f"{count:,}" for count in (task.classes, task.samples, task.test, task.steps))]
        for task in plan.tasks
    ]
    yield from table(rows, ["task", "classes", "samples", "test", "steps"])
    yield f"  {plural(sum(task.steps for task in plan.tasks), 'step')} in all"
    yield from (f"  {note}" for note in plan.notes)


def _summary(run: TrainedRun) -> Iterator[str]:
    tasks = plural(len(run.tasks), "task")
    yield f"{run.path}: {tasks} trained" if run.trained else f"{run.path}/ is complete: {tasks}; nothing was trained"
    rows = []
    for t, (name, result) in enumerate(zip(run.tasks, run.results, strict=True)):
        if result.accuracy is not None:
            shown = [result.accuracy, *([run.matrix.rows[t][t], run.matrix.rows[-1][t]] if run.matrix else [])]
            rows.append([name, *(f"{100 * value:.1f}" for value in shown)])
    header = ["accuracy in % on its own task", "after it", *(["among all classes", "at the end"] if run.matrix else [])]
    yield from table(rows, header) if rows else ()
    for metric in () if run.matrix is None else run.matrix.metrics():
        if metric.value is not None:
            yield f"  {metric.title} {100 * metric.value:.1f}: {metric.definition}"
    yield f"next: tmx tailor {run.path} --inputs DATA -o site-model/"


def _record(run: TrainedRun) -> dict[str, Any]:
    results = zip(run.tasks, run.results, strict=True)
    return {
        "out": str(run.path),
        "trained": run.trained,
        "tasks": [{"name": name, **asdict(result)} for name, result in results],
        "matrix": None if run.matrix is None else run.matrix.to_dict(),
    }
