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
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, show, table
from tunable_magmax.errors import InputError
from tunable_magmax.plots.figure import check_picture
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.prior import SitePrior

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

    trials: int = 100
    """The largest number of merges. It stops after 10 without a better one."""


@Parameter(name="*", group=Group("How files are read", sort_key=4))
@dataclass(frozen=True)
class ReadingOptions:
    """The options that say how files are read."""

    max_samples: int | None = None
    """Use at most this many inputs (a fixed random draw). Default: 500."""
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
    from tunable_magmax.workflows.options import Reading
    from tunable_magmax.workflows.prefer import PreferOptions
    from tunable_magmax.workflows.prefer import prefer as find
    from tunable_magmax.workflows.site import SiteSources

    refuse_loose("prefer", loose, {"--weights": sources.weights}, run_dir)
    replaces = out is not None and _holds_preference(out)
    if plot is not None:
        check_picture(plot)
    weights = read_weights(sources.weights)
    known = SiteSources(**{**vars(sources), "weights": weights})
    options: dict[str, Any] = {**vars(estimating), **vars(searching)}
    estimation = PreferOptions(**{**options, "prior": read_prior(estimating.prior)})
    with plain_warnings() as warnings, progress_bars(quiet or as_json) as progress:
        preference = find(run_dir, known, estimation, Reading(**vars(reading)), progress=progress)
    if out is not None:
        preference.save(out)
    if plot is not None:
        from tunable_magmax.plots.bars import save_chart

        save_chart(preference, plot)
    if as_json:
        record = {"preference": preference.to_dict(), "warnings": warnings}
        show(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    elif not quiet:
        lines = [*_summary(preference), *_written(out, plot, preference)]
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


def _summary(preference: Preference) -> Iterator[str]:
    """Yields how the weights were found, and weights with intervals."""
    samples = preference.provenance.get("samples")
    yield preference.method + (f", from {plural(samples, 'sample')}" if isinstance(samples, int) else "")
    yield from (f"  {reason}" for reason in _reasons(preference.method, preference.provenance))
    labels = preference.tasks or [f"task {t}" for t in range(1, len(preference.weights) + 1)]
    columns = [["task", *labels], ["weight", *(f"{weight:.4f}" for weight in preference.weights)]]
    if preference.intervals is not None:
        columns.append(["90% interval", *(f"{low:.3f} to {high:.3f}" for low, high in preference.intervals)])
    yield from table([*zip(*columns, strict=True)])
    if preference.prior is not None:
        yield prior_line(preference.prior)


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
