"""What heads are fitted to at a site: kept samples of the tasks, and the site's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunable_magmax.checkpoints.companions import are_generic
from tunable_magmax.data.arrays import Floats, Ints, choose_rows
from tunable_magmax.data.samples import Samples, by_name, joined
from tunable_magmax.evaluation.bench import ANCHORS, LEAST_WEIGHT, Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.choosing import CANDIDATES, affordable, choose_kept, sizes
from tunable_magmax.evaluation.run_models import task_labels
from tunable_magmax.preference.preference import Preference
from tunable_magmax.preference.site import Site
from tunable_magmax.runs.kept import open_kept
from tunable_magmax.runs.run import Run

MOST_JUDGING = 600
"""More labelled samples would cost time, and tell candidates apart hardly better."""
LEAST_LABELLED = 8
"""With fewer labelled samples of the site, and no kept ones, nothing is chosen by them."""
MOST_ANCHORS = 200
"""Inputs of the site from which those are taken that show how a task's features moved."""
FEWEST_ANCHORS = 10
"""So many show it where embedding is dear and many tasks matter."""


def site_shares(preference: Preference, classes: Sequence[str]) -> Floats:
    """Returns how often each class occurs at the site, all alike where the tasks' classes are not known."""
    if preference.prior is None or not any(name in preference.prior.shares for name in classes):
        return np.full(len(classes), 1 / len(classes))
    shares: Floats = np.exp(preference.prior.bias(classes).astype(np.float64))
    shares /= shares.sum()
    return shares


@dataclass(frozen=True, eq=False)
class KeptSamples:
    """The kept samples of all tasks, task after task. `labels` [n]: indices into a bench's classes, -1: unknown.

    `tasks` [n]: each sample's task. `trained`: whether any of them was trained on. `decoded`: all of them decoded,
    where many sites take from them; else those that are taken are decoded then.
    """

    samples: Samples
    tasks: tuple[int, ...]
    labels: Ints
    trained: bool
    decoded: BenchData | None = None

    @classmethod
    def open(cls, bench: Bench) -> KeptSamples | None:
        """Opens them; None if no task has any."""
        run = bench.run
        parts = {t: samples for t in range(len(run.tasks)) if (samples := open_kept(run, t)) is not None}
        if not parts:
            return None
        names: list[str] = []
        for t, samples in parts.items():
            classes = _class_names(run, t, samples)
            names += [classes[label] for label in samples.require_labels()]
        place = {name: index for index, name in enumerate(bench.classes)}
        labels = np.array([place.get(name, -1) for name in names], dtype=np.int64)
        tasks = tuple(t for t, samples in parts.items() for _ in range(len(samples)))
        trained = any(entry is not None and entry.source == "training" for entry in run.kept)
        return cls(joined(list(parts.values()), "kept samples").labelled(names), tasks, labels, trained)

    def decode(self, bench: Bench) -> KeptSamples:
        """Returns the same with all of them decoded; those that cannot be read are left out."""
        data = self._open(bench, np.arange(len(self.labels)), "kept")
        readable = list(data.prepared.positions)
        return replace(
            self,
            samples=self.samples.subset(readable),
            tasks=tuple(self.tasks[k] for k in readable),
            labels=self.labels[readable],
            decoded=data,
        )

    def first(self, bench: Bench, count: int = 8) -> BenchData:
        """Returns the first few of the first task, to see how long they are."""
        rows = np.arange(min(count, self.tasks.count(self.tasks[0])))
        return self._open(bench, rows, "length") if self.decoded is None else self.decoded.take(rows, "length")

    def take(self, bench: Bench, shares: Floats, most: int) -> BenchData | None:
        """Returns at most `most` of them, more of the classes that the site has; None if none has a known class."""
        known = np.flatnonzero(self.labels >= 0)
        if not len(known):
            return None
        wanted = known[choose_kept(self.labels[known], shares, most)]
        name = f"kept-{hashlib.sha256(wanted.tobytes()).hexdigest()[:16]}"
        return self._open(bench, wanted, name) if self.decoded is None else self.decoded.take(wanted, name)

    def _open(self, bench: Bench, rows: Ints, name: str) -> BenchData:
        places = rows.tolist()
        return bench.open(name, self.samples.subset(places), [self.tasks[k] for k in places])


def _class_names(run: Run, task: int, samples: Samples) -> tuple[str, ...]:
    """Returns what the classes of a task's samples are called in the run's merged classifier."""
    if not are_generic(samples.classes):
        return samples.classes
    labels = task_labels(run.base, run.tasks)[task]
    by_plain = {name.rpartition("/")[2]: name for name in labels or ()}
    return tuple(by_plain.get(name, name) for name in samples.classes)


@dataclass(frozen=True, eq=False)
class Material:
    """What heads are fitted to: `all` that is affordable, `few` with fewer kept samples, to choose a model by.

    Where embedding is dear both are the same, so that no model embeds a kept sample twice.

    `candidates`: how many models may be tried. `trained_on`: whether a kept sample was trained on.
    """

    all: SiteFacts
    few: SiteFacts
    candidates: int
    trained_on: bool

    @property
    def can_judge(self) -> bool:
        """Whether there are labelled samples enough to choose by."""
        labelled = self.all.labelled
        return self.few.kept is not None or (labelled is not None and len(labelled) >= LEAST_LABELLED)


def open_material(
    bench: Bench,
    preference: Preference,
    site: Site | None = None,
    *,
    fits: bool = True,
    kept: KeptSamples | None = None,
) -> Material:
    """Takes the kept samples to embed for a site, from `kept` or the run's, and the site's own samples.

    Labelled ones are to fit to, inputs show how features moved. Without `fits`, or where a fitted head could not be
    written, only class shares count.
    """
    shares, weights = site_shares(preference, bench.classes), tuple(preference.weights)
    if not (fits and bench.views):
        facts = SiteFacts(weights, shares, moved=False)
        return Material(facts, facts, CANDIDATES, False)
    kept = KeptSamples.open(bench) if kept is None else kept
    facts, few, count, inputs = SiteFacts(weights, shares), None, CANDIDATES, MOST_ANCHORS
    if kept is not None:
        total = affordable(bench, kept.first(bench))
        count, judging, most = sizes(total)
        matter = max(1, sum(weight >= LEAST_WEIGHT for weight in weights))
        # Each task's checkpoint and each model that is tried embed anchors; they cost half of what choosing may.
        anchors = min(ANCHORS, max(FEWEST_ANCHORS, total // (4 * (matter + count))))
        many = kept.take(bench, shares, most)
        few = many if judging == most else kept.take(bench, shares, min(judging, MOST_JUDGING))
        inputs = anchors if judging == most else MOST_ANCHORS
        facts = replace(facts, kept=many, anchors=anchors)
    if site is not None:
        labelled, seen = _own_samples(bench, site, inputs)
        facts = replace(facts, labelled=labelled, inputs=seen)
    return Material(facts, replace(facts, kept=few), count, kept is not None and kept.trained)


def _own_samples(bench: Bench, site: Site, most: int) -> tuple[BenchData | None, BenchData | None]:
    """Opens the labelled samples of a site, and at most so many of its inputs where rows of profiles can be moved."""
    labelled, run = None, bench.run
    if site.sources.labelled is not None:
        samples = site.open_samples("labelled")
        names = by_name(samples.label_names(), [bench.classes], samples.origin)
        home = {name: t for t, names in enumerate(run.classes.values()) for name in names}
        labelled = bench.open("labelled", samples.labelled(names), [home.get(name, -1) for name in names])
    given = [name for name in ("inputs", "labelled") if getattr(site.sources, name) is not None]
    if not given or None in run.profiles or bench.is_builtin:
        return labelled, None
    samples = site.open_samples(given[0])
    rows = choose_rows(len(samples), most, site.seed)
    return labelled, bench.open("inputs", replace(samples.subset(rows), labels=None, classes=()))
