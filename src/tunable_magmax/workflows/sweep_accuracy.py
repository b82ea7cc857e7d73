"""How right the models of a sweep are: each point measured on the same labelled samples, in memory; resumable."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.files import Progress, write_atomic
from tunable_magmax.merging.methods import METHODS
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import Data
from tunable_magmax.workflows.measured import MeasuredFile, measure_all
from tunable_magmax.workflows.measuring import DataSet, Measurement, Measuring, Setting
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.prefer import completed
from tunable_magmax.workflows.sweep import SUMMARY, Sweep, SweepPoint

MEASURED, TABLE = "measured.jsonl", "sweep.csv"
FIXED = ("scope", "compare", "density", "include", "exclude", "out_dtype")
USUAL = {"scope": "model", "compare": "all"}


@dataclass(frozen=True)
class PointAccuracy:
    """The accuracy of a point: on all samples, on the mix that its weights are, and of each task.

    `tailored`: on the mix, with the head that `tmx tailor` would fit for these weights; the others are of the model as
    it is written, with its old head.
    """

    overall: Share
    mix: float
    tailored: float
    tasks: tuple[Share, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {
            "right": self.overall.right,
            "samples": self.overall.samples,
            "overall": self.overall.value,
            "mix": self.mix,
            "mix_tailored": self.tailored,
            "tasks": None if self.tasks is None else [None if not s.samples else s.value for s in self.tasks],
        }


def measure_sweep(
    run: Run | str | Path,
    sweep: Sweep,
    out: Path,
    data: Data = None,
    *,
    head: str | Path | None = None,
    limit: int | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Measures each point of a finished sweep; writes the result to its sweep.json and sweep.csv, and returns it.

    Points are merged again in memory, which gives the bits that were written, so reports alone are enough. Those that
    were measured before, by OUT/measured.jsonl, are not measured again.

    >>> measure_sweep("run", sweep, Path("out"), "site/test").points[0].accuracy["mix"]  # doctest: +SKIP
    0.71
    """
    run = run if isinstance(run, Run) else Run.open(run)
    check_measurable(sweep.method, sweep.options)
    reading = reading or Reading()
    seed = int(sweep.options.get("seed") or 0)
    with Measuring(run, head, seed=seed, device=reading.device, progress=progress) as measuring:
        opened = measuring.open_data("data", data, mixed=data is not None, limit=limit, reading=reading)
        settings = [setting for point in sweep.points for setting in _settings(run, sweep, point)]
        facts = [{"point": point.name, "head": head} for point in sweep.points for head in ("old", "tailored")]
        file = MeasuredFile(out / MEASURED)
        found = measure_all(measuring, zip(facts, settings, strict=True), opened, file, progress)
    pairs = zip(found[::2], found[1::2], settings[1::2], sweep.points, strict=True)
    points = [
        replace(
            point,
            accuracy=_accuracy(plain, tailored, setting, opened, len(run.tasks)).to_dict(),
        )
        for plain, tailored, setting, point in pairs
    ]
    measured = replace(
        sweep, points=tuple(points), data={"name": opened.title, "samples": len(opened), "of": opened.total}
    )
    write_atomic(out / SUMMARY, measured.to_json().encode())
    write_atomic(out / TABLE, table(measured, run.labels).encode())
    return measured


def check_measurable(method: str, options: Mapping[str, Any]) -> None:
    """Refuses options that the models which are measured in memory do not have."""
    usual = {**USUAL, **({} if "density" in METHODS[method].reads else {"density": options.get("density")})}
    strange = [name for name in FIXED if options.get(name) not in (None, usual.get(name), [], ())]
    if strange:
        raise InputError(
            f"--data measures merges with the usual {', '.join(strange)} only: leave out --{' and --'.join(strange)}, "
            "or measure each point with `tmx eval OUT/NAME --data DATA`"
        )


def _settings(run: Run, sweep: Sweep, point: SweepPoint) -> tuple[Setting, Setting]:
    """Returns the point with its old head, and as it would be tailored."""
    weights = [float(Fraction(weight)) for weight in point.weights]
    preference = completed(Preference.from_weights(weights), run)
    scale = sweep.options.get("scale", "matched")
    asked: float | str = "matched" if scale in (None, "matched") else float(scale)
    plain = Setting(preference, asked, sweep.method, fitted=False, exact=tuple(map(Fraction, point.weights)))
    return plain, replace(plain, fitted=True)


def _accuracy(plain: Measurement, tailored: Measurement, setting: Setting, data: DataSet, tasks: int) -> PointAccuracy:
    shares = plain.tasks(data, tasks)
    mix = setting.preference.weights
    return PointAccuracy(
        plain.overall,
        plain.mixed(data, mix).value,
        tailored.mixed(data, mix).value,
        None if shares is None else tuple(shares),
    )


def table(sweep: Sweep, labels: Sequence[str]) -> str:
    """Returns the points as CSV: weights, scale, leftovers and accuracies, a line each."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    weights, tasks = ([f"{kind} {label}" for label in labels] for kind in ("weight", "accuracy"))
    accuracies = ["accuracy", "accuracy on its mix", "accuracy on its mix, tailored"]
    rows.writerow(["point", *weights, "scale", "leftovers", *accuracies, *tasks])
    for point in sweep.points:
        found: Mapping[str, Any] = point.accuracy or {}
        own = [found.get(key) for key in ("overall", "mix", "mix_tailored")]
        each = found.get("tasks") or [None] * len(labels)
        shares = [float(Fraction(weight)) for weight in point.weights]
        rows.writerow([point.name, *shares, point.scale, point.leftovers, *map(_cell, [*own, *each])])
    return text.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
