"""Data and weights that an experiment still needs, and which of them are not there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunable_magmax.checkpoints.source import open_checkpoint
from tunable_magmax.data.orders import FILE
from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.runs.directory import RunDirectory
from tunable_magmax.training.config import GLYPHS, TrainConfig


@dataclass(frozen=True)
class Supplies:
    """`missing`: what is not there, each thing once, with the key that says where it is; `notes`: what is fetched."""

    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Supplies) -> Supplies:
        return Supplies(
            tuple(dict.fromkeys((*self.missing, *other.missing))), tuple(dict.fromkeys((*self.notes, *other.notes)))
        )


def look_for_supplies(experiment: Experiment, seeds: Sequence[int], work: Path) -> Supplies:
    """What some seeds of an experiment need that is not here.

    Only places are looked at. A seed whose run directory holds base and head needs neither model nor head's file, and a
    model with a hub's name may still be fetched.
    """
    found = Supplies()
    for seed in seeds:
        config = experiment.training(seed)
        begun = RunDirectory(work / f"seed-{seed}")
        found += Supplies(tuple(_data(config)))
        if not begun.base.exists() or not begun.head.exists():
            found += Supplies(tuple(_weights(config)), tuple(_fetched(config)))
    return found


def refuse_missing(name: str, missing: Sequence[str]) -> None:
    """Say everything that is missing, before anything is made."""
    if missing:
        listed = "\n".join(f"  - {text}" for text in missing)
        raise InputError(f"{name} needs what is not there:\n{listed}")


def _data(config: TrainConfig) -> Iterator[str]:
    benchmark = config.benchmark
    for path, what, key in (
        (benchmark.data, f"the data of {benchmark.name}", "data"),
        (benchmark.class_names, "the class names", "class_names"),
    ):
        if path is not None and not path.exists():
            yield _absent(what, path, f"run.benchmark.{key}")
    orders = benchmark.order.file
    if orders is not None and not orders.exists():
        yield (
            f"{_absent('the order of classes', orders, 'run.benchmark.order.file')} ({FILE}: docs/training.md), or "
            "order the classes by the seed with --set order_from_seed=true"
        )


def _weights(config: TrainConfig) -> Iterator[str]:
    from tunable_magmax.models.hub import is_hub_name

    place = config.root / Path(config.model).expanduser()
    if config.model == GLYPHS:
        pass  # it is built in
    elif place.exists():
        try:
            open_checkpoint(place).close()
        except InputError as error:
            yield f"the model: {error}; give another one with --set run.model=PATH"
    elif not is_hub_name(config.model):
        yield _absent("the model", place, "run.model")
    if config.head.file is not None and not Path(config.head.file).exists():
        yield _absent("the head", Path(config.head.file), "run.head.file")


def _fetched(config: TrainConfig) -> Iterator[str]:
    from tunable_magmax.models.hub import fetch_note

    note = None if config.model == GLYPHS else fetch_note(config.model, config.root)
    if note is not None:
        yield f"{note}; give another one with --set run.model=PATH"


def _absent(what: str, path: Path, key: str) -> str:
    return f"{what}: {os.path.normpath(path)} does not exist; say where it is with --set {key}=PATH"
