"""What `tmx prefer` prints: the progress of a search, weights with intervals, the reasons, and the budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.tables import number, table
from tunable_magmax.errors import TmxError

if TYPE_CHECKING:
    from tunable_magmax.preference.preference import Preference
    from tunable_magmax.preference.search import Trial
    from tunable_magmax.workflows.prefer import Preferred

# About 5% of a mixture of the tasks lie outside; few samples may show more by chance.
OUTSIDE = 0.2
FEW = 20
"""Samples below which a weight says little without its interval."""


class SearchProgress:
    """Callbacks for a search of at most `trials`: `progress` while files are read, `watch` after each trial."""

    def __init__(self, trials: int, bars: Any = None) -> None:
        self.last: tuple[int, Trial] | None = None
        self._trials, self._bars, self._tasks = trials, bars, dict[str, Any]()

    def progress(self, phase: str, done: int, total: int) -> None:
        self._draw(phase, phase, done, total)

    def watch(self, history: Sequence[Trial]) -> None:
        best = max(history, key=lambda trial: trial.value)
        self.last = len(history), best
        self._draw("search", f"best {best.value:.1%}", len(history), self._trials)

    def _draw(self, key: str, text: str, done: int, total: int) -> None:
        if self._bars is None:
            return
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(text, total=total)
        self._bars.update(self._tasks[key], description=text, completed=done)


@contextmanager
def search_progress(trials: int, study: Path | None, quiet: bool) -> Iterator[SearchProgress]:
    """Draws bars on a terminal. If the search is interrupted, the error says what was kept and how to go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # The time that remains is not known: patience may end the search at any trial.
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = SearchProgress(trials)
    try:
        if quiet or not sys.stderr.isatty():
            yield shown
        else:
            with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
                shown = SearchProgress(trials, bars)
                yield shown
    except KeyboardInterrupt:
        raise TmxError(_interrupted(shown, study)) from None


def _interrupted(shown: SearchProgress, study: Path | None) -> str:
    if shown.last is None:
        return "interrupted before the first trial was done; run the same command again"
    trials, best = shown.last
    text = f"interrupted after {number(trials, 'trial')}, the best {best.value:.1%} right"
    if study is not None:
        return f"{text}; {study} keeps them: run the same command again to go on"
    weights = ",".join(f"{weight:.4g}" for weight in best.weights)
    return f"{text}, with --weights {weights}; nothing is kept, --study FILE would have kept the trials"


def summary(found: Preferred) -> Iterator[str]:
    """Yields the lines for the terminal."""
    preference = found.preference
    samples = preference.provenance.get("samples")
    yield preference.method + (f", from {number(samples, 'sample')}" if isinstance(samples, int) else "")
    yield from (f"  {reason}" for reason in _reasons(preference))
    if isinstance(samples, int) and samples < FEW and preference.intervals is not None:
        yield f"  {samples} are few: trust the intervals more than the weights, or even these out with --shrink auto"
    header = ["task", "weight"]
    columns = [list(found.labels), [f"{weight:.4f}" for weight in preference.weights]]
    if preference.intervals is not None:
        header.append(f"{_level(preference):.0%} interval")
        columns.append([f"{low:.3f} to {high:.3f}" for low, high in preference.intervals])
    if found.budget is not None:
        header.append("elements")
        columns.append([f"{share:,}" for share in found.budget])
    yield from table([header, *(list(row) for row in zip(*columns, strict=True))])
    if found.elements is not None:
        yield (
            f"budget of {found.elements:,} elements, counted from headers: approximate, since tensors that no task "
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
