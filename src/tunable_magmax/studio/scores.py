"""Scores points of the page on `Bench`, with the heads that `tmx tailor` would fit, beside what they are compared with.

These lines are the same merge with the old head, the base, the last checkpoint, the best single task and MAGMAX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Ints
from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.comparison import Bools, Paired, Verdict, holm, mixed_share, paired, sample_weights
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.files import Progress
from tunable_magmax.models.head import Linear
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.studio.points import Setting
from tunable_magmax.workflows.evaluate import Data, find_head, open_labelled
from tunable_magmax.workflows.material import KeptSamples, site_shares
from tunable_magmax.workflows.options import Reading

FIT_ROWS = 300
"""Kept samples that heads are fitted to here, two of each class at least; `tmx tailor` takes as many as it affords."""
MAGMAX = MergeSpec("magmax", "matched")


@dataclass(frozen=True, eq=False)
class DataSet:
    """Labelled samples that are measured on: `samples` of `total`. `mixed`: they are a site's mix already.

    `judged`: they are these of the rows that heads are fitted to, so each answer is that of a head which did not see
    the sample (cross-validation).
    """

    name: str
    title: str
    samples: BenchData
    total: int
    mixed: bool
    judged: Ints | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tasks(self) -> Ints | None:
        """Each sample's task [n], -1 for none; None where tasks are not known."""
        return self.samples.tasks if (self.samples.tasks >= 0).any() else None

    def weights(self, mix: Sequence[float]) -> NDArray[np.float64]:
        """Returns what each sample counts: all alike, or by the mix where the samples are not mixed."""
        if self.mixed or self.tasks is None:
            return np.full(len(self), 1 / len(self))
        return sample_weights(self.tasks, mix)


@dataclass(frozen=True)
class Line:
    """A model beside a point. `mix`: its share on the mix; `difference` and `verdict` are the point's against it.

    `task`: the number of the best single task, from 1. `needed`: about how many samples would tell the two
    apart, if their difference is real.
    """

    name: str
    task: int | None
    tasks: list[float | None] | None
    mix: dict[str, Any]
    difference: float
    verdict: Verdict
    needed: int | None


@dataclass(frozen=True)
class Point:
    """A measured model. `id`: equal ids have equal answers. `overall`: of all samples; `share`: on the mix."""

    id: str
    weights: tuple[float, ...]
    scale: float | str | None
    scale_used: float
    method: str
    head: str
    preset: str | None
    data: str
    tasks: list[dict[str, Any]] | None
    overall: dict[str, Any]
    mix: tuple[float, ...]
    share: dict[str, Any]
    lines: list[Line]


class Scores:
    """Scores models of one run on labelled samples; may be used by several threads.

    scores = Scores(run)
    data = scores.open_data("heldout")
    scores.point(Setting(preference), data, preference.weights).overall["accuracy"]
    """

    def __init__(self, run: Run, device: str | None = None, progress: Progress | None = None) -> None:
        used = find_head(run.base, None, run)
        self.run = run
        self.bench = Bench(run, head=used.frozen, device=device, progress=progress)
        self.head = used.head
        kept = KeptSamples.open(self.bench) if self.bench.views else None
        alike = np.full(len(self.bench.classes), 1 / len(self.bench.classes))
        self.kept = None if kept is None else kept.take(self.bench, alike, FIT_ROWS)
        self.singles = [MergeSpec(checkpoint=t) for t in range(1, len(run.tasks) + 1)]
        self._rough: dict[tuple[MergeSpec, str], Bools] = {}
        self._number = count()

    # -- samples -----------------------------------------------------------------------------------------------------

    def open_data(self, name: str, data: Data = None, *, mixed: bool = False, limit: int) -> DataSet:
        """Opens labelled samples, by default the run's test data; of more than `limit`, a fixed random draw."""
        labelled, title = open_labelled(data, self.head, self.run, Reading())
        total = len(labelled)
        labelled = labelled.draw(limit)
        opened = self.bench.open_labelled(f"{name} {next(self._number)}", labelled)
        return DataSet(name, title, opened, total, mixed)

    def open_kept_data(self) -> DataSet | None:
        """Returns the kept samples as data to measure on, by cross-validation; None if there are too few."""
        if self.kept is None:
            return None
        # Rows of these classes judge whatever else heads are fitted to.
        often = np.bincount(self.kept.labels, minlength=len(self.bench.classes)) > 1
        judged = np.flatnonzero(often[self.kept.labels])
        if not len(judged):
            return None
        samples = self.kept.take(judged, "kept")
        total = sum(entry.samples for entry in self.run.kept if entry is not None)
        title = "kept samples of the tasks (cross-validated)"
        return DataSet("kept", title, samples, total, False, judged)

    # -- points ------------------------------------------------------------------------------------------------------

    def point(self, setting: Setting, data: DataSet, mix: Sequence[float]) -> Point:
        """Scores a model on a mix."""
        facts = self.facts(setting)
        right = self.right(setting.spec, facts, data)
        key = repr((setting.spec, facts.key, data.samples.name))
        return Point(
            id=hashlib.sha256(key.encode()).hexdigest()[:12],
            weights=setting.preference.weights,
            scale=setting.scale,
            scale_used=self.scale(setting),
            method=setting.method,
            head=self.bench.fit(setting.spec, facts).kind,
            preset=setting.preset,
            data=data.name,
            tasks=self._by_task(right, data),
            overall=Share(int(right.sum()), len(right)).to_dict(),
            mix=tuple(mix),
            share=mixed_share(right, data.weights(mix)).to_dict(),
            lines=self._lines(setting, facts, data, right, data.weights(mix)),
        )

    def facts(self, setting: Setting) -> SiteFacts:
        """Returns what heads are fitted with, as `tmx tailor` does for a mixture without samples of the site."""
        fits = bool(self.bench.views)
        known = setting.preference if fits else replace(setting.preference, prior=None)
        return SiteFacts(known.weights, site_shares(known, self.bench.classes), self.kept, moved=fits)

    def right(self, spec: MergeSpec, facts: SiteFacts, data: DataSet) -> Bools:
        """Returns which samples a model gets right with the head that fits it."""
        fit = self.bench.fit(spec, facts)
        if data.judged is not None:
            crossed: Bools = fit.right[np.isin(fit.judged, data.judged)]
            return crossed
        return self._right(spec, fit.linear, data)

    def scale(self, setting: Setting) -> float:
        """Returns the number that a merge's scale is."""
        return 0.0 if setting.spec.is_base else float(self.bench.report(setting.spec).scale)

    def _right(self, spec: MergeSpec, head: Linear, data: DataSet) -> Bools:
        right: Bools = self.bench.logits(spec, data.samples, head).argmax(axis=1) == data.samples.labels
        return right

    def _by_task(self, right: Bools, data: DataSet) -> list[dict[str, Any]] | None:
        if data.tasks is None:
            return None
        owned = [data.tasks == t for t in range(len(self.singles))]
        return [Share(int(right[own].sum()), int(own.sum())).to_dict() for own in owned]

    # -- lines -------------------------------------------------------------------------------------------------------

    def open_lines(self, data: DataSet) -> Iterator[None]:
        """Scores the models that lines are made of with heads that are fitted to equal weights, one at each step."""
        facts = self.facts(Setting(Preference.equal(len(self.singles))))
        for spec in (BASE, *self.singles, MAGMAX):
            self._rough[spec, data.samples.name] = self.right(spec, facts, data)
            yield

    def has_lines(self, data: DataSet) -> bool:
        """Whether all that points are compared with was scored on some data."""
        return (MAGMAX, data.samples.name) in self._rough

    def _lines(
        self, setting: Setting, facts: SiteFacts, data: DataSet, mine: Bools, weights: NDArray[np.float64]
    ) -> list[Line]:
        """Compares a point with the lines, each with its own head for the same mixture; empty until they are open.

        The best single task is chosen by heads that were fitted once, to equal weights.
        """
        if not self.has_lines(data):
            return []
        best = max(self.singles, key=lambda spec: float(weights[self._rough[spec, data.samples.name]].sum()))
        specs = {"base": BASE, "last": self.singles[-1], "best": best, "magmax": MAGMAX}
        right = {spec: self.right(spec, facts, data) for spec in specs.values()}
        answers = {name: right[spec] for name, spec in specs.items()}
        if self.bench.fit(setting.spec, facts).kind == "fitted":
            old = self.bench.fit(setting.spec, SiteFacts(facts.weights, facts.shares, moved=False)).linear
            answers = {"old": self._right(setting.spec, old, data), **answers}
        lines = []
        for name, (pair, verdict) in compared(mine, answers, weights, len(self.singles)).items():
            shares, mix = self._by_task(answers[name], data), mixed_share(answers[name], weights).to_dict()
            tasks = None if shares is None else [share["accuracy"] for share in shares]
            single = best.checkpoint if name == "best" else None
            lines.append(Line(name, single, tasks, mix, pair.difference, verdict, pair.needed()))
        return lines


def compared(
    mine: Bools, answers: Mapping[str, Bools], weights: NDArray[np.float64], tries: int
) -> dict[str, tuple[Paired, Verdict]]:
    """Compares a point with lines on the same samples; p-values are corrected by Holm's method.

    The line "best" is the best of so many `tries` on these very samples: it had so many to look better by chance.
    """
    pairs = {name: paired(mine, right, weights) for name, right in answers.items()}
    chances = {name: pair.p_value for name, pair in pairs.items()}
    if pairs["best"].difference < 0:
        chances["best"] = min(1.0, tries * chances["best"])
    corrected = dict(zip(chances, holm(list(chances.values())), strict=True))
    return {name: (pair, pair.verdict(corrected[name])) for name, pair in pairs.items()}
