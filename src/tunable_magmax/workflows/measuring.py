"""Measures merges of a run at any weights, scale and method, in memory: what `sweep --data` and the studio are made of.

A `Setting` is a model; a `DataSet` says on which samples; a `Measurement` which of them the model gets right.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.evaluation.accuracy import Share
from tunable_magmax.evaluation.evaluator import Evaluator
from tunable_magmax.evaluation.mixture import MixedShare, mixed_share, sample_weights
from tunable_magmax.evaluation.run_models import refuse_adapters, scoring_encoder
from tunable_magmax.files import Progress
from tunable_magmax.preference.preference import Preference
from tunable_magmax.runs.run import Run
from tunable_magmax.workflows.candidates import Candidate, Merges, merge_by, right_answers
from tunable_magmax.workflows.scoring import Data, Reading, find_head, open_head, open_labelled

if TYPE_CHECKING:
    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.encoder import Encoder
    from tunable_magmax.models.head import Head
    from tunable_magmax.preference.calibration import Calibration

SAMPLES = 400
"""So many samples are measured on by default: on two cores a small encoder needs a tenth of a second for them."""
KEPT = 64
"""Models whose logits stay in memory, so that another prior costs no forward pass."""


@dataclass(frozen=True)
class Setting:
    """A model: a merge of a preference's weights at a scale. `informed`: whether its head gets the site prior."""

    preference: Preference
    """With the prior that the head gets if it is `informed`."""
    scale: float | str = "matched"
    method: str = "tunable_magmax"
    informed: bool = True
    exact: tuple[Fraction, ...] | None = None
    """Weights to merge with that floats may not hold, such as 1/3, or that are factors."""

    @property
    def weights(self) -> tuple[float | Fraction, ...]:
        """The weights that are merged with."""
        return self.preference.weights if self.exact is None else self.exact

    @property
    def candidate(self) -> Candidate:
        """The merge."""
        return merge_by(self.method, self.scale)

    @property
    def prior(self) -> bool:
        """Whether the head has a site prior."""
        return self.informed and self.preference.prior is not None

    @property
    def site(self) -> Preference:
        """The preference, with a prior only if the head gets it."""
        return self.preference if self.informed else replace(self.preference, prior=None)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Labelled samples that are measured on: `samples` of `total`. `mixed`: they are a site's mix already."""

    name: str
    title: str
    evaluator: Evaluator
    total: int
    mixed: bool

    def __len__(self) -> int:
        return len(self.evaluator)

    @property
    def sample_tasks(self) -> NDArray[np.int64] | None:
        """The task of each sample, -1 for none; None where tasks are not known."""
        return self.evaluator.labelled.sample_tasks

    def weights(self, mix: Sequence[float] | None) -> NDArray[np.float64]:
        """Returns what each sample counts: all alike, or by the mix where the samples are not mixed."""
        if mix is None or self.mixed or self.sample_tasks is None:
            return np.full(len(self), 1 / len(self))
        return sample_weights(self.sample_tasks, mix)

    @property
    def digest(self) -> str:
        """What the samples are recognised by: their positions and labels in data of this name."""
        labelled = self.evaluator.labelled
        return _digest([self.title, list(labelled.positions), labelled.truth.tolist()])


@dataclass(frozen=True, eq=False)
class Measurement:
    """Which samples of a data set a model gets right, in the order of the data set. `id`: one model, data and prior."""

    id: str
    data: str
    right: NDArray[np.bool_]
    scale: float
    """The number that the merge's scale was."""
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
        return mixed_share(self.right, data.weights(mix))


class Measuring:
    """Measures models of one run on labelled samples. A context manager; may be used by several threads.

    with Measuring(run) as measuring:
        data = measuring.open_data("heldout")
        measuring.measure(Setting(preference), data).overall.value
    """

    def __init__(
        self,
        run: Run,
        head: str | Path | None = None,
        *,
        seed: int = 0,
        device: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        refuse_adapters(run)
        self.run, self.device, self.progress = run, device, progress
        self.head_file, _ = find_head(run.base, head, run)
        self.head: Head = open_head(self.head_file, "none")[0]
        self.merges = Merges(run, seed=seed, progress=progress, own=self.head.builtin)
        self._encoder: Encoder | None = None
        self._calibration: Calibration | None = None
        self._lock = threading.RLock()
        self._kept: OrderedDict[tuple[Any, ...], NDArray[np.float32]] = OrderedDict()
        self._reports: OrderedDict[tuple[Any, ...], MergeReport] = OrderedDict()
        self._heads: OrderedDict[tuple[Any, ...], tuple[float, NDArray[np.float32] | None]] = OrderedDict()
        self._checkpoints: dict[tuple[str, Candidate], NDArray[np.float32]] = {}
        files = [run.base, *run.tasks, *([self.head_file] if isinstance(self.head_file, Path) else [])]
        self._identity = _digest([_sizes(file) for file in files])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the task vectors."""
        with self._lock:
            self.merges.close()

    def open_data(
        self,
        name: str,
        data: Data = None,
        *,
        mixed: bool = False,
        limit: int | None = SAMPLES,
        reading: Reading | None = None,
    ) -> DataSet:
        """Opens labelled samples, by default the run's test data; of more than `limit`, a seeded draw.

        Unless they are `mixed`, so many of one task as of another are drawn.
        """
        reading = replace(reading or Reading(), limit=None)
        labelled, title = open_labelled(data, self.head, self.run, reading)
        total = len(labelled)
        if limit is not None:
            labelled = labelled.draw(limit, reading.seed) if mixed else labelled.draw_evenly(limit, reading.seed)
        options: dict[str, Any] = {"batch": reading.batch, "strict": reading.strict, "progress": self.progress}
        with self._lock:
            evaluator = Evaluator(self.encoder, self.head, labelled, **options)
        return DataSet(name, title, evaluator, total, mixed)

    @property
    def encoder(self) -> Encoder:
        """The base's encoder, whose weights are replaced by those of whatever is measured."""
        if self._encoder is None:
            self._encoder = scoring_encoder(self.run, self.head, self.device)
        return self._encoder

    def measure(
        self, setting: Setting, data: DataSet, check: Callable[[], None] | None = None, identity: str | None = None
    ) -> Measurement:
        """Measures a model. `check` is called now and then, and may raise to stop it. `identity`: its id, if known."""
        began = time.perf_counter()
        with self._lock:
            logits, seconds = self._logits(setting, data, check)
            scale = float(self.report(setting).scale)
        right = right_answers(*self.answers(logits, data, setting.site))
        spent = {**seconds, "total": round(time.perf_counter() - began, 4)}
        return Measurement(identity or self.identify(setting, data), data.name, right, scale, spent)

    def measure_checkpoint(self, checkpoint: Candidate, data: DataSet, site: Preference | None) -> NDArray[np.bool_]:
        """Returns which samples a checkpoint of the run, or a merge without weights, gets right; kept in memory."""
        with self._lock:
            logits = self._checkpoint_logits(checkpoint, data)
        return right_answers(*self.answers(logits, data, site))

    def _checkpoint_logits(self, checkpoint: Candidate, data: DataSet) -> NDArray[np.float32]:
        key = (data.name, checkpoint)
        if key not in self._checkpoints:
            self._checkpoints[key] = data.evaluator.logits(self.merges.state(checkpoint)).float().cpu().numpy()
        return self._checkpoints[key]

    def predictions(self, setting: Setting, data: DataSet) -> tuple[list[str], list[str]]:
        """Returns the classes that a model predicts for the samples, and those that the base does with its prior."""
        with self._lock:
            tables = [self._logits(setting, data, None)[0], self._checkpoint_logits(BASE, data)]
        named = []
        for logits in tables:
            scores, _, bias = self.answers(logits, data, setting.site)
            chosen = (scores if bias is None else scores + bias).argmax(axis=1)
            named.append([self.head.classes[index] for index in chosen.tolist()])
        return named[0], named[1]

    def keeps(self, setting: Setting, data: DataSet) -> bool:
        """Whether a model's logits are in memory."""
        return (data.name, *_model_key(setting)) in self._kept

    def knows(self, checkpoint: Candidate, data: DataSet) -> bool:
        """Whether a checkpoint was measured already."""
        return (data.name, checkpoint) in self._checkpoints

    def forget(self, name: str) -> None:
        """Forgets what was kept of a data set."""
        with self._lock:
            for kept in (self._kept, self._checkpoints):
                for key in [key for key in kept if key[0] == name]:
                    del kept[key]

    def report(self, setting: Setting) -> MergeReport:
        """Returns the report of a merge, which is made if it is not kept."""
        key = _model_key(setting)
        with self._lock:
            if key not in self._reports:
                self._state(setting)
            return self._reports[key]

    def _state(self, setting: Setting) -> dict[str, Any]:
        candidate = setting.candidate
        state = self.merges.state(candidate, setting.weights if candidate.weighted else None)
        self._reports[_model_key(setting)] = self.merges.reports.pop(candidate)
        _shorten(self._reports)
        return state

    def _logits(
        self, setting: Setting, data: DataSet, check: Callable[[], None] | None
    ) -> tuple[NDArray[np.float32], dict[str, float]]:
        key = (data.name, *_model_key(setting))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], {"merge": 0.0, "evaluate": 0.0}
        began = time.perf_counter()
        state = self._state(setting)
        merged = time.perf_counter()
        if check is not None:
            check()
        progress = None if check is None else (lambda phase, done, total: check())
        self._kept[key] = data.evaluator.logits(state, progress).float().cpu().numpy()
        _shorten(self._kept)
        seconds = {"merge": merged - began, "evaluate": time.perf_counter() - merged}
        return self._kept[key], {phase: round(value, 4) for phase, value in seconds.items()}

    def answers(
        self, logits: NDArray[np.float32], data: DataSet, site: Preference | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32] | None]:
        """Returns scores, the truth, and the bias that a site's head adds to the scores."""
        truth = data.evaluator.truth
        if site is None or site.prior is None:
            return logits, truth, None
        factor, bias = self._site(site)
        return logits * np.float32(factor), truth, bias

    def _site(self, site: Preference) -> tuple[float, NDArray[np.float32] | None]:
        from tunable_magmax.preference.calibration import Calibration

        assert site.prior is not None
        key = (site.weights, _digest(vars(site.prior)))
        with self._lock:
            if key not in self._heads:
                if self._calibration is None:
                    self._calibration = Calibration(self.head, self.run.profiles)
                head = self.head.with_bias(site.prior.bias(self.head.classes), self._calibration.factor(site.weights))
                self._heads[key] = head.logit_scale / self.head.logit_scale, head.bias
                _shorten(self._heads)
            return self._heads[key]

    def identify(self, setting: Setting, data: DataSet) -> str:
        """Returns the id of a measurement: equal ids have equal answers."""
        prior = None if setting.site.prior is None else vars(setting.site.prior)
        facts = [self._identity, data.digest, self.merges.seed, [*_model_key(setting)], prior]
        return _digest(facts)[:12]


BASE = Candidate("base", checkpoint=0)


def _model_key(setting: Setting) -> tuple[Any, ...]:
    candidate = setting.candidate
    weights = setting.weights if setting.exact is None else tuple(map(str, setting.exact))
    return (weights if candidate.weighted else None, setting.scale, setting.method)


def _shorten(kept: OrderedDict[tuple[Any, ...], Any]) -> None:
    while len(kept) > KEPT:
        kept.popitem(last=False)


def _sizes(path: Path) -> list[Any]:
    """Returns names, sizes and times of the files behind a checkpoint, wherever it lies."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
