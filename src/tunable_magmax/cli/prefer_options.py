"""The options of `tmx prefer`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.workflows.prefer import Estimation
    from tunable_magmax.workflows.target import TargetSources


SIGNED = Parameter(allow_leading_hyphen=True)  # so that a negative number is refused as one, not as an unknown option


@Parameter(name="*", group=Group("What is known of the target (one source or several)", sort_key=1))
@dataclass(frozen=True)
class SourceOptions:
    """The options that say what is known of the target."""

    weights: Annotated[str | None, SIGNED] = None
    """How much each task matters, for example 3,1,0."""
    alpha: Annotated[float | None, SIGNED] = None
    """Follow the paper's schedule: above 1 favours early tasks, below 1 late ones."""
    equal: bool = False
    """Give every task the same weight."""
    labels: Path | None = None
    """Labels of the target, names or indices: .txt (one per line), .csv, .jsonl, .npy or labelled data."""
    inputs: Path | None = None
    """Inputs of the target: an image folder, texts (.txt, .csv, .jsonl), parquet or features (.npy, .safetensors)."""
    predictions: Path | None = None
    """The classes that the fixed classifier predicted for the target, in a file like that of --labels."""
    pairs: Path | None = None
    """Inputs of the target with labels: class folders of images, a table, or parquet. auto uses only the labels."""
    strengths: str | None = None
    """How much each source counts, in the order of this list. By default it depends on the samples."""


@Parameter(name="*", group=Group("How the weights are estimated", sort_key=2))
@dataclass(frozen=True)
class EstimationOptions:
    """The options of the method."""

    method: Annotated[
        Literal["auto", "label", "probe", "shift", "em", "least_squares", "pseudo", "ot", "cosine", "mmd", "search"],
        Parameter(
            help="auto uses labels if there are any; for inputs, it takes the first of probe, shift and ot that the "
            "profiles allow and whose expected error is small. search tries merges on --pairs."
        ),
    ] = "auto"
    similarity: Literal["inner", "count"] = "inner"
    """Compare labels by the paper's inner product, or by counts."""
    on_zero: Literal["error", "equal"] = "error"
    """What to do if no label belongs to any task."""
    gamma: Annotated[float | None, SIGNED] = None
    """How sharply ot, cosine and mmd prefer near tasks. The defaults are 100, 50 and 100."""
    debias: bool = False
    """For ot: subtract the cost of moving each side onto itself."""
    regularisation: Annotated[float | None, SIGNED] = None
    """For ot: the strength of the entropy term. The default is 0.1."""
    iterations: int | None = None
    """For ot: the largest number of iterations. The default is 100."""
    bandwidth: Literal["pooled", "authors"] | None = None
    """For mmd: one kernel, or the authors' three. The default is pooled."""
    shrink: Annotated[str, SIGNED] = "0"
    """How far to move the weights toward equal ones: from 0 (off) to 1, or auto."""
    seed: int = 0
    """The seed of the intervals, of the draw from many inputs, and of a search."""


@Parameter(name="*", group=Group("Search (--method search)", sort_key=3))
@dataclass(frozen=True)
class SearchOptions:
    """The options of a search."""

    trials: int | None = None
    """The largest number of merges in all. The default is 500."""
    patience: int | None = None
    """Stop after this many trials without a better one. The default is 10."""
    search_scale: str | None = None
    """Search the scale too, for example in 0.5,2. By default every merge has the matched scale."""
    study: Path | None = None
    """Keep the trials in this file, so that the same command continues after an interruption."""


@Parameter(name="*", group=Group("How files are read", sort_key=4))
@dataclass(frozen=True)
class ReadingOptions:
    """The options that say how files are read."""

    classifier: Path | None = None
    """The head of the fixed classifier, also used by a search. The default is the run's head."""
    classifier_checkpoint: Path | None = None
    """The encoder of the fixed classifier. The default is the run's, or else the base."""
    max_samples: int = 500
    """If there are more inputs than this, use a seeded draw of this size."""
    split: str | None = None
    """Which split to use of a data set that has several."""
    text_column: str | None = None
    """The column of the texts. By default text, sentence, query, ..."""
    label_column: str | None = None
    """The column of the labels. By default label, class, intent, ..."""
    device: str | None = None
    """The device for encoders. The default is the GPU if there is one."""


def sources_of(sources: SourceOptions) -> TargetSources:
    """Converts the options to what the workflow takes, with texts read as numbers."""
    from tunable_magmax.workflows.target import TargetSources

    lists = {name: read_numbers(getattr(sources, name), f"--{name}") for name in ("weights", "strengths")}
    return TargetSources(**{**vars(sources), **lists})


def estimation_of(estimating: EstimationOptions, searching: SearchOptions) -> Estimation:
    """Converts the options to what the workflow takes, with texts read as numbers."""
    from tunable_magmax.workflows.prefer import Estimation

    scale = read_numbers(searching.search_scale, "--search-scale")
    if scale is not None and len(scale) != 2:
        raise InputError(f"--search-scale is {searching.search_scale!r}, expected two numbers LOW,HIGH, as 0.5,2")
    options: dict[str, Any] = {**vars(estimating), **vars(searching)}
    return Estimation(**{**options, "shrink": _shrink(estimating.shrink), "search_scale": scale})


def _shrink(text: str) -> Any:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--shrink is {text!r}, expected a number from 0 to 1, or auto") from None


def read_numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Reads numbers with commas between them."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0") from None
