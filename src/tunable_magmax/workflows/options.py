"""Groups of options that several commands share, each declared once.

The options of a command are one frozen dataclass in its workflow, `MergeOptions` in workflows/merge.py: plain fields
with a default and a docstring below, and the groups of this module as nested fields. The command line, the methods of
`Run` in Python and the records are made from these classes; cli/app.py says how. The module imports next to nothing,
because `tmx --help` reads all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter, Token

from tunable_magmax.engines.settings import Output as Output
from tunable_magmax.engines.settings import Place as Place
from tunable_magmax.errors import InputError, closest, some_of

if TYPE_CHECKING:
    from tunable_magmax.data.memory import SampleSource
    from tunable_magmax.data.samples import Samples

Options = TypeVar("Options")


# -- values that need a parser ----------------------------------------------------------------------------------------


def read_numbers(text: str) -> list[str] | dict[str, str]:
    """Splits numbers with commas between them, one for each task or by name; they stay text, which is exact.

    >>> read_numbers("3,1,0"), read_numbers("travel=7, bank=1/3")
    (['3', '1', '0'], {'travel': '7', 'bank': '1/3'})
    """
    parts = [part.strip() for part in text.split(",")]
    if all(map(_is_number, parts)):
        return parts
    pairs = [(name.strip(), value.strip()) for name, _, value in (part.rpartition("=") for part in parts)]
    if not all(name and _is_number(value) for name, value in pairs):
        raise InputError(f"{text!r} should be numbers with commas between them, as 3,1,0 or travel=7,bank=3")
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise InputError(f"{text!r} names a task twice")
    return by_name


def _is_number(word: str) -> bool:
    try:
        return bool([float(part) for part in word.split("/")])
    except ValueError:
        return False


def _numbers(_: Any, tokens: Sequence[Token]) -> list[str] | dict[str, str]:
    return read_numbers(tokens[0].value)


def _path(_: Any, tokens: Sequence[Token]) -> Path:
    return Path(tokens[0].value)


SIGNED = Parameter(allow_leading_hyphen=True)
"""For numbers: a negative one is refused as such, not as an unknown option."""
Numbers = Annotated[
    Any, Parameter(converter=_numbers, n_tokens=1, accepts_keys=False, allow_leading_hyphen=True, metavar="N,N,...")
]
"""Numbers, one for each task or by the task's name; in Python a list or a dict."""
FileOrValue = Annotated[Any, Parameter(converter=_path, n_tokens=1, accepts_keys=False, metavar="PATH")]
"""A file on the command line; in Python also what the file would hold."""
WHAT = Group("What is merged", sort_key=1)
HOW = Group("How it is merged", sort_key=2)
OUTPUT = Group("Output and resources", sort_key=4)
NO_OPTION = Parameter(parse=False)
"""For what a configuration or Python sets, and the command line does not."""
Out = Annotated[Path | None, Parameter(name=["--out", "-o"])]
Changes = Annotated[Sequence[str], Parameter(name="--set", negative=())]
"""Values of a YAML file, as KEY=VALUE."""


# -- groups -----------------------------------------------------------------------------------------------------------


@Parameter(name="*", group=WHAT)
@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a merge, where no run directory and no YAML names them."""

    base: Path | None = None
    """The pre-trained checkpoint: a file, a directory or a hub name, org/name@revision."""
    task: Sequence[str] = ()
    """A task checkpoint or LoRA adapter, as PATH or NAME=PATH; give one --task for each, in training order."""


@Parameter(name="*", group=WHAT)
@dataclass(frozen=True)
class Weighting:
    """How much each task matters, in one of three ways. Default: all alike."""

    weights: Numbers = None
    """How much each task matters, as 3,1,0 or by name as travel=7,bank=3, where other tasks weigh 0. Default: equal."""
    budget: Annotated[Any, NO_OPTION] = None
    """How many elements each task gives, instead of weights."""
    preference: FileOrValue = None
    """Take the weights from this preference, as tmx prefer writes it."""


@Parameter(name="*", group=HOW)
@dataclass(frozen=True)
class Method:
    """The method of a merge; None leaves what a YAML says, or the default."""

    method: str | None = None
    """tunable_magmax (default), magmax, average, ties, tsv, ..., or a class of your own as FILE.py:NAME."""
    scale: Annotated[float | Literal["matched"] | None, SIGNED] = None
    """Multiply the merged vector by this, the paper's lambda; matched: as long as the last task vector. Default:
    the preference's, else matched, 1 for tsv."""
    seed: int | None = None
    """The seed of the lottery; one seed gives one result. Default: 0."""


@Parameter(name="*", group=HOW)
@dataclass(frozen=True)
class Merging(Method):
    """All options of a merge but weights; None leaves what a YAML says, or the default."""

    scope: Literal["model", "tensor"] | None = None
    """Share the budget over the whole model (default) or inside each tensor."""
    compare: Annotated[Literal["all", "active"] | None, NO_OPTION] = None
    """Compare magnitudes with all earlier tasks (default), or with those that have a budget."""
    density: Annotated[float | Sequence[float] | None, NO_OPTION] = None
    """The share of each task vector that ties keeps. Default: 0.2."""
    out_dtype: Annotated[Literal["float64", "float32", "float16", "bfloat16"] | None, Parameter(name="--dtype")] = None
    """The type of the output. Default: as the inputs."""
    include: Sequence[str] | None = None
    """Merge only tensors whose names match this pattern; repeatable."""
    exclude: Sequence[str] | None = None
    """Copy tensors whose names match this pattern from the base; repeatable."""


for _shared in (Output, Place):
    Parameter(name="*", group=OUTPUT)(_shared)


DATA = Group("How data are read", sort_key=3)


@Parameter(name="*", group=DATA)
@dataclass(frozen=True)
class Embedding:
    """How inputs are read and embedded."""

    text_column: str | None = None
    """The column of the texts. Default: text, sentence, query, ..."""
    device: str | None = None
    """The device for encoders. Default: the GPU if there is one."""
    batch: Annotated[int, NO_OPTION] = 64
    """Batch size."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"batch is {self.batch}, expected at least 1")

    def open(self, source: SampleSource) -> Samples:
        """Opens a file, a folder, or samples in memory."""
        from tunable_magmax.data.source import open_samples

        return open_samples(source, text_column=self.text_column)


@Parameter(name="*", group=DATA)
@dataclass(frozen=True)
class Reading(Embedding):
    """How files of samples with labels are read, the same for every command that reads any."""

    split: str | None = None
    """The split to use, of data that have several; of a benchmark train or test, which is the default."""
    label_column: str | None = None
    """The column of the labels. Default: label, class, intent, ..."""
    max_samples: int | None = None
    """Use at most this many samples (a fixed random draw). Default: 500 inputs of a site, else all samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_samples is not None and self.max_samples < 1:
            raise InputError(f"max_samples is {self.max_samples}, expected at least 1")

    def open(self, source: SampleSource) -> Samples:
        """Opens a file, a folder, or samples in memory."""
        from tunable_magmax.data.source import open_samples

        return open_samples(source, self.split, self.text_column, self.label_column)


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


def given(options: Any) -> dict[str, Any]:
    """Returns the options that are not the defaults of their class, by name.

    >>> given(Output(threads=2))
    {'threads': 2}
    """
    usual = flat(type(options)())
    return {name: value for name, value in flat(options).items() if value != usual[name]}


def from_flat(kind: type[Options], **values: Any) -> Options:
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


def _taken(kind: type[Options], values: dict[str, Any]) -> Options:
    """Makes options of the values that belong to them, and removes these."""
    made: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            made[field.name] = values.pop(field.name)
        elif is_dataclass(field.default):
            made[field.name] = _taken(type(field.default), values)
    return kind(**made)
