"""What `tmx compare` does: says which model of a run is best for a site, by labelled samples of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from tunable_magmax.engines.outputs import read_report
from tunable_magmax.errors import InputError, plural, some_of
from tunable_magmax.evaluation.accuracy import Labelled, Share
from tunable_magmax.evaluation.bench import Bench, BenchData
from tunable_magmax.evaluation.comparison import ALPHA, Bools, Paired, Verdict, holm, paired
from tunable_magmax.evaluation.run_models import BASE, MergeSpec, refuse_too_large
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference, read_preference
from tunable_magmax.preference.site import completed
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import find_head, open_labelled
from tunable_magmax.workflows.material import open_material
from tunable_magmax.workflows.options import CompareOptions, Reading, TailorOptions
from tunable_magmax.workflows.predict import load_classifier
from tunable_magmax.workflows.tailor import choose_spec
from tunable_magmax.workflows.tailored import read_record

SCALES = (0.5, 1.0)
"""Scales of the Tunable MAGMAX merges that are compared."""
HeadKind = Literal["fitted", "old", "own"]
Answers: TypeAlias = tuple[str, HeadKind, MergeSpec | None, Bools]
"""A model's name, its head, its merge (None of a directory), and which samples it gets right."""


@dataclass(frozen=True)
class Row:
    """A model with a head, against the tailored model, which has None in all that says how they differ.

    `head`: "fitted" for this comparison, "old" where nothing can be fitted, or "own", which the tailored model's
    directory holds.
    `p_value`: corrected for the number of comparisons.
    """

    model: str
    head: HeadKind
    spec: MergeSpec | None
    share: Share
    pair: Paired | None = None
    p_value: float | None = None
    verdict: Verdict | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        spec, pair = self.spec, self.pair
        return {
            "model": self.model,
            "head": self.head,
            **{name: getattr(spec, name, None) for name in ("method", "scale", "checkpoint")},
            "right": self.share.right,
            "accuracy": self.share.value,
            "interval": list(self.share.interval()),
            **{name: getattr(pair, name, None) for name in ("won", "lost", "difference")},
            "p_value": self.p_value,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Models of a run on a site's samples, best first; of equal ones the tailored, then the simpler one.

    `model`: the directory of the tailored model, if one was given. `kept`: kept samples that heads are fitted to.
    """

    run: str
    data: str
    model: str | None
    weights: dict[str, float]
    samples: int
    unreadable: int
    unknown_labels: int
    kept: int
    rows: tuple[Row, ...]

    def __repr__(self) -> str:
        return f"Comparison({len(self.rows)} models of {self.run} on {self.data}:\n  {self.summary()[0]})"

    @property
    def tailored(self) -> Row:
        """The model in `model`; else what `tmx tailor` would choose for the preference."""
        return next(row for row in self.rows if row.pair is None)

    def summary(self) -> list[str]:
        """Returns who wins, and whether a checkpoint would do without any merge."""
        mine, best = self.tailored, self.rows[0]
        others = [row for row in self.rows if row is not mine]
        fewest = least_samples(len(others))
        if self.samples < fewest:
            count = plural(self.samples, "sample")
            return [f"No verdict: {count} cannot tell any of these models apart; at least {fewest} are needed."]
        worse = sum(row.verdict == "clearly worse" for row in others)
        lines = [f"The tailored model has {mine.share.value:.1%} and is clearly better than {worse} of {len(others)}."]
        plain = next((row for row in others if row.spec is not None and row.spec.checkpoint is not None), mine)
        told = [best] if plain.verdict == "clearly worse" else dict.fromkeys((best, plain))
        return [*lines, *(_verdict(row, mine, len(others)) for row in told if row is not mine)]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {**vars(self), "rows": rows, "tailored": self.rows.index(self.tailored), "summary": self.summary()}


def _verdict(row: Row, tailored: Row, comparisons: int) -> str:
    """Returns what the samples say of a model against the tailored one, as a sentence."""
    shares = f"{row.share.value:.1%} against {tailored.share.value:.1%}"
    if row.verdict != "cannot tell" or row.pair is None:
        return f"`{row.model}` is {row.verdict} than the tailored model: {shares}."
    needed = row.pair.needed(ALPHA / comparisons)
    enough = None if needed is None else max(needed, least_samples(comparisons))
    would = "" if enough is None else f"; about {enough:,} would, if the difference is real"
    return f"{plural(round(row.share.samples), 'sample')} cannot tell `{row.model}` from it ({shares}){would}."


def least_samples(comparisons: int) -> int:
    """Returns how many samples a sign test needs before any difference can be clear among so many comparisons.

    >>> least_samples(1), least_samples(20)
    (6, 10)
    """
    return 1 + math.ceil(math.log2(max(1, comparisons) / ALPHA))


def compared_rows(models: Sequence[Answers], tailored: int) -> tuple[Row, ...]:
    """Compares models, each by the samples that it gets right, with the one at place `tailored`; best first."""
    mine = models[tailored][3]
    pairs = [paired(right, mine) for *_, right in models]
    others = [k for k in range(len(models)) if k != tailored]
    corrected = dict(zip(others, holm([pairs[k].p_value for k in others]), strict=True))
    rows = []
    for k, (model, head, spec, right) in enumerate(models):
        row = Row(model, head, spec, Share(int(right.sum()), len(right)))
        if k != tailored:
            row = replace(row, pair=pairs[k], p_value=corrected[k], verdict=pairs[k].verdict(corrected[k]))
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.share.right, row.pair is not None)))


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(
    run: Run | str | Path,
    options: CompareOptions = CompareOptions(),  # noqa: B008  (frozen)
    progress: Progress | None = None,
) -> Comparison:
    """Measures base, every task's checkpoint, merges and the tailored model on the same labelled samples.

    Every model gets a head that is fitted to it with the run's kept samples, for the class shares of the preference;
    never with the samples that are compared on. Each is compared with the tailored model by an exact sign test,
    corrected for the number of comparisons. The directory of a tailored model is compared as it is.

    >>> compare("run", CompareOptions(data="site/test")).rows[0].model  # doctest: +SKIP
    'tunable_magmax 0.5'
    """
    run, reading = Run.current(run), options.reading
    chosen, folder, seed = _preference(run, options)
    refuse_too_large(run.base, run.tasks)
    head = find_head(run.base, None, run)
    labelled, origin = open_labelled(options.data, head.head, run, reading)
    with Bench(run, head=head.frozen, seed=seed, device=reading.device, progress=progress) as bench:
        samples = bench.open_labelled("compared", labelled)
        specs = _candidates(run, chosen.weights)
        material, mine = open_material(bench, chosen), None
        if folder is None:
            mine, _, _ = choose_spec(bench, chosen, TailorOptions(seed=seed), material)
            specs = list(dict.fromkeys([*specs, mine]))
        models: list[Answers] = []
        for done, spec in enumerate(specs, 1):
            fitted = bench.fit(spec, material.all)
            kind: HeadKind = "old" if fitted.kind == "old" else "fitted"
            right = bench.logits(spec, samples, fitted.linear).argmax(axis=1) == samples.labels
            models.append((spec.title(run.names), kind, spec, right))
            if progress is not None:
                progress("comparing", done, len(specs))
        if folder is not None:
            right = _right_as_written(folder, labelled, samples, bench.classes, reading)
            models.append((folder.name or str(folder), "own", None, right))
    return Comparison(
        run=str(run.path),
        data=origin,
        model=None if folder is None else str(folder),
        weights=dict(zip(run.names, map(float, chosen.weights), strict=True)),
        samples=len(samples),
        unreadable=len(labelled) - len(samples),
        unknown_labels=labelled.unknown,
        kept=0 if material.all.kept is None else len(material.all.kept),
        rows=compared_rows(models, next(k for k, (_, _, spec, _) in enumerate(models) if spec == mine)),
    )


def _preference(run: Run, options: CompareOptions) -> tuple[Preference, Path | None, int]:
    """Returns the preference, the directory of the tailored model if it is given, and the seed of its merges."""
    given = options.preference
    chosen = Preference.equal(len(run.tasks)) if given is None else read_preference(given, run.names, len(run.tasks))
    if given is None or isinstance(given, Preference) or not Path(given).is_dir():
        return completed(chosen, run), None, options.seed
    read_record(Path(given))
    return chosen, Path(given), read_report(Path(given)).seed


def _candidates(run: Run, weights: Sequence[float]) -> list[MergeSpec]:
    """Returns what is worth comparing: base, every task's checkpoint, other merges, Tunable MAGMAX at each scale."""
    shares = tuple(weights)
    return [
        BASE,
        *(MergeSpec(checkpoint=t) for t in range(1, len(run.tasks) + 1)),
        MergeSpec("average", 1.0, shares),
        MergeSpec("magmax", "matched"),
        MergeSpec("tsv", 1.0, shares),
        *(MergeSpec("tunable_magmax", scale, shares) for scale in SCALES),
    ]


def _right_as_written(
    folder: Path, labelled: Labelled, data: BenchData, classes: Sequence[str], reading: Reading
) -> Bools:
    """Returns which samples the model in a directory gets right, as `tmx predict` answers."""
    model = load_classifier(folder, reading.device)
    if lacking := [name for name in classes if name not in model.classes]:
        raise InputError(
            f"{folder} does not know {plural(len(lacking), 'class', 'classes')} of the run, first "
            f"{some_of(lacking[:1], show=repr)}: it was made with another head"
        )
    answers = model.predict_samples(labelled.samples.subset(data.prepared.positions))
    return np.array([each.label == classes[label] for each, label in zip(answers, data.labels, strict=True)])
