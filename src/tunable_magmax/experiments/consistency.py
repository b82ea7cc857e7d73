"""Records belong to the settings that they were made with: others are not mixed with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment

PLACES = {"model", "benchmark.data", "head.file", "train.log_every"}
"""Settings that may differ: where things lie, which is another matter on every machine, and what is only shown."""


def refuse_other_settings(experiment: Experiment, records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Raise an `InputError` if records of this experiment's seeds come from another training."""
    for record in records:
        seed = record["seed"]
        if record["kind"] != "sequence" or record["setting"] != experiment.setting or seed not in experiment.seeds:
            continue
        now = experiment.training(seed).record()
        found = [f"{name} is {mine!r}, there {theirs!r}" for name, mine, theirs in _differences(now, record["config"])]
        if found:
            raise InputError(
                f"{file}: the records of seed {seed} were made with other settings: {'; '.join(found)}. "
                "Give another folder with -o, or the settings of the records"
            )


def _differences(now: Mapping[str, Any], then: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Settings with unequal values, by their names with dots.

    >>> list(_differences({"train": {"lr": 1.0}, "model": "a"}, {"train": {"lr": 2.0}, "model": "b"}))
    [('train.lr', 1.0, 2.0)]
    """
    for key in sorted({*now, *then}):
        mine, theirs = now.get(key), then.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(mine, theirs, f"{above}{key}.")
        elif f"{above}{key}" not in PLACES and _plain(mine) != _plain(theirs):
            yield f"{above}{key}", mine, theirs


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
