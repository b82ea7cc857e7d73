"""`tmx train`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tunable_magmax.cli.terminal import plain_warnings, show, table, training_bars
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.training.config import TrainingPlan
    from tunable_magmax.training.sequence import TrainedRun


def train(
    config: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    change: Annotated[list[str] | None, Parameter(name="--set")] = None,
    device: str | None = None,
    strict: bool = False,
    dry_run: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Train a model on a sequence of tasks, with a checkpoint and a profile for each.

    tmx train run.yaml -o run/
    tmx train run.yaml -o run/ --set train.lr=3e-5 --set seed=4

    Started again, it goes on after the last finished task. docs/training.md describes run.yaml.

    Parameters
    ----------
    config
        What to train, on what, and how: a YAML file.
    out
        The run directory. Default: named after the file, beside it.
    change
        KEY=VALUE replaces a value of the file; repeatable. Relative paths count from the current directory here,
        and from the file's own inside the file.
    device
        Default: the GPU if there is one.
    strict
        Inputs that cannot be read are an error; otherwise they are counted, named and left out.
    dry_run
        Only say what would be trained: tasks, samples, steps.
    quiet
        No progress bar, no summary.
    as_json
        Print the result as JSON on stdout.
    """
    from tunable_magmax.training.config import read_config

    chosen = read_config(config, change or ())
    place = out or config.with_suffix("")
    if dry_run:
        from tunable_magmax.training.config import plan_training

        plan = plan_training(chosen)
        show(json.dumps(asdict(plan), indent=1) + "\n" if as_json else _planned(plan, place))
        return
    from tunable_magmax.training.sequence import train_sequence

    with training_bars(quiet or as_json) as (progress, watch), plain_warnings():
        run = train_sequence(chosen, place, device=device, strict=strict, progress=progress, watch=watch)
    if as_json:
        show(json.dumps(_record(run), indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        show(_summary(run))


def _planned(plan: TrainingPlan, place: Path) -> str:
    rows = [["task", "classes", "samples", "test", "steps"]]
    rows += [
        [task.name, f"{task.classes:,}", f"{task.samples:,}", f"{task.test:,}", f"{task.steps:,}"]
        for task in plan.tasks
    ]
    return "\n".join(
        [
            f"{place}: {plan.model} through {plural(len(plan.tasks), 'task')} of {plan.benchmark}",
            *table(rows),
            f"  {plural(sum(task.steps for task in plan.tasks), 'step')} in all",
            *(f"  {note}" for note in plan.notes),
            "",
        ]
    )


def _summary(run: TrainedRun) -> str:
    tasks = plural(len(run.tasks), "task")
    lines = [
        f"{run.path}: {tasks} trained" if run.trained else f"{run.path}/ is complete: {tasks}; nothing was trained"
    ]
    rows = [["accuracy in % on its own task", "after it", *(["among all classes", "at the end"] if run.matrix else [])]]
    for t, (name, result) in enumerate(zip(run.tasks, run.results, strict=True)):
        if result.accuracy is not None:
            shown = [result.accuracy, *([run.matrix.rows[t][t], run.matrix.rows[-1][t]] if run.matrix else [])]
            rows.append([name, *(f"{100 * value:.1f}" for value in shown)])
    lines += table(rows) if len(rows) > 1 else []
    for metric in () if run.matrix is None else run.matrix.metrics():
        if metric.value is not None:
            lines.append(f"  {metric.title} {100 * metric.value:.1f}: {metric.definition}")
    return "\n".join([*lines, f"next: tmx tailor {run.path} --inputs DATA -o site-model/", ""])


def _record(run: TrainedRun) -> dict[str, Any]:
    results = zip(run.tasks, run.results, strict=True)
    return {
        "out": str(run.path),
        "trained": run.trained,
        "tasks": [{"name": name, **asdict(result)} for name, result in results],
        "matrix": None if run.matrix is None else run.matrix.to_dict(),
    }
