"""The options of `tmx prefer`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.errors import InputError

if TYPE_CHECKING:
    from tunable_magmax.workflows import target as workflow
    from tunable_magmax.workflows.prefer import Estimation


@Parameter(name="*", group=Group("What is known of the target: one or several", sort_key=1))
@dataclass(frozen=True)
class Sources:
    """Where the weights come from."""

    weights: Annotated[
        str | None, Parameter(help="How much each task matters, as 3,1,0.", allow_leading_hyphen=True)
    ] = None
    alpha: Annotated[
        float | None,
        Parameter(
            help="The paper's schedule: above 1 favours early tasks, below 1 late ones.", allow_leading_hyphen=True
        ),
    ] = None
    equal: Annotated[bool, Parameter(help="The same weight for every task.")] = False
    labels: Annotated[
        Path | None, Parameter(help="Labels, names or indices: .txt (one a line), .csv, .jsonl, .npy or labelled data.")
    ] = None
    inputs: Annotated[
        Path | None,
        Parameter(help="A folder of images, texts (.txt, .csv, .jsonl), parquet, or features (.npy, .safetensors)."),
    ] = None
    predictions: Annotated[
        Path | None, Parameter(help="The classes that the fixed classifier predicted for the target, as --labels.")
    ] = None
    pairs: Annotated[
        Path | None,
        Parameter(
            help="Inputs with their labels: class folders of images, or a table or parquet with labels. auto uses the "
            "labels only."
        ),
    ] = None
    strengths: Annotated[
        str | None,
        Parameter(help="How much each source counts, in the order of this list. Default: by its samples."),
    ] = None


@Parameter(name="*", group=Group("How weights are found", sort_key=2))
@dataclass(frozen=True)
class Finding:
    """The method and its details."""

    method: Annotated[
        Literal["auto", "label", "probe", "shift", "em", "least_squares", "pseudo", "ot", "cosine", "mmd", "search"],
        Parameter(
            help="auto: labels if there are any; of inputs, the first of probe, shift and ot that the profiles allow "
            "and that can be trusted. search: try merges on --pairs."
        ),
    ] = "auto"
    similarity: Annotated[
        Literal["inner", "count"], Parameter(help="Of labels: the paper's inner product, or counts.")
    ] = "inner"
    on_zero: Annotated[Literal["error", "equal"], Parameter(help="What to do if no label belongs to any task.")] = (
        "error"
    )
    gamma: Annotated[
        float | None, Parameter(help="Sharpness of ot, cosine, mmd. Default: 100, 50, 100.", allow_leading_hyphen=True)
    ] = None
    debias: Annotated[bool, Parameter(help="ot: take off each side's transport onto itself.")] = False
    regularisation: Annotated[
        float | None, Parameter(help="ot: of the transport. Default: 0.1.", allow_leading_hyphen=True)
    ] = None
    iterations: Annotated[int | None, Parameter(help="ot: at most so many. Default: 100.")] = None
    bandwidth: Annotated[
        Literal["pooled", "authors"] | None, Parameter(help="mmd: one kernel, or the authors' three. Default: pooled.")
    ] = None
    shrink: Annotated[
        str, Parameter(help="Move weights toward equal ones: 0 (off) to 1, or auto.", allow_leading_hyphen=True)
    ] = "0"
    seed: Annotated[int, Parameter(help="Of the intervals, of the draw from many inputs, and of a search.")] = 0


@Parameter(name="*", group=Group("Search (--method search)", sort_key=3))
@dataclass(frozen=True)
class Searching:
    """How far to search, and where to keep it."""

    trials: Annotated[int | None, Parameter(help="At most so many merges, in all. Default: 500.")] = None
    patience: Annotated[int | None, Parameter(help="Stop after so many trials without a better one. Default: 10.")] = (
        None
    )
    search_scale: Annotated[
        str | None, Parameter(help="Search the scale too, as 0.5,2. Default: every merge has the matched one.")
    ] = None
    study: Annotated[Path | None, Parameter(help="Keep the trials in this file; the same command goes on.")] = None


@Parameter(name="*", group=Group("Reading", sort_key=4))
@dataclass(frozen=True)
class Reading:
    """How files are read."""

    classifier: Annotated[
        Path | None, Parameter(help="Head of the fixed classifier, and for a search. Default: the run's.")
    ] = None
    classifier_checkpoint: Annotated[
        Path | None, Parameter(help="Its encoder. Default: the run's, or else the base.")
    ] = None
    max_samples: Annotated[int, Parameter(help="Of more inputs, embed a seeded draw.")] = 500
    split: Annotated[str | None, Parameter(help="Of a data set with several.")] = None
    text_column: Annotated[str | None, Parameter(help="Default: text, sentence, query, ...")] = None
    label_column: Annotated[str | None, Parameter(help="Default: label, class, intent, ...")] = None
    device: Annotated[str | None, Parameter(help="For encoders. Default: the GPU if there is one.")] = None


def sources_of(sources: Sources) -> workflow.Sources:
    """Converts the options to what the workflow takes, with texts read as numbers."""
    from tunable_magmax.workflows.target import Sources

    lists = {name: numbers(getattr(sources, name), f"--{name}") for name in ("weights", "strengths")}
    return Sources(**{**vars(sources), **lists})


def estimation_of(finding: Finding, searching: Searching) -> Estimation:
    """Converts the options to what the workflow takes, with texts read as numbers."""
    from tunable_magmax.workflows.prefer import Estimation

    scale = numbers(searching.search_scale, "--search-scale")
    if scale is not None and len(scale) != 2:
        raise InputError(f"--search-scale is {searching.search_scale!r}, expected two numbers LOW,HIGH, as 0.5,2")
    options: dict[str, Any] = {**vars(finding), **vars(searching)}
    return Estimation(**{**options, "shrink": _shrink(finding.shrink), "search_scale": scale})


def _shrink(text: str) -> Any:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--shrink is {text!r}, expected a number from 0 to 1, or auto") from None


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Reads numbers with commas between them."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0") from None
