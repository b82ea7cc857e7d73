"""run.yaml: what to train, on what, and how; and the plan of what it would train. All problems are in one error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.config import (
    STRICT,
    NotNegative,
    Positive,
    PositiveInt,
    Proportion,
    Reader,
    Seed,
    Text,
    Texts,
    gather,
    path_here,
    read_yaml,
    refuse,
    set_value,
)
from tunable_magmax.data.benchmark import BenchmarkOptions, open_benchmark
from tunable_magmax.errors import InputError
from tunable_magmax.models.pretrained import fetch_note, is_hub_name

GLYPHS = "glyphs"
HeadSource: TypeAlias = Literal["auto", "text", "names", "file", "means", "glyphs"]
Augmentation: TypeAlias = Literal["none", "crop", "flip", "crop+flip", "resized-crop"]
Schedule: TypeAlias = Literal["cosine", "constant"]


@dataclass(frozen=True)
class HeadOptions:
    """Where the frozen head comes from.

    `text`: the model's own text tower; `names`: class names by the sentence encoder itself; `file`: a head file;
    `means`: class means of the base encoder on training data; `glyphs`: clean renderings; `auto`: the first that fits.
    """

    __pydantic_config__ = STRICT
    source: HeadSource = "auto"
    file: Text | None = None
    templates: Annotated[Text | tuple[Text, ...], Field(description="a text or a list of texts")] | None = None
    logit_scale: Positive | None = None

    def __post_init__(self) -> None:
        if self.source == "file" and self.file is None:
            raise ValueError("head.source is 'file', but head.file does not say which")
        if self.file is not None and self.source not in ("file", "auto"):
            raise ValueError(f"head.file is given, but head.source is {self.source!r}: leave one of them out")


@dataclass(frozen=True)
class Optimisation:
    """How one task is trained; the defaults are the paper's. `warmup`: steps, or below 1 a share of the task's.

    `steps`: of each task, instead of whole epochs.
    """

    __pydantic_config__ = STRICT
    epochs: PositiveInt = 10
    steps: PositiveInt | None = None
    batch: PositiveInt = 128
    lr: Positive = 1e-5
    weight_decay: NotNegative = 0.1
    warmup: NotNegative = 500
    schedule: Schedule = "cosine"
    clip: Positive | None = 1.0
    label_smoothing: Proportion = 0.0
    freeze: Texts = ()
    augment: Augmentation = "none"
    pad: PositiveInt = 2
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False
    log_every: PositiveInt = 25


@dataclass(frozen=True)
class Regularisation:
    """How forgetting of earlier tasks is reduced: `none`, `ewc` (online EWC) or `lwf` (learning without forgetting).

    `strength` is the factor of the extra loss. `samples` and `decay`: of EWC's Fisher information; `temperature`: of
    LwF's distillation.
    """

    __pydantic_config__ = STRICT
    method: Literal["none", "ewc", "lwf"] = "none"
    strength: NotNegative = 1.0
    samples: PositiveInt = 256
    decay: NotNegative = 1.0
    temperature: Positive = 2.0


@dataclass(frozen=True)
class ProfileSection:
    """How many embeddings the profile of a task keeps."""

    __pydantic_config__ = STRICT
    rows: PositiveInt = 500


@dataclass(frozen=True)
class RunFile:
    """run.yaml: what to train, on what, and how."""

    __pydantic_config__ = STRICT
    model: Text
    benchmark: dict[str, Any]  # described by data.benchmark.section_type
    head: HeadOptions | None = None
    train: Optimisation | None = None
    regularise: Regularisation | None = None
    profile: ProfileSection | None = None
    matrix: bool = True
    text_tower: Literal["drop", "keep"] = "drop"
    seed: Seed = 0


@dataclass(frozen=True)
class TrainConfig:
    """A checked run.yaml. `root`: the directory that its relative paths count from; not part of the record."""

    model: str
    benchmark: BenchmarkOptions
    head: HeadOptions = HeadOptions()
    train: Optimisation = Optimisation()
    regularise: Regularisation = Regularisation()
    profile_rows: int = 500
    matrix: bool = True
    text_tower: Literal["drop", "keep"] = "drop"
    seed: int = 0
    root: Path = Path()

    @classmethod
    def read(cls, content: Any, root: Path = Path(), where: str = "the configuration") -> TrainConfig:
        """Reads a mapping as run.yaml holds it; all problems are in one error."""
        root = root.absolute()  # the record is read from other directories, as by `tmx eval`
        problems: list[str] = []
        file = gather(RunFile, content, problems)
        sections = content if isinstance(content, Mapping) else {}
        benchmark = None
        if isinstance(sections.get("benchmark"), Mapping):
            benchmark = BenchmarkOptions.gather(sections["benchmark"], root, problems, "benchmark")
        refuse(problems, where)
        assert file is not None
        assert benchmark is not None
        head = file.head or HeadOptions()
        local = file.model != GLYPHS and (root / file.model).exists()
        return cls(
            str(root / file.model) if local else file.model,
            benchmark,
            head if head.file is None else replace(head, file=str(root / head.file)),
            file.train or Optimisation(),
            file.regularise or Regularisation(),
            (file.profile or ProfileSection()).rows,
            file.matrix,
            file.text_tower,
            file.seed,
            root,
        )

    def record(self) -> dict[str, Any]:
        """Returns the effective configuration: a run.yaml with every key but `train.steps` where it is not used."""
        train = asdict(self.train)
        if self.train.steps is None:  # runs of version 0.1.0 have no such key, and are continued
            del train["steps"]
        record = {
            "model": self.model,
            "benchmark": self.benchmark.record(),
            "head": asdict(self.head),
            "train": train,
            "regularise": asdict(self.regularise),
            "profile": {"rows": self.profile_rows},
            "matrix": self.matrix,
            "text_tower": self.text_tower,
            "seed": self.seed,
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))  # lists for tuples
        return plain


def read_config(path: str | Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Reads run.yaml; `changes` such as "train.lr=3e-5" replace single values.

    Relative paths in the file count from its directory, those in `changes` from the current one.
    """
    path = Path(path)
    content = read_yaml(
        path, "a YAML file that says what to train", f"the keys {', '.join(field.name for field in fields(RunFile))}"
    )
    for change in changes:
        set_value(content, change, PATHS)
    return TrainConfig.read(content, path.parent, str(path))


def model_here(value: Any) -> Any:
    """Returns a model typed on the command line: a path from the current directory, unless it can only be a name."""
    if not isinstance(value, str) or value == GLYPHS:
        return value
    return value if is_hub_name(value) and not Path(value).exists() else path_here(value)


PATHS: dict[str, Reader] = {
    "model": model_here,
    "benchmark.data": path_here,
    "benchmark.class_names": path_here,
    "benchmark.order.file": path_here,
    "head.file": path_here,
}
"""The keys of run.yaml that hold paths, and how each is read when it is typed on the command line."""


def warmup_steps(warmup: float, steps: int) -> int:
    """Returns the warm-up in steps; below 1 it is a share of the task's steps.

    >>> warmup_steps(500, 200), warmup_steps(0.1, 200)
    (500, 20)
    """
    return int(warmup) if warmup >= 1 else round(warmup * steps)


def task_steps(samples: int, options: Optimisation) -> int:
    """Returns how many steps a task takes; the last batch of an epoch may be smaller.

    >>> task_steps(10, Optimisation(epochs=3, batch=4))
    9
    """
    return options.steps or options.epochs * -(-samples // options.batch)


# -- plan --------------------------------------------------------------------------------------------------------------


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
            task_steps(len(task.train), options),
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
