"""run.yaml: what to train, on what, and how. Every problem of a file is told at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tunable_magmax.config import (
    Reader,
    flag,
    one_of,
    or_none,
    path_here,
    read_section,
    read_value,
    read_yaml,
    real,
    set_value,
    templates,
    text,
    texts,
    unknown_keys,
    whole,
)
from tunable_magmax.data.benchmark import BenchmarkOptions
from tunable_magmax.errors import InputError

GLYPHS = "glyphs"
HeadSource: TypeAlias = Literal["auto", "text", "names", "file", "means", "glyphs"]
Augmentation: TypeAlias = Literal["none", "crop", "flip", "crop+flip", "resized-crop"]
Schedule: TypeAlias = Literal["cosine", "constant"]
SECTIONS = ("model", "benchmark", "head", "train", "regularise", "profile", "matrix", "text_tower", "seed")


@dataclass(frozen=True)
class HeadOptions:
    """Where the frozen head comes from.

    `text`: the model's own text tower; `names`: class names by the sentence encoder itself; `file`: a head file;
    `means`: class means of the base encoder on training data; `glyphs`: clean renderings; `auto`: the first that fits.
    """

    source: HeadSource = "auto"
    file: str | None = None
    templates: str | tuple[str, ...] | None = None
    logit_scale: float | None = None


@dataclass(frozen=True)
class Optimisation:
    """How one task is trained; the defaults are the paper's. `warmup`: steps, or below 1 a share of the task's."""

    epochs: int = 10
    batch: int = 128
    lr: float = 1e-5
    weight_decay: float = 0.1
    warmup: float = 500
    schedule: Schedule = "cosine"
    clip: float | None = 1.0
    label_smoothing: float = 0.0
    freeze: tuple[str, ...] = ()
    augment: Augmentation = "none"
    pad: int = 2
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False
    log_every: int = 25


@dataclass(frozen=True)
class Regularisation:
    """A pull towards what earlier tasks taught. `none`, `ewc` (online EWC) or `lwf` (learning without forgetting).

    `strength` is the factor of the extra loss. `samples` and `decay`: of EWC's Fisher information; `temperature`: of
    LwF's distillation.
    """

    method: Literal["none", "ewc", "lwf"] = "none"
    strength: float = 1.0
    samples: int = 256
    decay: float = 1.0
    temperature: float = 2.0


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
    def read(cls, given: Any, root: Path = Path(), where: str = "the configuration") -> TrainConfig:
        """From a mapping as run.yaml holds it; all problems in one error."""
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: expected a mapping with the keys {', '.join(SECTIONS)}")
        root = root.absolute()  # the record is read from other directories, as by `tmx eval`
        problems = unknown_keys(given, SECTIONS)
        model = given.get("model")
        if not isinstance(model, str) or not model:
            problems.append(f"'model' is {model!r}: expected a directory, a hub name, or {GLYPHS!r}")
        benchmark = _benchmark(given.get("benchmark"), root, problems)
        sections = {
            name: _section(given.get(name), kind, readers, name, problems)
            for name, (kind, readers) in _SECTIONS.items()
        }
        profile = _section(given.get("profile"), _Profile, {"rows": whole(1)}, "profile", problems)
        rest = {"matrix": (flag, True), "text_tower": (one_of("drop", "keep"), "drop"), "seed": (whole(0), 0)}
        chosen = {
            name: read_value(given.get(name, default), check, name, problems) for name, (check, default) in rest.items()
        }
        problems += _contradictions(sections.get("head"))
        if problems:
            raise InputError(f"{where}:\n" + "\n".join(f"  - {problem}" for problem in problems))
        assert benchmark is not None
        assert isinstance(model, str)
        if model != GLYPHS and (root / model).exists():
            model = str(root / model)
        if sections["head"].file is not None:
            sections["head"] = replace(sections["head"], file=str(root / sections["head"].file))
        return cls(model, benchmark, **sections, profile_rows=profile.rows, **chosen, root=root)

    def record(self) -> dict[str, Any]:
        """The effective configuration, as run.yaml would say it in full."""
        return {
            "model": self.model,
            "benchmark": self.benchmark.record(),
            "head": _plain(asdict(self.head)),
            "train": _plain(asdict(self.train)),
            "regularise": asdict(self.regularise),
            "profile": {"rows": self.profile_rows},
            "matrix": self.matrix,
            "text_tower": self.text_tower,
            "seed": self.seed,
        }


def read_config(path: str | Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Read run.yaml; `changes` such as "train.lr=3e-5" replace single values.

    Relative paths in the file count from its directory, those in `changes` from the current one.
    """
    path = Path(path)
    given = read_yaml(path, "a YAML file that says what to train", f"the keys {', '.join(SECTIONS)}")
    for change in changes:
        set_value(given, change, PATHS)
    return TrainConfig.read(given, path.parent, str(path))


def model_here(value: Any) -> Any:
    """A model as people type it: a path from the current directory, unless it can only be a name."""
    from tunable_magmax.models.hub import is_hub_name

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
"""The keys of run.yaml that say where something is, and how they are read when typed on the command line."""


def warmup_steps(warmup: float, steps: int) -> int:
    """A warm-up in steps: given as such, or, below 1, as a share of the task's steps.

    >>> warmup_steps(500, 200), warmup_steps(0.1, 200)
    (500, 20)
    """
    return int(warmup) if warmup >= 1 else round(warmup * steps)


def task_steps(samples: int, epochs: int, batch: int) -> int:
    """How many steps a task takes: each epoch ends with a smaller batch where samples are left.

    >>> task_steps(10, 3, 4)
    9
    """
    return epochs * -(-samples // batch)


@dataclass(frozen=True)
class _Profile:
    rows: int = 500


def _benchmark(given: Any, root: Path, problems: list[str]) -> BenchmarkOptions | None:
    if not isinstance(given, Mapping):
        problems.append(f"'benchmark' is {given!r}: expected a mapping with at least 'name' and 'tasks'")
        return None
    try:
        return BenchmarkOptions.read(given, root)
    except InputError as error:
        problems.append(str(error))
        return None


def _section(given: Any, kind: Any, readers: Mapping[str, Reader], name: str, problems: list[str]) -> Any:
    return kind(**read_section(given, readers, name, problems))


def _contradictions(head: Any) -> list[str]:
    if not isinstance(head, HeadOptions):
        return []
    if head.source == "file" and head.file is None:
        return ["head.source is 'file', but head.file does not say which"]
    if head.file is not None and head.source not in ("file", "auto"):
        return [f"head.file is given, but head.source is {head.source!r}: leave one of them out"]
    return []


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}


_SECTIONS: dict[str, tuple[Any, dict[str, Reader]]] = {
    "head": (
        HeadOptions,
        {
            "source": one_of("auto", "text", "names", "file", "means", "glyphs"),
            "file": or_none(text),
            "templates": or_none(templates),
            "logit_scale": or_none(real(0, above=True)),
        },
    ),
    "train": (
        Optimisation,
        {
            "epochs": whole(1),
            "batch": whole(1),
            "lr": real(0, above=True),
            "weight_decay": real(0),
            "warmup": real(0),
            "schedule": one_of("cosine", "constant"),
            "clip": or_none(real(0, above=True)),
            "label_smoothing": real(0, 1),
            "freeze": texts,
            "augment": one_of("none", "crop", "flip", "crop+flip", "resized-crop"),
            "pad": whole(1),
            "precision": one_of("auto", "float32", "bfloat16"),
            "compile": flag,
            "log_every": whole(1),
        },
    ),
    "regularise": (
        Regularisation,
        {
            "method": one_of("none", "ewc", "lwf"),
            "strength": real(0),
            "samples": whole(1),
            "decay": real(0),
            "temperature": real(0, above=True),
        },
    ),
}
