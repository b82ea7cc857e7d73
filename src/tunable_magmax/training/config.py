"""run.yaml: what to train, on what, and how, and what it would train. All problems are in one error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from tunable_magmax.checkpoints.hub import place_of
from tunable_magmax.config import (
    STRICT,
    NotNegative,
    Positive,
    PositiveInt,
    Seed,
    Text,
    gather,
    read_yaml,
    refuse,
    set_value,
)
from tunable_magmax.data.data_sets import DataSet, gather_section
from tunable_magmax.runs.kept import KEEP

GLYPHS, BUILTIN = "glyphs", "builtin"
Augmentation: TypeAlias = Literal["none", "crop", "flip", "crop+flip", "resized-crop"]


@dataclass(frozen=True)
class HeadOptions:
    """What the encoder is trained against: one frozen head for all tasks, or a new classifier for each (`builtin`).

    `names`: class names by the model's own text tower, or by the sentence encoder itself; `file`: a head file; `means`:
    class means of the base encoder on training data; `glyphs`: clean renderings; `auto`: the first of file, glyphs,
    names and means that fits.
    """

    __pydantic_config__ = STRICT
    source: Literal["auto", "names", "file", "means", "glyphs", "builtin"] = "auto"
    file: Text | None = None
    templates: Annotated[Text | tuple[Text, ...], Field(description="a text or a list of texts")] | None = None
    logit_scale: Positive | None = None

    def __post_init__(self) -> None:
        if self.source == "file" and self.file is None:
            raise ValueError("head.source is 'file', but head.file does not say which")
        if self.file is not None and self.source not in ("file", "auto"):
            raise ValueError(f"head.file is given, but head.source is {self.source!r}: leave one of them out")
        if self.source == BUILTIN and (self.templates is not None or self.logit_scale is not None):
            raise ValueError("head.source is 'builtin', which takes neither templates nor logit_scale")


@dataclass(frozen=True)
class Optimisation:
    """How one task is trained: AdamW, warm-up and cosine; the defaults are the paper's.

    `warmup`: steps, or below 1 a share of the task's. `steps`: of each task, instead of whole epochs.
    """

    __pydantic_config__ = STRICT
    epochs: PositiveInt = 10
    steps: PositiveInt | None = None
    batch: PositiveInt = 128
    lr: Positive = 1e-5
    weight_decay: NotNegative = 0.1
    warmup: NotNegative = 500
    clip: Positive | None = 1.0
    freeze: tuple[Text, ...] = ()
    augment: Augmentation = "none"
    pad: PositiveInt = 2
    precision: Literal["auto", "float32"] = "auto"

    def task_steps(self, samples: int) -> int:
        """Returns how many steps a task takes; the last batch of an epoch may be smaller.

        >>> Optimisation(epochs=3, batch=4).task_steps(10)
        9
        """
        return self.steps or self.epochs * -(-samples // self.batch)

    def warmup_steps(self, steps: int) -> int:
        """Returns how many of a task's steps are warm-up."""
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * steps)


@dataclass(frozen=True)
class RunFile:
    """run.yaml: what to train, on what, and how.

    `keep`: how many samples of each class are kept in the run, 0 for none.
    """

    __pydantic_config__ = STRICT
    model: Text
    benchmark: dict[str, Any]  # described by data.data_sets
    head: HeadOptions = HeadOptions()
    train: Optimisation = Optimisation()
    keep: Annotated[int, Field(ge=0)] = KEEP
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.head.source == BUILTIN and self.train.freeze:
            raise ValueError("train.freeze is for frozen heads: with head.source 'builtin' all parameters are trained")


@dataclass(frozen=True)
class TrainConfig(RunFile):
    """A checked run.yaml, whose paths are absolute."""

    benchmark: DataSet  # type: ignore[assignment]  # what the mapping describes

    @classmethod
    def read(cls, content: Any, root: Path = Path(), where: str = "the configuration") -> TrainConfig:
        """Reads a mapping as run.yaml holds it, with paths that count from `root`; all problems are in one error.

        Sections may be empty.
        """
        problems: list[str] = []
        read = cls.gather(content, root, problems)
        refuse(problems, where)
        assert read is not None
        return read

    @classmethod
    def gather(cls, content: Any, root: Path, problems: list[str], inside: str = "") -> TrainConfig | None:
        """Does the same, but adds the problems to a list. `inside`: the keys that lead to `content`."""
        root = root.absolute()  # the record is read from other directories, as by `tmx eval`
        sections = {k: v for k, v in content.items() if v is not None} if isinstance(content, Mapping) else content
        file = gather(RunFile, sections, problems, inside)
        benchmark, above = None, f"{inside}." if inside else ""
        if isinstance(sections, Mapping) and isinstance(sections.get("benchmark"), Mapping):
            benchmark = gather_section(sections["benchmark"], root, problems, f"{above}benchmark")
        if file is None or benchmark is None or problems:
            return None
        model = file.model if file.model == GLYPHS else str(place_of(Path(file.model).expanduser(), root))
        head = file.head if file.head.file is None else replace(file.head, file=str(root / file.head.file))
        return cls(**{**vars(file), "model": model, "benchmark": benchmark, "head": head})

    def record(self) -> dict[str, Any]:
        """Returns the effective configuration: a run.yaml with every key."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def read_config(path: str | Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Reads run.yaml; `changes` such as "train.lr=3e-5" replace single values.

    Relative paths in the file count from its directory, those in `changes` from the current one if they are there.
    """
    path = Path(path)
    known = ", ".join(field.name for field in fields(RunFile))
    content = read_yaml(path, "a YAML file that says what to train", f"the keys {known}")
    for change in changes:
        set_value(content, change)
    return TrainConfig.read(content, path.parent, str(path))
