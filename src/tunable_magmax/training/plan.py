"""What a configuration would train: tasks, samples, steps and bytes, from data headers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.data.benchmark import open_benchmark
from tunable_magmax.errors import InputError
from tunable_magmax.models.pretrained import fetch_note
from tunable_magmax.training.config import GLYPHS, TrainConfig, task_steps, warmup_steps


@dataclass(frozen=True)
class PlannedTask:
    """One task: how many classes, training samples, test samples and steps."""

    name: str
    classes: int
    samples: int
    test: int
    steps: int


@dataclass(frozen=True)
class TrainingPlan:
    """What would be trained. `bytes`: of all checkpoints, where the model's size is known."""

    model: str
    benchmark: str
    tasks: tuple[PlannedTask, ...]
    bytes: int | None
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return asdict(self)


def plan_training(config: TrainConfig) -> TrainingPlan:
    """Plans a training run without reading inputs or weights."""
    benchmark = open_benchmark(config.benchmark)
    options = config.train
    tasks = tuple(
        PlannedTask(
            task.name,
            len(task.classes),
            len(task.train),
            len(task.test),
            task_steps(len(task.train), options.epochs, options.batch),
        )
        for task in benchmark.tasks
    )
    notes = []
    short = [task for task in tasks if warmup_steps(options.warmup, task.steps) >= task.steps]
    if short:
        notes.append(
            f"the warm-up of {options.warmup:g} steps is not over at the end of {len(short)} of {len(tasks)} tasks; "
            "train.warmup below 1 is a share of the steps"
        )
    if len({task.classes for task in tasks}) > 1:
        notes.append("tasks differ in their number of classes: " + ", ".join(str(task.classes) for task in tasks))
    place = config.root / Path(config.model).expanduser()
    if config.model != GLYPHS and not place.exists():
        missing = f"the model {place} does not exist: training would stop at once; give a directory, or a hub name"
        notes.append(fetch_note(config.model, config.root) or missing)
    model = place.name if Path(config.model).is_absolute() else config.model
    return TrainingPlan(model, benchmark.name, tasks, _bytes(config, len(tasks)), tuple(notes))


def _bytes(config: TrainConfig, tasks: int) -> int | None:
    """Returns the size of base and tasks in float32, from the header of the model's file; None if it is not here."""
    from tunable_magmax.checkpoints.source import open_checkpoint
    from tunable_magmax.models.tower import IMAGE_SIDE

    if config.model == GLYPHS or not (config.root / config.model).exists():
        return None
    try:
        with open_checkpoint(config.root / config.model) as checkpoint:
            kept = checkpoint.tensors
            if config.text_tower == "drop" and any(name.startswith("text_model.") for name in kept):
                kept = {name: info for name, info in kept.items() if name.startswith(IMAGE_SIDE)}
            elements = sum(info.numel for info in kept.values())
    except InputError:
        return None
    return 4 * elements * (tasks + 1)
