"""`tmx prefer`: its options in groups, the command, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import Loose, numbers, refuse_loose
from tunable_magmax.cli.terminal import progress_bars, show, table, warn
from tunable_magmax.errors import InputError
from tunable_magmax.plots.figure import check_picture
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.prior import SitePrior
    from tunable_magmax.workflows.prefer import Preferred

FEW = 20
"""Samples below which a weight says little without its interval."""
SIGNED = Parameter(allow_leading_hyphen=True)  # so that a negative number is refused as one, not as an unknown option


@Parameter(name="*", group=Group("What is known of the site (one of these, or --labels and --inputs)", sort_key=1))
@dataclass(frozen=True)
class SourceOptions:
    """The options that say what is known of the site."""

    weights: Annotated[str | None, SIGNED] = None
    """How much each task matters, for example 3,1,0, or travel=7,bank=3, where tasks that are not named weigh 0."""
    alpha: Annotated[float | None, SIGNED] = None
    """Follow the paper's schedule: above 1 favours early tasks, below 1 late ones."""
    equal: bool = False
    """Give every task the same weight."""
    labels: Path | None = None
    """Labels of the site: .txt (one per line), .csv, .jsonl or labelled data. Class names or indices, or task
    names, each of which counts for its task."""
    inputs: Path | None = None
    """Inputs of the site: an image folder, texts (.txt, .csv, .jsonl) or parquet."""
    labelled: Path | None = None
    """Inputs of the site with labels: class folders of images, a table, or parquet. auto uses only the labels."""


@Parameter(name="*", group=Group("How the weights are estimated", sort_key=2))
@dataclass(frozen=True)
class EstimationOptions:
    """The options of the method."""

    method: Annotated[
        Literal["auto", "label", "probe", "ot", "cosine", "mmd", "search"],
        Parameter(
            help="auto is one posterior from labels, inputs or both, label and probe from one of them; ot, cosine and "
            "mmd are the paper's estimators from inputs; search tries merges on --labelled."
        ),
    ] = "auto"
    raw: bool = False
    """For ot: compare embeddings as they are, as the paper does. By default they are normalised."""
    prior: str = "auto"
    """The site prior for the head: auto, none, or a number, the share that is spread evenly over all classes."""
    seed: int = 0
    """The seed of the posterior, of the draw from many inputs, and of a search."""


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


@Parameter(name="*", group=Group("How files are read", sort_key=4))
@dataclass(frozen=True)
class ReadingOptions:
    """The options that say how files are read."""

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


_SOURCES, _ESTIMATING, _SEARCHING, _READING = SourceOptions(), EstimationOptions(), SearchOptions(), ReadingOptions()


def prefer(
    run_dir: Path,
    /,
    *loose: Loose,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    sources: SourceOptions = _SOURCES,
    estimating: EstimationOptions = _ESTIMATING,
    searching: SearchOptions = _SEARCHING,
    reading: ReadingOptions = _READING,
    plot: Path | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Find how much each task matters to a site, from what is known of it.

    tmx prefer RUN_DIR --inputs site/images -o site.json
    tmx prefer RUN_DIR --labels site.csv --plot site.png
    tmx prefer RUN_DIR --labelled site/classes --method search -o site.json
    tmx prefer RUN_DIR --weights 3,1,0 -o site.json

    Labels and inputs are compared with the tasks' profiles, which `tmx init --data` makes.

    Parameters
    ----------
    run_dir
        The run directory, with run.json, checkpoints and profiles.
    out
        Write the preference to this file (JSON), for tmx merge --preference.
    plot
        Draw weights and intervals into this file: .png, .svg or .pdf.
    quiet
        Print no progress bars and no summary.
    as_json
        Print preference and budget as JSON on stdout.
    """
    from tunable_magmax.workflows.prefer import Estimation
    from tunable_magmax.workflows.prefer import prefer as find
    from tunable_magmax.workflows.site import SiteReading, SiteSources

    lists = {"--weights": sources.weights, "--search-scale": searching.search_scale}
    refuse_loose("prefer", loose, lists, run_dir)
    replaces = out is not None and _holds_preference(out)
    if plot is not None:
        check_picture(plot)
    weights = read_weights(sources.weights)
    scale = _read_numbers(searching.search_scale, "--search-scale")
    if scale is not None and len(scale) != 2:
        raise InputError(f"--search-scale is {searching.search_scale!r}, expected two numbers LOW,HIGH, as 0.5,2")
    known = SiteSources(**{**vars(sources), "weights": weights})
    options: dict[str, Any] = {**vars(estimating), **vars(searching), "search_scale": scale}
    estimation = Estimation(**{**options, "prior": read_prior(estimating.prior)})
    with progress_bars(quiet or as_json) as progress:
        result = find(run_dir, known, estimation, SiteReading(**vars(reading)), progress=progress)
    preference = result.preference
    if out is not None:
        preference.save(out)
    if plot is not None:
        from tunable_magmax.plots.bars import save_chart

        save_chart(preference, plot)
    for warning in result.warnings:
        warn(warning)
    if as_json:
        record = {"preference": json.loads(preference.to_json()), "elements": result.elements}
        record |= {"budget": result.budget, "warnings": result.warnings}
        show(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        lines = [*_summary(result), *_written(out, plot, preference)]
        lines += [f"replaced the preference that was in {out}"] if replaces else []
        show("".join(f"{line}\n" for line in lines))


def read_weights(text: str | None) -> tuple[float, ...] | dict[str, float] | None:
    """Reads --weights: a number for each task, or numbers by name.

    >>> read_weights("3,1"), read_weights("travel=7")
    ((3.0, 1.0), {'travel': 7.0})
    """
    parts = numbers(text, "--weights")
    if isinstance(parts, dict):
        return {name: float(Fraction(value)) for name, value in parts.items()}
    return None if parts is None else tuple(float(Fraction(value)) for value in parts)


def _read_numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Reads numbers with commas between them."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected numbers with commas between them, as 3,1,0") from None


def read_prior(text: str) -> float | str:
    """Reads --prior: auto, none, or a number, its eps."""
    try:
        return text if text in ("auto", "none") else float(text)
    except ValueError:
        raise InputError(f"--prior is {text!r}, expected auto, none, or a number such as 0.02") from None


def _holds_preference(out: Path) -> bool:
    """Says whether a preference is there, which is replaced; refuses to replace anything else."""
    from tunable_magmax.preference.preference import Preference

    if out.is_dir():
        raise InputError(f"{out} is a directory: give the name of a file, such as {out / 'site.json'}")
    if out.exists():
        try:
            Preference.load(out)
        except InputError:
            raise InputError(f"{out} exists and is no preference file: choose another name") from None
        return True
    return False


def _summary(result: Preferred) -> Iterator[str]:
    """Yields the lines for the terminal: how the weights were found, weights with intervals, and the budget."""
    preference = result.preference
    samples = preference.provenance.get("samples")
    yield preference.method + (f", from {plural(samples, 'sample')}" if isinstance(samples, int) else "")
    yield from (f"  {reason}" for reason in _reasons(preference.method, preference.provenance))
    if isinstance(samples, int) and samples < FEW and preference.intervals is not None:
        yield f"  {samples} are few: trust the intervals more than the weights"
    columns = [["task", *result.labels], ["weight", *(f"{weight:.4f}" for weight in preference.weights)]]
    if preference.intervals is not None:
        columns.append(["90% interval", *(f"{low:.3f} to {high:.3f}" for low, high in preference.intervals)])
    if result.budget is not None:
        columns.append(["elements", *(f"{share:,}" for share in result.budget)])
    yield from table([*zip(*columns, strict=True)])
    if preference.prior is not None:
        yield prior_line(preference.prior)
    if result.elements is not None:
        yield (
            f"budget of {result.elements:,} elements, counted from headers: approximate, since tensors that no task "
            "changed drop out of the merge"
        )


def prior_line(prior: SitePrior) -> str:
    """Returns a line on the likeliest classes of a prior."""
    likely = sorted(prior.shares, key=lambda name: -prior.shares[name])[:3]
    shown = ", ".join(f"{name} {prior.shares[name]:.1%}" for name in likely)
    refined = ", refined by the site's labels" if prior.source == "labels" else ""
    return f"site prior: {shown} ...; {prior.eps:.1%} spread over all classes{refined} (--prior none leaves it out)"


def _reasons(method: str, facts: Mapping[str, Any]) -> Iterator[str]:
    if method == "search":
        starts = ", ".join(f"{start['source']} {start['accuracy']:.1%}" for start in facts["starts"])
        yield f"{facts['accuracy']:.1%} right in cross-validation after {plural(facts['trials'], 'trial')}; {starts}"


def _written(out: Path | None, plot: Path | None, preference: Preference) -> Iterator[str]:
    """Yields which files were written, and what to do with them."""
    if plot is not None:
        yield f"chart: {plot}"
    yield f"wrote {out}" if out is not None else "nothing written; -o FILE keeps it for tmx merge --preference FILE"
    if preference.scale is not None:
        yield f"the preference carries the scale {preference.scale:g}, which tmx merge --preference uses"
