"""Options that `tmx merge`, `plan`, `sweep` and `eval` share, and what they make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tunable_magmax.cli.terminal import warn
from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.runs.recipe import Recipe

Loose = Annotated[str, Parameter(show=False)]
"""Takes words that belong to no option, so that the command can say what was probably meant."""
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], help="Print no progress bars and no summary.")]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON on stdout.")]


@Parameter(name="*", group="What is merged, and how")
@dataclass(frozen=True)
class Merging:
    """Which checkpoints are merged and how, without weights."""

    base: Annotated[
        Path | None,
        Parameter(help="Merge into this pre-trained checkpoint: a file, a directory or a hub name, org/name@revision."),
    ] = None
    task: Annotated[
        list[str] | None,
        Parameter(
            help="Merge this task checkpoint or LoRA adapter, as PATH or NAME=PATH; give one --task for each, in "
            "training order."
        ),
    ] = None
    method: Annotated[
        str | None,
        Parameter(
            help="Merge by this method: tunable_magmax (default), magmax, average, ties, ... "
            "An unknown name is answered with the list.",
            show_default=False,
        ),
    ] = None
    scale: Annotated[
        str | None,
        Parameter(
            help="Multiply the merged vector by this number, the paper's lambda; matched makes it as long as the last "
            "task vector. Default: matched, 1 for tsv.",
            allow_leading_hyphen=True,
        ),
    ] = None
    scope: Annotated[
        Literal["model", "tensor"] | None,
        Parameter(help="Share the budget over the whole model or inside each tensor."),
    ] = None
    compare: Annotated[
        Literal["all", "active"] | None,
        Parameter(help="Compare magnitudes with all earlier tasks, or with those that have a budget."),
    ] = None
    density: Annotated[
        str | None,
        Parameter(
            help="Keep this share of each task vector with ties, or one share for each task, as 0.2,0.5. Default: 0.2.",
            allow_leading_hyphen=True,
        ),
    ] = None
    seed: Annotated[
        int | None, Parameter(help="Use this seed for the lottery; one seed gives one result. Default: 0.")
    ] = None
    dtype: Annotated[
        str | None, Parameter(help="Write the output as float64, float32, float16 or bfloat16. Default: as the inputs.")
    ] = None
    include: Annotated[
        list[str] | None, Parameter(help="Merge only tensors whose names match this pattern; repeatable.")
    ] = None
    exclude: Annotated[
        list[str] | None, Parameter(help="Copy tensors whose names match this pattern from the base; repeatable.")
    ] = None


@Parameter(name="*", group="What is merged, and how")
@dataclass(frozen=True)
class What(Merging):
    """Which checkpoints are merged and how, with weights in one of three ways."""

    weights: Annotated[
        str | None,
        Parameter(
            help="Say how much each task matters, as 3,1,0 or by name as travel=7,bank=3, where tasks that are not "
            "named weigh 0. Default: equal.",
            allow_leading_hyphen=True,
        ),
    ] = None
    budget: Annotated[
        str | None,
        Parameter(
            help="Say how many elements each task gives, instead of weights; by name, too.", allow_leading_hyphen=True
        ),
    ] = None
    preference: Annotated[Path | None, Parameter(help="Take the weights from this preference file.")] = None


@Parameter(name="*", group="Output and resources")
@dataclass(frozen=True)
class How:
    """How the output is written and what the merge may use."""

    memory: Annotated[str | None, Parameter(help="Use at most this much working memory, such as 256MiB or 4GiB.")] = (
        "1GiB"
    )
    shard_size: Annotated[str, Parameter(help="Write no file of an output directory larger than this.")] = "5GB"
    threads: Annotated[int | None, Parameter(help="Use this many threads. Default: all cores.")] = None
    overwrite: Annotated[bool, Parameter(help="Replace an existing output.")] = False


WHAT, HOW = What(), How()
"""No option was given."""


def read_what(source: Path | None, what: What) -> Recipe:
    """Returns what to merge: options on top of a run directory or a YAML, or of the checkpoints named."""
    from tunable_magmax.workflows.merge import recipe_of
    from tunable_magmax.workflows.options import Checkpoints, Weighting
    from tunable_magmax.workflows.options import Merging as Options

    weights, budget = (numbers(getattr(what, name), f"--{name}") for name in ("weights", "budget"))
    scale: Any = what.scale if what.scale in (None, "matched") else float(str(what.scale))
    density: Any = None if what.density is None else float(what.density)
    dtype: Any = what.dtype
    return recipe_of(
        source,
        Checkpoints(what.base, what.task or ()),
        Weighting(weights, budget, what.preference),
        Options(
            what.method,
            scale,
            what.scope,
            what.compare,
            density,
            what.seed,
            dtype,
            what.include or (),
            what.exclude or (),
        ),
        warn,
    )


def settings_of(how: How) -> dict[str, Any]:
    """Returns the arguments of `merge_checkpoints` that the options are."""
    return asdict(how)


def numbers(text: str | None, option: str) -> list[str] | dict[str, str] | None:
    """Splits numbers with commas between them, one for each task or by name; they stay text, which is exact.

    >>> numbers("3,1,0", "--weights"), numbers("travel=7, bank=1/3", "--weights")
    (['3', '1', '0'], {'travel': '7', 'bank': '1/3'})
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if all(map(is_number, parts)):
        return parts
    pairs = [(name.strip(), value.strip()) for name, _, value in (part.rpartition("=") for part in parts)]
    if not all(name and is_number(value) for name, value in pairs):
        raise InputError(
            f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0 or travel=7,bank=3"
        )
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise InputError(f"{option} is {text!r}, which names a task twice")
    return by_name


def refuse_loose(
    command: str, loose: Sequence[str], lists: Mapping[str, str | None], source: Path | None, hint: str = ""
) -> None:
    """Refuses words that belong to no option. Numbers among them are those of a list that was written with spaces.

    `lists` are the options that take numbers with commas, and their values. The first number after a list written with
    spaces may have become the `source`.
    """
    astray = [] if source is None or source.exists() else [str(source)]
    words = [word for word in (*astray, *loose) if all(map(is_number, word.strip(",").split(",")))]
    options = [option for option, value in lists.items() if value is not None]
    if options and words:
        raise InputError(
            f"{' '.join(words)} belongs to no option: numbers of {' and '.join(options)} have commas between them "
            f"and no spaces, as {options[0]} 3,1,0"
        )
    if loose:
        raise InputError(f"{', '.join(map(repr, loose))} belongs to no option{hint}. See tmx {command} --help.")


def is_number(word: str) -> bool:
    """Returns whether a word is a number or a fraction.

    >>> is_number("1/3"), is_number("3 1")
    (True, False)
    """
    try:
        [float(part) for part in word.split("/")]
    except ValueError:
        return False
    return True
