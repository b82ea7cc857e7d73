"""`tmx compare`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunable_magmax.cli.app import parsed
from tunable_magmax.cli.terminal import given_warnings, show_result, table, working, wrapped
from tunable_magmax.errors import plural
from tunable_magmax.workflows.options import CompareOptions

if TYPE_CHECKING:
    from tunable_magmax.workflows.compare import Comparison, Row

LONGEST = 30
"""Columns of a model's name in the table."""


def compare(run_dir: Path, /, *, options: CompareOptions = parsed(CompareOptions)) -> None:
    """Compare the models of a run at a site: base, last, each task, merges, and the tailored one.

    tmx compare RUN_DIR --preference site-model --data site.csv

    Everything is merged in memory, gets a head that is fitted to it with the run's kept samples, and is measured on the
    same labelled samples. Exact sign tests, corrected for their number, say which differences are real.

    Parameters
    ----------
    run_dir
        A run directory.
    """
    from tunable_magmax.workflows.compare import compare as measure

    with working() as progress:
        found = measure(run_dir, options, progress)
    show_result({**found.to_dict(), "warnings": given_warnings()}, _lines(found))


def _lines(comparison: Comparison) -> Iterator[str]:
    """Yields the table, a line for each model, and who wins in words, for screens of 80 columns."""
    yield f"{comparison.run} on {comparison.data}, {plural(comparison.samples, 'sample')}"
    if comparison.kept:
        yield f"heads fitted to {plural(comparison.kept, 'kept sample')}"
    yield from table([_cells(row) for row in comparison.rows], ["", "right", "95% interval", "points", "against *"])
    star = "what tmx tailor would choose" if comparison.model is None else f"the model in {comparison.model}"
    notes = f"*: {star}; points: percent right less its; against *: sign tests, corrected for their number (Holm)"
    for text in (notes, *comparison.summary()):
        yield from wrapped(text)


def _cells(row: Row) -> list[str]:
    low, high = row.share.interval()
    name = row.model if len(row.model) <= LONGEST else f"{row.model[: LONGEST - 3]}..."
    share = [f"{row.share.value:.1%}", f"{100 * low:.1f} to {100 * high:.1f}"]
    if row.pair is None:
        return [f"{name} *", *share, "", ""]
    return [name, *share, f"{100 * row.pair.difference:+.1f}", str(row.verdict)]
