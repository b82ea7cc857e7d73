"""The options of each command; those of merge are in workflows/merge.py.

They stand apart from their workflows, because `tmx --help` reads them and must import next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from cyclopts import Group, Parameter

from tunable_magmax.errors import InputError, closest
from tunable_magmax.workflows.options import (
    NO_OPTION,
    SIGNED,
    Checkpoints,
    Embedding,
    FileOrValue,
    Method,
    Numbers,
    Out,
    Output,
    Reading,
    Weighting,
)

PreferMethod: TypeAlias = Literal["auto", "label", "probe", "ot", "cosine", "mmd", "search"]
SAMPLES = ("inputs", "labels", "labelled")
SUMMARY = "sweep.json"
"""The file in a sweep's output that sums it up."""


@Parameter(name="*", group=Group("What is known of the site", sort_key=1))
@dataclass(frozen=True)
class SiteSources:
    """What is known of a site: samples, in files or in memory (a list, a column, a data set), or a person's word."""

    inputs: FileOrValue = None
    """Inputs of the site: an image folder, texts (.txt, .csv, .jsonl) or parquet."""
    labels: FileOrValue = None
    """Labels of the site: .txt (one per line), .csv, .jsonl or labelled data. Class names or indices, or task names,
    each of which counts for its task."""
    labelled: FileOrValue = None
    """Inputs of the site with labels: class folders of images, a table, or parquet."""
    weights: Numbers = None
    """How much each task matters, as 3,1,0 or by name as travel=7,bank=3, where other tasks weigh 0."""
    alpha: Annotated[float | None, SIGNED] = None
    """Follow the paper's schedule: above 1 favours early tasks, below 1 late ones."""
    equal: bool = False
    """Give every task the same weight."""

    def __post_init__(self) -> None:
        values = {name: value for name in SAMPLES if not isinstance(value := getattr(self, name), Path | None)}
        if values:
            from tunable_magmax.data import memory
            from tunable_magmax.data.samples import Samples

            for name, value in values.items():
                if not isinstance(value, Samples):
                    object.__setattr__(self, name, getattr(memory, f"as_{name}")(value))
        if isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", {name: _number(w) for name, w in self.weights.items()})
        elif self.weights is not None:
            object.__setattr__(self, "weights", tuple(map(_number, self.weights)))

    def named(self) -> dict[str, Any]:
        """Returns what was given, by name.

        >>> SiteSources(weights=["1/2", "2"], equal=False).named()
        {'weights': (0.5, 2.0)}
        """
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}

    @property
    def samples(self) -> list[str]:
        """The names of the samples that were given."""
        return [name for name in self.named() if name in SAMPLES]


def _number(value: Any) -> Any:
    return float(Fraction(value)) if isinstance(value, str) else value


@Parameter(name="*")
@dataclass(frozen=True)
class PreferOptions:
    """The options of `tmx prefer`."""

    out: Out = None
    """Write the preference to this file (JSON), for tmx merge --preference."""
    plot: Path | None = None
    """Draw weights and intervals into this file: .png, .svg or .pdf."""
    sources: SiteSources = SiteSources()
    method: PreferMethod = "auto"
    """auto is one posterior from labels, inputs or both; label and probe are the same from one of them; ot, cosine and
    mmd are the paper's estimators from inputs; search tries merges on labelled samples."""
    raw: Annotated[bool, NO_OPTION] = False
    """For ot: compare embeddings as they are, as the paper does. By default they are normalised."""
    prior: float | Literal["auto", "none"] = "auto"
    """The site prior for the head: auto, none, or a number, the share that is spread evenly over all classes."""
    trials: int = 100
    """For search: the largest number of merges. It stops after 10 without a better one."""
    seed: Annotated[int, SIGNED] = 0
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


@Parameter(name="*")
@dataclass(frozen=True)
class TailorOptions:
    """The options of `tmx tailor`."""

    out: Out = None
    """A directory for the model and all that the site needs."""
    sources: SiteSources = SiteSources()
    preference: FileOrValue = None
    """Use this preference in place of samples; inputs and labelled ones may be added, to fit and choose by."""
    method: str = "auto"
    """Merge by this method: tunable_magmax, tsv, average, magmax, ...; auto tries several."""
    scale: Annotated[float | Literal["matched"] | None, SIGNED] = None
    """Scale the merged step by this number, or matched. Default: the preference's, or the best of those tried."""
    head: Literal["auto", "fitted", "old"] = "auto"
    """The classifier: fitted to the merged encoder, the old one, or the better of the two."""
    estimator: Annotated[PreferMethod, NO_OPTION] = "auto"
    """How weights are estimated from samples, as the method of tmx prefer."""
    seed: int = 0
    """The seed of everything that is drawn: folds, and the keys of the merge."""
    reading: Reading = Reading()
    output: Output = Output()
    dry_run: bool = False
    """Read headers only, check everything, and say what would be done."""

    def __post_init__(self) -> None:
        if self.head not in ("auto", "fitted", "old"):
            raise InputError(f"head is {self.head!r}, expected auto, fitted or old")
        if isinstance(self.scale, float | int) and self.scale < 0:
            raise InputError(f"scale is {self.scale}, a step away from what the tasks learned: give 0 or more")

    @property
    def preferring(self) -> PreferOptions:
        """How the weights are estimated."""
        return PreferOptions(method=self.estimator, seed=self.seed)


@Parameter(name="*")
@dataclass(frozen=True)
class CompareOptions:
    """The options of `tmx compare`."""

    preference: FileOrValue = None
    """A model that tmx tailor made, or the site's preference, as tmx prefer writes it. Default: all tasks alike."""
    data: FileOrValue = None
    """Labelled samples of the site: class folders of images, a table, parquet, or a benchmark's YAML. Default: the
    run's test data."""
    old_heads: bool = False
    """Also measure every model with the head that it had before fitting."""
    seed: int = 0
    """The seed of the merges."""
    plot: Path | None = None
    """Draw the table into this file: .png, .svg or .pdf."""
    reading: Reading = Reading()


@Parameter(name="*")
@dataclass(frozen=True)
class EvalOptions:
    """The options of `tmx eval`. Options of a merge say that a merge is meant; it is made in memory."""

    checkpoint: Sequence[str] = ()
    """Of a run: a task's name, base, last or all; repeatable. Default: all, with the matrix and its metrics."""
    data: FileOrValue = None
    """Labelled data: class folders of images, a table, parquet or a benchmark's YAML. Default: the run's test data."""
    head: Path | None = None
    """The frozen head. Default: the run's, or one beside the model, or of the run it was merged from."""
    run: Path | None = None
    """The run directory that the model comes from: its head, tasks and test data."""
    per_class: bool = False
    """Show the accuracy of each class."""
    weighting: Weighting = Weighting()
    merging: Method = Method()
    reading: Reading = Reading()


@Parameter(name="*")
@dataclass(frozen=True)
class PredictOptions:
    """The options of `tmx predict`."""

    text: Sequence[str] = ()
    """Classify this text; repeatable."""
    out: Out = None
    """Write the labels to this file: .csv or .jsonl."""
    head: Path | None = None
    """The head. Default: the one beside the model, or of the run that the model comes from."""
    top: int = 1
    """Show this many of the likeliest classes."""
    reading: Embedding = Embedding()


@Parameter(name="*")
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


@Parameter(name="*", group=Group("The points", sort_key=0))
@dataclass(frozen=True)
class Route:
    """The points of a sweep: a line between two preferences, or a list of them."""

    start: Annotated[Numbers, Parameter(name="--from")] = None
    """Begin the line with these weights, as 1,0,0 or travel=1."""
    stop: Annotated[Numbers, Parameter(name="--to")] = None
    """End the line with these weights."""
    steps: int = 5
    """Put this many points on the line, both ends included."""
    preference: Sequence[Path] = ()
    """Take a point from this preference file, instead of a line; give one --preference for each point."""


@Parameter(name="*")
@dataclass(frozen=True)
class SweepOptions:
    """The options of `tmx sweep`."""

    out: Out = None
    """A directory; points go into step-00, step-01 and so on (a line), or 00-NAME (preferences)."""
    route: Route = Route()
    merging: Method = Method()
    data: FileOrValue = None
    """Measure each point, with a head fitted to it, on these labelled samples; test stands for the run's test data if
    there is no such file. Needs a RUN_DIR."""
    overwrite: bool = False
    """Replace existing outputs."""


@Parameter(name="*")
@dataclass(frozen=True)
class ConvertOptions:
    """The options of `tmx convert`."""

    out: Out = None
    """Where the result goes: a directory, or one file if it ends in .safetensors."""
    shard_size: str = "5GB"
    """Write no file of an output directory larger than this."""
    strip_prefix: str = ""
    """Take this off the names that begin with it, such as model. where a model with a head meets a bare one."""
    overwrite: bool = False
    """Replace an existing output."""


@Parameter(name="*")
@dataclass(frozen=True)
class PushOptions:
    """The options of `tmx push`."""

    private: bool = False
    """Make the repository private, if it is a new one."""
    dry_run: bool = False
    """Check the directory and list the files; send nothing."""


@Parameter(name="*")
@dataclass(frozen=True)
class InspectOptions:
    """The options of `tmx inspect`."""

    tensors: bool = False
    """List all tensors, in file order, not only the largest."""
    verify: bool = False
    """Check that a merge is what its report says; with --base and --task merge again and compare every byte."""
    checkpoints: Checkpoints = Checkpoints()
