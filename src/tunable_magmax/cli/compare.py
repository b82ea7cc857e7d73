"""`tmx compare`: its options, and the table of models."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tunable_magmax.cli.merge_options import Json, Loose, refuse_loose
from tunable_magmax.cli.terminal import plain_warnings, progress_bars, screen_width, show, wrapped_table
from tunable_magmax.plots.figure import check_picture
from tunable_magmax.showing import plural

if TYPE_CHECKING:
    from tunable_magmax.workflows.compare import Comparison, Row

WIDTH, LONGEST = 80, 30
"""Columns of a text, and of a model's name in the table."""


@Parameter(name="*", group=Group("Data and head", sort_key=1))
@dataclass(frozen=True)
class SiteData:
    """The labelled samples of the site, and how they are read."""

    data: Path | None = None
    """Labelled samples of the site: class folders of images, a table, parquet, or a benchmark's YAML. Default: the
    run's test data."""
    split: str | None = None
    """Of data with several. Of a benchmark: test (default) or train."""
    text_column: str | None = None
    """Default: text, sentence, query, ..."""
    label_column: str | None = None
    """Default: label, class, intent, ..."""
    max_samples: int | None = None
    """Use at most this many samples, a fixed random draw."""
    batch: int = 64
    """Batch size."""
    device: str | None = None
    """Default: the GPU if there is one."""


_SITE = SiteData()


def compare(
    run_dir: Path,
    /,
    *loose: Loose,
    preference: Path | None = None,
    site: SiteData = _SITE,
    old_heads: bool = False,
    seed: int = 0,
    plot: Path | None = None,
    dry_run: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
    as_json: Json = False,
) -> None:
    """Compare the models of a run at a site: base, last, each task, merges, and the tailored one.

    tmx compare RUN_DIR --preference site-model --data site.csv

    Everything is merged in memory, gets a head that is fitted to it with the run's kept samples, and is measured on the
    same labelled samples. Exact sign tests, corrected for their number, say which differences are real.

    Parameters
    ----------
    run_dir
        A run directory.
    preference
        A model that tmx tailor made, or the site's preference, as tmx prefer writes it. Default: all tasks alike.
    old_heads
        Also measure every model with the head that it had before fitting.
    seed
        Seed of the merges and of --max-samples.
    plot
        Also draw the table into this file: .png, .svg or .pdf.
    dry_run
        Read headers only and say what would be compared.
    quiet
        No progress bars; print the sentences alone.
    """
    refuse_loose("compare", loose, {}, run_dir)
    if plot is not None:
        check_picture(plot)
    from tunable_magmax.workflows.compare import check_comparison
    from tunable_magmax.workflows.compare import compare as compare_models
    from tunable_magmax.workflows.options import Reading

    values = {key: value for key, value in asdict(site).items() if key != "data"}
    how = Reading(**values)
    with plain_warnings() as messages, progress_bars(quiet or as_json) as progress:
        lines: Iterator[str]
        if dry_run:
            record = check_comparison(run_dir, preference, site.data, how)
            shown = {**record, "models": ", ".join(record["models"])}
            lines = (f"{name.replace('_', ' '):10}{value}" for name, value in shown.items())
        else:
            found = compare_models(
                run_dir, preference, site.data, old_heads=old_heads, seed=seed, reading=how, progress=progress
            )
            record, lines = found.to_dict(), iter(found.summary()) if quiet else comparison_lines(found)
            if plot is not None:
                from tunable_magmax.plots.comparison import save_comparison

                save_comparison(found, plot)
    if as_json:
        text = json.dumps({**record, "warnings": messages}, indent=1, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"{line}\n" for line in lines)
    show(text)


# -- text -------------------------------------------------------------------------------------------------------------


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yields the table, a line for each model, and who wins in words, for screens of 80 columns."""
    yield f"{comparison.run} on {comparison.data}, {plural(comparison.samples, 'sample')}"
    if comparison.kept:
        yield f"heads fitted to {plural(comparison.kept, 'kept sample')}"
    rows = [["", "right", "95% interval", "points", "against *"]]
    rows += [_cells(row) for row in comparison.rows]
    yield from wrapped_table(rows, 1, screen_width())
    if comparison.model is not None:
        star = f"the model in {comparison.model}"
    else:
        site = "this preference" if comparison.preference is not None else "tasks that matter alike"
        star = f"what tmx tailor would choose for {site}"
    notes = f"*: {star}; points: percent right less its; against *: sign tests, corrected for their number (Holm)"
    for text in (notes, *comparison.summary()):
        yield from textwrap.wrap(text, min(WIDTH, screen_width()), break_on_hyphens=False)


def _cells(row: Row) -> list[str]:
    low, high = row.share.interval()
    name = row.title if len(row.title) <= LONGEST else f"{row.title[: LONGEST - 3]}..."
    share = [f"{row.share.value:.1%}", f"{100 * low:.1f} to {100 * high:.1f}"]
    if row.pair is None:
        return [f"{name} *", *share, "", ""]
    return [name, *share, f"{100 * row.pair.difference:+.1f}", str(row.verdict)]
