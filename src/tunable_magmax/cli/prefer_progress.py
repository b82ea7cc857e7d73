"""Following a search: one bar with the best accuracy so far, and what to say when it is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunable_magmax.cli.tables import number
from tunable_magmax.errors import TmxError

if TYPE_CHECKING:
    from tunable_magmax.preference.search import Trial


class Following:
    """Callbacks for a search of at most `trials`: `progress` while files are read, `watch` after each trial."""

    def __init__(self, trials: int, bars: Any = None) -> None:
        self.last: tuple[int, float, Sequence[float]] | None = None
        self._trials, self._bars, self._tasks = trials, bars, dict[str, Any]()

    def progress(self, phase: str, done: int, total: int) -> None:
        self._draw(phase, phase, done, total)

    def watch(self, history: Sequence[Trial]) -> None:
        best = max(history, key=lambda trial: trial.value)
        self.last = (len(history), best.value, best.weights)
        self._draw("search", f"best {best.value:.1%}", len(history), self._trials)

    def _draw(self, key: str, text: str, done: int, total: int) -> None:
        if self._bars is None:
            return
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(text, total=total)
        self._bars.update(self._tasks[key], description=text, completed=done)


@contextmanager
def following(trials: int, study: Path | None, quiet: bool) -> Iterator[Following]:
    """Draws bars where a person looks; an interrupted search says what it kept and how to go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # The time that remains is not known: patience may end the search at any trial.
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    follower = Following(trials)
    try:
        if quiet or not sys.stderr.isatty():
            yield follower
        else:
            with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
                follower = Following(trials, bars)
                yield follower
    except KeyboardInterrupt:
        raise TmxError(_interrupted(follower, study)) from None


def _interrupted(follower: Following, study: Path | None) -> str:
    if follower.last is None:
        return "interrupted before the first trial was done; run the same command again"
    trials, accuracy, weights = follower.last
    told = f"interrupted after {number(trials, 'trial')}, the best {accuracy:.1%} right"
    if study is not None:
        return f"{told}; {study} keeps them: run the same command again to go on"
    best = ",".join(f"{weight:.4g}" for weight in weights)
    return f"{told}, with --weights {best}; nothing is kept, --study FILE would have kept the trials"
