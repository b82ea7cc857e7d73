"""`tmx compare`: its options, and the table of models."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import Json, Loose, is_number, refuse_loose
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, screen_width, show, wrapped_table
from tunable_magmax.errors import InputError
from tunable_magmax.plots.figure import check_picture
from tunable_magmax.showing import number

if TYPE_CHECKING:
    from tunable_magmax.workflows.compare import ComparisonPlan
    from tunable_magmax.workflows.verdicts import Comparison, Row


@Parameter(name="*", group=Group("Data and head", sort_key=1))
@dataclass(frozen=True)
class SiteData:
    """The labelled samples of the site, and how they are read."""

    data: Path | None = None
    """Labelled samples of the site: class folders of images, a table, parquet, or a benchmark's YAML. Default: the
    run's test data."""
    head: Path | None = None
    """The frozen head. Default: the run's."""
    split: str | None = None
    """Of data with several. Of a benchmark: test (default) or train."""
    text_column: str | None = None
    """Default: text, sentence, query, ..."""
    label_column: str | None = None
    """Default: label, class, intent, ..."""
    limit: int | None = None
    """Of more samples, compare on a seeded draw."""
    batch: int = 256
    """So many samples at a time."""
    device: str | None = None
    """Default: the GPU if there is one."""


_SITE = SiteData()


def compare(
    run_dir: Path,
    /,
    *loose: Loose,
    preference: Path | None = None,
    site: SiteData = _SITE,
    scales: str = "0.5,1,matched",
    prior: Literal["auto", "none"] = "auto",
    seed: int = 0,
    plot: Path | None = None,
    dry_run: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Json = False,
) -> None:
    """Compare the models of a run at a site: base, last, each task, other merges, and the tailored one.

    tmx compare RUN_DIR --preference site.json --data site/test

    Everything is merged in memory and measured on the same samples, with and without the site prior. An exact sign
    test, corrected for the number of comparisons, says which differences are real.

    Parameters
    ----------
    run_dir
        A run directory.
    preference
        The site's preference, as tmx prefer writes it; or a model that tmx tailor made, to compare with what is in it.
    scales
        Scales of the Tunable MAGMAX merge, numbers or matched, with commas. The tailored model's own is added.
    prior
        auto: measure also with the site prior of the preference (or the bias in the head's file); none: without.
    seed
        Seed of the merges and of --limit.
    plot
        Also draw the table into this file: .png, .svg or .pdf.
    dry_run
        Read headers only and say what would be compared.
    quiet
        No progress bars; print the sentences alone.
    """
    refuse_loose("compare", loose, {"--scales": scales}, run_dir)
    if preference is None:
        raise InputError(f"for which site? Give --preference FILE, which `tmx prefer {run_dir} -o FILE` makes")
    if plot is not None:
        check_picture(plot)
    from tunable_magmax.workflows.compare import Rivals, plan_comparison
    from tunable_magmax.workflows.compare import compare as compare_models
    from tunable_magmax.workflows.scoring import Reading

    values = {key: value for key, value in asdict(site).items() if key not in ("data", "head")}
    common: dict[str, Any] = {"head": site.head, "reading": Reading(**values, seed=seed)}
    rivals = Rivals(read_scales(scales), prior, seed)
    with plain_warnings() as messages, progress_bars(quiet or as_json) as progress:
        found: Comparison | ComparisonPlan
        if dry_run:
            found = plan_comparison(run_dir, preference, site.data, rivals=rivals, **common)
            lines = plan_lines(found)
        else:
            found = compare_models(run_dir, preference, site.data, rivals=rivals, progress=progress, **common)
            lines = iter(found.sentences()) if quiet else comparison_lines(found)
            if plot is not None:
                from tunable_magmax.plots.comparison import save_comparison

                save_comparison(found, plot)
    if as_json:
        text = json.dumps({**found.to_dict(), "warnings": messages}, indent=1, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"{line}\n" for line in lines)
    show(text)


def read_scales(text: str) -> list[float | str]:
    """Reads scales with commas between them: numbers above 0, or matched.

    >>> read_scales("0.5,1,matched")
    [0.5, 1.0, 'matched']
    """
    scales: list[float | str] = []
    for part in (part.strip() for part in text.split(",")):
        if part != "matched" and not (is_number(part) and "/" not in part and 0 < float(part) < float("inf")):
            raise InputError(f"--scales is {text!r}, expected numbers above 0 or matched with commas: 0.5,1,matched")
        scales.append(part if part == "matched" else float(part))
    return scales


# -- text -------------------------------------------------------------------------------------------------------------


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yields the table, a line for each model, and who wins in words."""
    count = number(comparison.samples, "sample")
    yield f"{comparison.run} on {comparison.data}, {count}, with the head {comparison.head}"
    yield f"  {_prior_line(comparison)}"
    first = comparison.prior is not None
    interval = f"{100 * comparison.level:g}% interval"
    header = ["", "accuracy", interval, "points", "against *"]
    if first:
        header = ["", "with prior", interval, "points", "against *", "no prior", "points", "against *"]
    rows = [header]
    for candidate, found in comparison.by_model().items():
        mark = "*" if candidate == comparison.tailored.candidate else ""
        scale = comparison.scales.get(candidate.title)
        shown = f"{candidate.title} ({scale:g})" if candidate.scale == "matched" and scale is not None else None
        cells = _cells(found[first], comparison.level)
        if first:
            without = _cells(found[False], comparison.level)
            cells = [*cells, without[0], *without[2:]]
        rows.append([f"{shown or candidate.title}{mark}", *cells])
    yield from wrapped_table(rows, 1, screen_width())
    star = "as tmx tailor makes it of the preference by default"
    if comparison.model is not None:
        star = f"as it is in {comparison.model}"
        star += ", without the prior" if first and not comparison.tailored.prior else ""
    notes = (
        f"*: the tailored model, {star}; points: accuracy less its; "
        f"against *: exact sign tests on the same samples, corrected for {len(comparison.rows) - 1} comparisons "
        f"(Holm); intervals: Wilson, {100 * comparison.level:g}%"
    )
    yield from textwrap.wrap(notes, screen_width())
    for sentence in comparison.sentences():
        yield from textwrap.wrap(sentence, screen_width())


def plan_lines(plan: ComparisonPlan) -> Iterator[str]:
    """Yields what would be compared."""
    yield f"{plan.run} on {plan.data}, {number(plan.samples, 'sample')}, with the head {plan.head}"
    yield f"  {_prior_line(plan)}"
    yield f"would compare {number(len(plan.candidates), 'model')}, each by one pass over the samples:"
    for candidate in plan.candidates:
        yield f"  {candidate.title}{' (the tailored model)' if candidate == plan.tailored else ''}"


def _prior_line(found: Comparison | ComparisonPlan) -> str:
    if found.prior is None:
        return "without a site prior: neither preference nor head has one, or --prior none was given"
    return f"with and without the site prior {found.prior.words}"


def _cells(row: Row, level: float) -> list[str]:
    low, high = row.share.interval(level)
    accuracy = [f"{row.share.value:.1%}", f"{100 * low:.1f} to {100 * high:.1f}%"]
    if row.pair is None:
        return [*accuracy, "", ""]
    return [*accuracy, f"{100 * row.pair.difference:+.1f}", str(row.verdict)]
