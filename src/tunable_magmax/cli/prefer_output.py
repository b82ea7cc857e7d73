"""What `tmx prefer` prints: the progress of a search, weights with intervals, the reasons, and the budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.progress import search_bars
from tunable_magmax.cli.tables import number, table
from tunable_magmax.errors import TmxError
from tunable_magmax.files import Progress

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.search import SearchWatch, Trial
    from tunable_magmax.workflows.prefer import Preferred

# About 5% of a mixture of the tasks lie outside; few samples may show more by chance.
OUTSIDE = 0.2
FEW = 20
"""Samples below which a weight says little without its interval."""


@contextmanager
def search_progress(trials: int, study: Path | None, quiet: bool) -> Iterator[tuple[Progress | None, SearchWatch]]:
    """Yields callbacks that draw bars. If the search is interrupted, the error says what was kept and how to go on."""
    history: list[Trial] = []
    with search_bars(quiet, trials) as (progress, show):

        def watch(tried: Sequence[Trial]) -> None:
            history[:] = tried
            if show is not None:
                show(tried)

        try:
            yield progress, watch
        except KeyboardInterrupt:
            raise TmxError(_interrupted(history, study)) from None


def _interrupted(history: Sequence[Trial], study: Path | None) -> str:
    if not history:
        return "interrupted before the first trial was done; run the same command again"
    best = max(history, key=lambda trial: trial.value)
    text = f"interrupted after {number(len(history), 'trial')}, the best {best.value:.1%} right"
    if study is not None:
        return f"{text}; {study} keeps them: run the same command again to go on"
    weights = ",".join(f"{weight:.4g}" for weight in best.weights)
    return f"{text}, with --weights {weights}; nothing is kept, --study FILE would have kept the trials"


def summary(result: Preferred) -> Iterator[str]:
    """Yields the lines for the terminal."""
    preference = result.preference
    samples = preference.provenance.get("samples")
    yield preference.method + (f", from {number(samples, 'sample')}" if isinstance(samples, int) else "")
    yield from (f"  {reason}" for reason in _reasons(preference))
    if isinstance(samples, int) and samples < FEW and preference.intervals is not None:
        yield f"  {samples} are few: trust the intervals more than the weights, or even these out with --shrink auto"
    header = ["task", "weight"]
    columns = [list(result.labels), [f"{weight:.4f}" for weight in preference.weights]]
    if preference.intervals is not None:
        header.append(f"{_level(preference):.0%} interval")
        columns.append([f"{low:.3f} to {high:.3f}" for low, high in preference.intervals])
    if result.budget is not None:
        header.append("elements")
        columns.append([f"{share:,}" for share in result.budget])
    yield from table([header, *(list(row) for row in zip(*columns, strict=True))])
    if result.elements is not None:
        yield (
            f"budget of {result.elements:,} elements, counted from headers: approximate, since tensors that no task "
            "changed drop out of the merge"
        )


def _reasons(preference: Preference) -> Iterator[str]:
    if preference.method == "search":
        yield from _search_reasons(preference.provenance)
    facts = preference.provenance.get("auto")
    if isinstance(facts, dict):
        yield f"auto chose {facts['chosen']}: {facts['reason']}"
        fit = facts.get("fit")
        if isinstance(fit, float) and fit < 0.05:
            yield (
                f"fit {fit:.2f}: no mixture of the tasks explains well what the classifier sees; the target may hold "
                "something that no task held"
            )
    outside = preference.provenance.get("outside")
    if isinstance(outside, float) and outside > OUTSIDE:
        yield (
            f"{outside:.0%} of the samples are farther from every class than 95% of the tasks' own samples: the target "
            "may hold something that no task held"
        )
    parts = preference.provenance.get("sources")
    if isinstance(parts, list):
        for part in parts:
            count = part["samples"]
            size = f", {number(count, 'sample')}" if isinstance(count, int) else ""
            yield f"{part['share']:.0%} {part['method']}{size} ({preference.provenance['rule']})"


def _search_reasons(facts: Mapping[str, Any]) -> Iterator[str]:
    ended = "nothing better in the last ones" if facts["stopped"] == "patience" else "no more were asked for"
    yield f"{facts['accuracy']:.1%} right after {number(facts['trials'], 'trial')} ({ended})"
    starts = [
        f"{start['source']} {start['accuracy']:.1%}" for start in facts["starts"] if start["accuracy"] is not None
    ]
    if starts:
        yield f"started from {', '.join(starts)}"


def _level(preference: Preference) -> float:
    parts = preference.provenance.get("sources")
    record = parts[0]["provenance"] if isinstance(parts, list) else preference.provenance
    facts = record.get("bootstrap")
    return float(facts["level"]) if isinstance(facts, dict) else 0.9


def written(out: Path | None, plot: Path | None, preference: Preference) -> Iterator[str]:
    """Yields which files were written, and what to do with them."""
    if plot is not None:
        yield f"chart: {plot}"
    yield f"wrote {out}" if out is not None else "nothing written; -o FILE keeps it for tmx merge --preference FILE"
    scale = preference.provenance.get("scale")
    if preference.method == "search" and isinstance(scale, float):
        yield f"the scale is not part of a preference: merge with --preference {out or 'FILE'} --scale {scale!r}"
