"""Progress bars for long work, on stderr, and only where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tunable_magmax.files import Progress

PHASES = {
    "train": "training",
    "survey": "reading",
    "measure": "measuring",
    "merge": "merging",
    "digest": "hashing",
    "convert": "writing",
}


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Progress | None]:
    """A callback progress(phase, done, total) that draws one bar a phase; None where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(PHASES.get(phase, phase), total=total)
            bars.update(tasks[phase], completed=done)

        yield update
