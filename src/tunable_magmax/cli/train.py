"""`tmx train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import show_result, table, working
from tunable_magmax.errors import plural

if TYPE_CHECKING:
    from tunable_magmax.training.sequence import TrainedRun


@dataclass(frozen=True)
class TrainOptions:
    """The options of `tmx train`."""

    out: Path | None = None
    """Write the run directory here. Default: beside the file, with its name."""
    changes: Sequence[str] = ()
    """Replace a value of the file, as train.lr=3e-5; repeatable. A path that is here counts from here."""
    device: str | None = None
    """Train on this device. Default: the GPU if there is one."""
    dry_run: bool = False
    """Only say what would be trained: tasks, samples, steps."""


def train(config: Path, /, *, options: TrainOptions = parsed(TrainOptions)) -> None:
    """Train a model on a sequence of tasks, with a checkpoint and a profile for each.

    tmx train run.yaml -o run/
    tmx train run.yaml -o run/ --set train.lr=3e-5 --set seed=4

    Started again, it goes on after the last finished task.

    Parameters
    ----------
    config
        What to train, on what, and how: a YAML file (docs/training.md).
    """
    from tunable_magmax.training.config import read_config

    chosen, place = read_config(config, options.changes), options.out or config.with_suffix("")
    if options.dry_run:
        from tunable_magmax.data.benchmark import open_benchmark

        plan = [
            {
                "name": task.name,
                "classes": len(task.classes),
                "samples": len(task.train),
                "test": len(task.test),
                "steps": chosen.train.task_steps(len(task.train)),
            }
            for task in open_benchmark(chosen.benchmark).tasks
        ]
        show_result({"out": str(place), "tasks": plan}, _planned(plan, place))
        return
    from tunable_magmax.training.sequence import train_sequence

    with working() as progress:
        run = train_sequence(chosen, place, device=options.device, progress=progress)
    tasks = [{"name": name, **asdict(result)} for name, result in zip(run.tasks, run.results, strict=True)]
    show_result({"out": str(run.path), "trained": run.trained, "tasks": tasks}, _summary(run))


def _planned(tasks: Sequence[dict[str, Any]], place: Path) -> Iterator[str]:
    yield f"{place}: {plural(len(tasks), 'task')}, {plural(sum(task['steps'] for task in tasks), 'step')} in all"
    rows = [[name, *(f"{count:,}" for count in counts)] for name, *counts in (task.values() for task in tasks)]
    yield from table(rows, ["task", "classes", "samples", "test", "steps"])


def _summary(run: TrainedRun) -> Iterator[str]:
    tasks = plural(len(run.tasks), "task")
    yield f"{run.path}: {tasks} trained" if run.trained else f"{run.path}/ is complete: {tasks}; nothing was trained"
    rows = [[name, f"{each.steps:,}", f"{each.loss:.3f}"] for name, each in zip(run.tasks, run.results, strict=True)]
    yield from table(rows, ["task", "steps", "last loss"])
    yield f"accuracy on every task after every task: tmx eval {run.path}"
    yield f"next: tmx tailor {run.path} --inputs DATA -o site-model/"
