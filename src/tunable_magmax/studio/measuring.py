"""Measures points of the page on labelled samples with the heads that `tmx tailor` would fit, on `Bench`."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.bench import Bench, BenchData, SiteFacts
from tunable_magmax.evaluation.comparison import MixedShare, sample_weights
from tunable_magmax.evaluation.run_models import BASE, MergeSpec
from tunable_magmax.files import Progress
from tunable_magmax.models.fitting import FittedHead
from tunable_magmax.models.head import Linear, builtin_head
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.evaluate import Data, open_labelled
from tunable_magmax.workflows.material import KeptSamples, site_shares
from tunable_magmax.workflows.options import Reading
from tunable_magmax.workflows.used_head import find_head

FIT_ROWS = 300
"""Kept samples that heads are fitted to here, two of each class at least; `tmx tailor` takes as many as it affords."""
KEPT = "kept"
"""The name of the data that are the kept samples themselves."""


@dataclass(frozen=True)
class Setting:
    """A merge for a mixture. `informed`: whether its head expects the mixture's classes, else all alike."""

    preference: Preference
    """With the class shares that the head gets if it is `informed`."""
    scale: float | str | None = "matched"
    method: str = "tunable_magmax"
    informed: bool = True

    @property
    def spec(self) -> MergeSpec:
        """The merge."""
        return MergeSpec(self.method, self.scale, self.preference.weights)

    @property
    def prior(self) -> bool:
        """Whether the head expects the mixture's classes."""
        return self.informed and self.preference.prior is not None

    @property
    def site(self) -> Preference:
        """The preference, with class shares only if the head gets them."""
        return self.preference if self.informed else replace(self.preference, prior=None)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Labelled samples that are measured on: `samples` of `total`. `mixed`: they are a site's mix already.

    `positions`: where they were in their source. `crossed`: they are rows that heads are fitted to, so each answer is
    that of a head which did not see the sample (cross-validation).
    """

    name: str
    title: str
    samples: BenchData
    total: int
    mixed: bool
    positions: tuple[int, ...]
    has_tasks: bool = True
    crossed: bool = False

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sample_tasks(self) -> NDArray[np.int64] | None:
        """The task of each sample, -1 for none; None where tasks are not known."""
        return self.samples.tasks if self.has_tasks else None

    def weights(self, mix: Sequence[float] | None) -> NDArray[np.float64]:
        """Returns what each sample counts: all alike, or by the mix where the samples are not mixed."""
        if mix is None or self.mixed or self.sample_tasks is None:
            return np.full(len(self), 1 / len(self))
        return sample_weights(self.sample_tasks, mix)


@dataclass(frozen=True, eq=False)
class Measurement:
    """Which samples of a data set a model gets right, in the order of the data set. `id`: one model, head and data.

    `scale`: the number that the merge's scale was. `head`: "fitted" or "old".
    """

    id: str
    data: str
    right: NDArray[np.bool_]
    scale: float
    head: str = "old"
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def overall(self) -> Share:
        """The share of all samples, however they are mixed."""
        return Share(int(self.right.sum()), len(self.right))

    def tasks(self, data: DataSet, count: int) -> list[Share] | None:
        """Returns the share of each task's samples; None where tasks are not known."""
        owner = data.sample_tasks
        if owner is None:
            return None
        return [Share(int(self.right[owner == t].sum()), int((owner == t).sum())) for t in range(count)]

    def mixed(self, data: DataSet, mix: Sequence[float] | None) -> MixedShare:
        """Returns the share on a mix of tasks."""
        return MixedShare.of(self.right, data.weights(mix))


class Measuring:
    """Measures models of one run on labelled samples; may be used by several threads.

    measuring = Measuring(run)
    data = measuring.open_data("heldout")
    measuring.measure(Setting(preference), data).overall.value
    """

    def __init__(self, run: Run, *, seed: int = 0, device: str | None = None, progress: Progress | None = None) -> None:
        used = find_head(run.base, None, run, "none")
        self.run = run
        self.bench = Bench(run, head=used.frozen, seed=seed, device=device, progress=progress)
        self.head = builtin_head(self.bench.classes) if self.bench.is_builtin else used.head
        kept = KeptSamples.open(self.bench) if self.bench.views else None
        equal = np.full(len(self.bench.classes), 1 / len(self.bench.classes))
        self.kept = None if kept is None else kept.take(self.bench, equal, FIT_ROWS)
        self._usual: dict[MergeSpec, FittedHead] = {}
        self._known: set[tuple[MergeSpec, str]] = set()
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the task vectors."""
        self.bench.close()

    # -- samples -----------------------------------------------------------------------------------------------------

    def open_data(self, name: str, data: Data = None, *, mixed: bool = False, limit: int | None = None) -> DataSet:
        """Opens labelled samples, by default the run's test data; of more than `limit`, a fixed random draw.

        Unless they are `mixed`, so many of one task as of another are drawn.
        """
        labelled, title = open_labelled(data, self.head, self.run, Reading())
        total = len(labelled)
        if limit is not None:
            labelled = labelled.draw(limit) if mixed else labelled.draw_evenly(limit)
        self.bench.forget(name)
        opened = self.bench.open_labelled(name, labelled)
        return DataSet(name, title, opened, total, mixed, opened.prepared.positions, labelled.sample_tasks is not None)

    def open_kept_data(self) -> DataSet | None:
        """Returns the kept samples as data to measure on, by cross-validation; None if there are too few."""
        if self.kept is None:
            return None
        # Rows of these classes judge whatever else heads are fitted to.
        often = np.bincount(self.kept.labels, minlength=len(self.bench.classes)) > 1
        judged = np.flatnonzero(often[self.kept.labels])
        if not len(judged):
            return None
        samples = self.kept.take(judged, KEPT)
        total = sum(entry.samples for entry in self.run.kept if entry is not None)
        title = "kept samples of the tasks (cross-validated)"
        return DataSet(KEPT, title, samples, total, False, tuple(judged.tolist()), crossed=True)

    def forget(self, name: str) -> None:
        """Forgets what was kept of a data set."""
        with self._lock:
            self.bench.forget(name)
            self._known = {(spec, data) for spec, data in self._known if data != name}

    # -- models ------------------------------------------------------------------------------------------------------

    def measure(
        self, setting: Setting, data: DataSet, check: Callable[[], None] | None = None, identity: str = ""
    ) -> Measurement:
        """Measures a model. `check` is called now and then, and may raise to stop it."""
        began = time.perf_counter()
        with self._lock:
            for part in [*([] if data.crossed else [data.samples]), *([] if self.kept is None else [self.kept])]:
                self.bench.features(setting.spec, part, check)
            embedded = time.perf_counter()
            right, head = self._answers(setting.spec, setting, data, check)
            scale = self.scale(setting)
        ended = time.perf_counter()
        seconds = {"features": embedded - began, "head": ended - embedded, "total": ended - began}
        spent = {phase: round(value, 4) for phase, value in seconds.items()}
        return Measurement(identity, data.name, right, scale, head, spent)

    def identify(self, setting: Setting, data: DataSet) -> str:
        """Returns the id of a measurement in this session: equal ids have equal answers."""
        parts = (setting.spec, self.site(setting).key, data.name, data.positions, data.samples.labels.tobytes())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def measure_model(self, spec: MergeSpec, setting: Setting, data: DataSet) -> NDArray[np.bool_]:
        """Returns which samples another model of the run gets right, with its own head for the setting's mixture."""
        with self._lock:
            right, _ = self._answers(spec, setting, data, None)
            self._known.add((spec, data.name))
            return right

    def measure_roughly(self, spec: MergeSpec, setting: Setting, data: DataSet) -> NDArray[np.bool_]:
        """Returns about the same at no cost: with the head that was fitted to equal weights, moved to the mixture."""
        with self._lock:
            self._known.add((spec, data.name))
            if spec not in self._usual:
                equal = Setting(Preference.equal(len(self.run.tasks)), informed=False)
                self._usual[spec] = self.bench.fit(spec, self.site(equal))
            fit = self._usual[spec]
            if data.crossed:
                return _of_rows(fit, data)
            moved = np.log(np.maximum(self.site(setting).shares, 1e-9)) + np.log(len(self.bench.classes))
            return self._right(spec, Linear(fit.linear.weight, fit.linear.bias + moved), data)

    def knows(self, spec: MergeSpec, data: DataSet) -> bool:
        """Whether a model was measured already."""
        return (spec, data.name) in self._known

    def predictions(self, setting: Setting, data: DataSet) -> tuple[list[str], list[str]]:
        """Returns the classes that a model predicts for the samples, and those that the base does, each by its head."""
        named = []
        with self._lock:
            for spec in (setting.spec, BASE):
                logits = self.bench.logits(spec, data.samples, self.bench.fit(spec, self.site(setting)).linear)
                named.append([self.bench.classes[index] for index in logits.argmax(axis=1).tolist()])
        return named[0], named[1]

    def scale(self, setting: Setting) -> float:
        """Returns the number that a merge's scale is."""
        return 0.0 if setting.spec.is_base else float(self.bench.report(setting.spec).scale)

    def site(self, setting: Setting) -> SiteFacts:
        """Returns what heads are fitted with, as `tmx tailor` does for a mixture without samples of the site."""
        fits = bool(self.bench.views)
        shares = site_shares(setting.site if fits else replace(setting.preference, prior=None), self.bench.classes)
        return SiteFacts(setting.preference.weights, shares, self.kept, moved=fits)

    def _answers(
        self, spec: MergeSpec, setting: Setting, data: DataSet, check: Callable[[], None] | None
    ) -> tuple[NDArray[np.bool_], str]:
        fit = self.bench.fit(spec, self.site(setting), check)
        return _of_rows(fit, data) if data.crossed else self._right(spec, fit.linear, data), fit.kind

    def _right(self, spec: MergeSpec, head: Linear, data: DataSet) -> NDArray[np.bool_]:
        right: NDArray[np.bool_] = self.bench.logits(spec, data.samples, head).argmax(axis=1) == data.samples.labels
        return right


def _of_rows(fit: FittedHead, data: DataSet) -> NDArray[np.bool_]:
    """Returns the cross-validated answers to the rows that are the data."""
    right: NDArray[np.bool_] = fit.right[np.isin(fit.judged, data.positions)]
    return right
