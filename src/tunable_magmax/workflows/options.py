"""The options of all commands, each declared once.

Those of a command are one frozen dataclass: plain fields with a default and a docstring below, and groups of options
that several commands share as nested fields. The command line, the methods of `Run` in Python and the records are made
from these classes. Where a field takes anything, cli/app.py says what the command line takes. The module imports
next to nothing, because `tmx --help` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from tunable_magmax.engines.settings import Output as Output
from tunable_magmax.engines.settings import Place as Place
from tunable_magmax.errors import InputError, closest, some_of
from tunable_magmax.merging.options import MethodOptions, Options, WeightedOptions
from tunable_magmax.preference.sources import SAMPLES as SAMPLES
from tunable_magmax.preference.sources import Embedding as Embedding
from tunable_magmax.preference.sources import Reading as Reading
from tunable_magmax.preference.sources import SiteSources as SiteSources

Kind = TypeVar("Kind")
PreferMethod: TypeAlias = Literal["auto", "label", "probe", "ot", "cosine", "mmd", "search"]
SUMMARY = "sweep.json"
"""The file in a sweep's output that sums it up."""


# -- groups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a merge, where no run directory and no YAML names them."""

    base: Path | None = None
    """The pre-trained checkpoint: a file, a directory or a hub name, org/name@revision."""
    task: Sequence[str] = ()
    """A task checkpoint or LoRA adapter, as PATH or NAME=PATH; give one --task for each, in training order."""


# -- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeOptions:
    """The options of `tmx merge`."""

    out: Path | None = None
    """Where the result goes: a directory, or one file if it ends in .safetensors."""
    checkpoints: Checkpoints = Checkpoints()
    preference: Any = None
    """Take the weights from this preference, as tmx prefer writes it."""
    merging: Options = Options()
    output: Output = Output()
    place: Place = Place()
    dry_run: bool = False
    """Read headers only, check everything, and say what would be done."""


@dataclass(frozen=True)
class PreferOptions:
    """The options of `tmx prefer`."""

    out: Path | None = None
    """Write the preference to this file (JSON), for tmx merge --preference."""
    sources: SiteSources = SiteSources()
    method: PreferMethod = "auto"
    """auto is one posterior from labels, inputs or both; label and probe are the same from one of them; ot, cosine and
    mmd are the paper's estimators from inputs; search tries merges on labelled samples."""
    raw: bool = False
    """For ot: compare embeddings as they are, as the paper does. By default they are normalised."""
    trials: int = 100
    """For search: the largest number of merges. It stops after 10 without a better one."""
    seed: int = 0
    """The seed of the posterior, of the draw from many inputs, and of a search."""
    reading: Reading = Reading()

    def __post_init__(self) -> None:
        if self.method not in (known := get_args(PreferMethod)):
            raise InputError(
                f"no estimator is called {self.method!r}{closest(str(self.method), known)}; known: {', '.join(known)}"
            )
        if self.seed < 0 or self.trials < 1:
            raise InputError(f"seed must be 0 or more, and trials 1 or more, not {self.seed} and {self.trials}")
        if self.raw and self.method != "ot":
            raise InputError(f"raw is for method ot, not {self.method}")


@dataclass(frozen=True)
class TailorOptions:
    """The options of `tmx tailor`."""

    out: Path | None = None
    """A directory for the model and all that the site needs."""
    sources: SiteSources = SiteSources()
    preference: Any = None
    """Use this preference in place of samples; inputs and labelled ones may be added, to fit and choose by."""
    method: str = "auto"
    """Merge by this method: tunable_magmax, tsv, average, magmax, ...; auto tries several."""
    scale: float | Literal["matched"] | None = None
    """Scale the merged step by this number, or matched. Default: the preference's, or the best of those tried."""
    head: Literal["auto", "fitted", "old"] = "auto"
    """The classifier: fitted to the merged encoder, the old one, or the better of the two."""
    seed: int = 0
    """The seed of everything that is drawn: folds, and the keys of the merge."""
    reading: Reading = Reading()
    output: Output = Output()

    def __post_init__(self) -> None:
        if self.head not in ("auto", "fitted", "old"):
            raise InputError(f"head is {self.head!r}, expected auto, fitted or old")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}, expected 0 or more")
        if isinstance(self.scale, float | int) and self.scale < 0:
            raise InputError(f"scale is {self.scale}, a step away from what the tasks learned: give 0 or more")


@dataclass(frozen=True)
class CompareOptions:
    """The options of `tmx compare`."""

    preference: Any = None
    """A model that tmx tailor made, or the site's preference, as tmx prefer writes it. Default: all tasks alike."""
    data: Any = None
    """Labelled samples of the site: class folders of images, a table, parquet, or a benchmark's YAML. Default: the
    run's test data."""
    seed: int = 0
    """The seed of the merges."""
    reading: Reading = Reading()


@dataclass(frozen=True)
class EvalOptions:
    """The options of `tmx eval`. Options of a merge say that a merge is meant; it is made in memory."""

    checkpoint: Sequence[str] = ()
    """Of a run: a task's name, base, last or all; repeatable. Default: all, with the matrix and its metrics."""
    data: Any = None
    """Labelled data: class folders of images, a table, parquet or a benchmark's YAML. Default: the run's test data."""
    head: Path | None = None
    """The frozen head. Default: the run's, or one beside the model, or of the run it was merged from."""
    run: Path | None = None
    """The run directory that the model comes from: its head, tasks and test data."""
    per_class: bool = False
    """Show the accuracy of each class."""
    preference: Any = None
    """Take the weights from this preference, as tmx prefer writes it."""
    merging: WeightedOptions = WeightedOptions()
    reading: Reading = Reading()


@dataclass(frozen=True)
class PredictOptions:
    """The options of `tmx predict`."""

    text: Sequence[str] = ()
    """Classify this text; repeatable."""
    out: Path | None = None
    """Write the labels to this file: .csv or .jsonl."""
    head: Path | None = None
    """The head. Default: the one beside the model, or of the run that the model comes from."""
    top: int = 1
    """Show this many of the likeliest classes."""
    reading: Embedding = Embedding()


@dataclass(frozen=True)
class InitOptions:
    """The options of `tmx init`."""

    base: Path | None = None
    """The pre-trained checkpoint that training began with."""
    task: Sequence[str] = ()
    """A task's checkpoint or LoRA adapter, as NAME=DIR; give one --task for each, in training order. Without NAME= the
    folder's name is the task's. In the folder of a training, the model saved at its end is taken, else the newest
    checkpoint-N."""
    data: Sequence[str] = ()
    """The data of a task, as NAME=DATA: class folders of images, a .csv or .jsonl of text and label, or parquet. The
    run gets a profile (label counts, class names, embeddings), and keeps some samples."""
    eval_data: Sequence[str] = ()
    """The same, of samples that were not trained on: these are kept then. What they say of a model is not too good."""
    head: str | None = None
    """A frozen head over all classes: a head file, class names as cat,dog or a .txt of them, or labelled samples, whose
    class means are the head."""
    keep: int | None = None
    """Samples of each class that the run keeps as files (texts in a CSV, pictures in folders); 0 for none. Default: 20.
    They never leave the run."""
    reading: Reading = Reading()
    overwrite: bool = False
    """Replace the run.json that is there."""
    dry_run: bool = False
    """Read headers and labels only, check everything, and say what would be done."""


@dataclass(frozen=True)
class SweepOptions:
    """The options of `tmx sweep`."""

    out: Path | None = None
    """A directory; points go into step-00, step-01 and so on (a line), or 00-NAME (preferences)."""
    start: Any = None
    """Begin the line with these weights, as 1,0,0 or travel=1."""
    stop: Any = None
    """End the line with these weights."""
    steps: int = 5
    """Put this many points on the line, both ends included."""
    preference: Sequence[Path] = ()
    """Take a point from this preference file, instead of a line; give one --preference for each point."""
    merging: MethodOptions = MethodOptions()
    data: Any = None
    """Measure each point, with a head fitted to it, on these labelled samples; a run's config.yaml stands for its test
    data. Needs a RUN_DIR."""
    overwrite: bool = False
    """Replace existing outputs."""


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `tmx convert`."""

    out: Path | None = None
    """Where the result goes: a directory, or one file if it ends in .safetensors."""
    shard_size: str = "5GB"
    """Write no file of an output directory larger than this."""
    strip_prefix: str = ""
    """Take this off the names that begin with it, such as model. where a model with a head meets a bare one."""
    overwrite: bool = False
    """Replace an existing output."""


@dataclass(frozen=True)
class PushOptions:
    """The options of `tmx push`."""

    private: bool = False
    """Make the repository private, if it is a new one."""
    dry_run: bool = False
    """Check the directory and list the files; send nothing."""


@dataclass(frozen=True)
class InspectOptions:
    """The options of `tmx inspect`."""

    tensors: bool = False
    """List all tensors, in file order, not only the largest."""
    verify: bool = False
    """Check that a merge is what its report says; with --base and --task merge again and compare every byte."""
    method: str | None = None
    """For --verify of a merge by a method in a file: FILE.py:Name as the report has it, which runs the file."""
    checkpoints: Checkpoints = Checkpoints()


# -- groups as one flat set of names ----------------------------------------------------------------------------------


def flat(options: Any) -> dict[str, Any]:
    """Returns all options by name, those of nested groups beside the others.

    >>> flat(Output(threads=2))
    {'memory': '1GiB', 'threads': 2, 'shard_size': '5GB', 'overwrite': False}
    """
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        found |= flat(value) if is_dataclass(field.default) else {field.name: value}
    return found


def from_flat(kind: type[Kind], **values: Any) -> Kind:
    """Makes options of keywords, sorting them into their groups: this is how methods in Python take them.

    A group may be given as a whole, too.

    >>> from_flat(Output, threads=2)
    Output(memory='1GiB', threads=2, shard_size='5GB', overwrite=False)
    """
    made = _taken(kind, values)
    if values:
        known = list(flat(kind()))
        name = next(iter(values))
        raise TypeError(f"there is no option {name!r}{closest(name, known)}; known: {some_of(known, len(known))}")
    return made


def _taken(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """Makes options of the values that belong to them, and removes these."""
    made: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            made[field.name] = values.pop(field.name)
        elif is_dataclass(field.default):
            made[field.name] = _taken(type(field.default), values)
    return kind(**made)
