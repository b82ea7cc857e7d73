"""The jobs of an experiment: what is to be measured, and which of it is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.experiments.config import Experiment
from tunable_magmax.experiments.records import RECORDS, read_records, record_key
from tunable_magmax.experiments.rows import BY_RULE, MERGED, Row

META_ROWS = ("tunable:label@matched", "tunable:auto@matched", "tailor:label+prior", BY_RULE)


@dataclass(frozen=True)
class Job:
    """One thing to measure for one seed. Kind, seed and name are the key of the record that it leaves."""

    kind: str
    seed: int
    name: str
    row: Row | None = None


def plan_jobs(experiment: Experiment) -> list[Job]:
    """Returns all jobs of an experiment, seed by seed, in the order in which they are done.

    Rows at their best scale bring the search for it along, also if `kinds` does not name it.
    """
    if experiment.parts:
        return [job for part in experiment.parts for job in plan_jobs(part)]
    jobs: list[Job] = []
    for seed in experiment.seeds:
        jobs.append(Job("sequence", seed, "sequence"))
        searched: list[str] = [name for name in experiment.baselines if name in MERGED and "best" in experiment.scales]
        searched += [row.base for row in experiment.planned if row.scale == "best"]
        jobs += [Job("scale", seed, name) for name in dict.fromkeys(searched)]
        jobs += [Job("row", seed, row.name, row) for row in experiment.planned]
        if experiment.alphas:
            jobs += [
                Job("alpha", seed, f"{method}@{scale}")
                for method in ("magmax", "tunable")
                for scale in experiment.scales
                if scale != "best"
            ]
        if experiment.meta_sizes:
            planned = {row.name: row for row in experiment.planned}
            jobs += [Job("meta-size", seed, name, planned[name]) for name in META_ROWS if name in planned]
    kinds = set(experiment.kinds)
    scaled = {row.base for row in experiment.planned if row.scale == "best"} if "row" in kinds else set()
    return [job for job in jobs if job.kind in kinds or (job.kind == "scale" and job.name in scaled)]


def missing_jobs(experiment: Experiment, results: Path) -> list[Job]:
    """Returns the jobs whose records are not there yet. Records of other settings are an `InputError`."""
    file = results / RECORDS
    records = read_records(file) if file.exists() else []
    refuse_other_settings(experiment, records, file)
    known = {record_key(record) for record in records}
    return [job for job in plan_jobs(experiment) if (experiment.setting, job.kind, job.seed, job.name) not in known]


PLACES = {"model", "benchmark.data", "head.file", "keep"}
"""Settings that may differ from those of the records: where files lie, and how many samples are kept."""


def refuse_other_settings(experiment: Experiment, records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Raises an `InputError` if records of this experiment's seeds come from another training."""
    for record in records:
        seed = record["seed"]
        if record["kind"] != "sequence" or record["setting"] != experiment.setting or seed not in experiment.seeds:
            continue
        now = json.loads(json.dumps(experiment.training(seed).record()))  # lists for tuples, as in the file
        differences = [
            f"{name} is {mine!r}, there {theirs!r}" for name, mine, theirs in _differences(now, record["config"])
        ]
        if differences:
            raise InputError(
                f"{file}: the records of seed {seed} were made with other settings: {'; '.join(differences)}. "
                "Give another folder with -o, or the settings of the records"
            )


def _differences(now: Mapping[str, Any], then: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields settings with unequal values, by their names with dots; what is no setting any more is left alone.

    >>> list(_differences({"train": {"lr": 1.0}, "model": "a"}, {"train": {"lr": 2.0}, "model": "b"}))
    [('train.lr', 1.0, 2.0)]
    """
    for key in sorted(now):
        mine, theirs = now.get(key), then.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(mine, theirs, f"{above}{key}.")
        elif f"{above}{key}" not in PLACES and mine != theirs:
            yield f"{above}{key}", mine, theirs
