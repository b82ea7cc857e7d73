"""Keeps samples of a task as training and `tmx init` do: the files, then the entry in run.json."""

from typing import Any

from tunable_magmax.data.samples import Samples
from tunable_magmax.runs import kept
from tunable_magmax.runs.run import KeptEntry, Run


def keep_samples(run: Run, task: int, samples: Samples, **options: Any) -> KeptEntry | None:
    """`task`: its number from 0."""
    entry = kept.keep_samples(run, run.names[task], samples, **options)
    run.register(run.names[task], kept=entry)
    return entry
