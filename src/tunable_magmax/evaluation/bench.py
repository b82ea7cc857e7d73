"""`Bench`: the models of a run, merged in memory, with heads fitted to each; whatever scores models scores here.

A model costs a merge and a forward pass over the samples; its features stay in memory, so that another head, prior or
mix costs neither.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, Ints, product, unit_rows
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.run_models import MergeSpec, RunModels
from tunable_magmax.files import Progress
from tunable_magmax.models.builtin import INPUT, BuiltinEncoder
from tunable_magmax.models.encoder import Encoder, load_encoder, put_weights, usable_device
from tunable_magmax.models.fitting import FittedHead, FoldedRows, View, fit_head
from tunable_magmax.models.head import Head, Linear, load_head, require_match
from tunable_magmax.models.prepared import Prepared, embed_prepared, prepare
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.evaluation.accuracy import Accuracy, Labelled
    from tunable_magmax.merging.report import MergeReport

CACHE_BYTES = 512 << 20
"""Features that stay in memory."""
ANCHORS = 100
"""Samples of each kind that show how features move from a task's checkpoint to a merged model."""
LEAST_WEIGHT = 0.01
"""A task of less weight hardly matters."""
HEADS = 256
"""Heads that stay in memory."""
ROWS_BYTES = 256 << 20
"""Labelled rows that stay in memory, with their discriminants: those of a model and of the tasks that matter."""
LABELLED_COUNT = 3.0
"""How many kept samples a labelled sample of the site counts for."""
Rows: TypeAlias = tuple[Floats, Ints, Floats, NDArray[np.bool_]]
"""Some rows that a head is fitted to: features, labels, what each counts, and whether it judges."""


@dataclass(frozen=True, eq=False)
class BenchData:
    """Decoded samples: `labels` [n] are indices into the bench's classes, `tasks` [n] the samples' tasks; -1: unknown.

    `name` is what their features are kept under. `source`: the decoded samples, or those that these are some of and
    their rows there.
    """

    name: str
    source: Prepared | tuple[BenchData, Ints]
    labels: Ints
    tasks: Ints

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def prepared(self) -> Prepared:
        """The decoded samples, which some are taken out of when they are first embedded."""
        if isinstance(self.source, tuple):
            whole, rows = self.source
            return whole.prepared.subset(rows.tolist())
        return self.source

    def take(self, rows: Sequence[int] | Ints, name: str) -> BenchData:
        """Returns some of the samples under another name."""
        index = np.asarray(rows, dtype=np.int64)
        return BenchData(name, (self, index), self.labels[index], self.tasks[index])


@dataclass(frozen=True, eq=False)
class SiteFacts:
    """What heads are fitted with for one site.

    `weights` [T]: the mixture; `shares` [classes]: how often each class occurs there. `kept`: samples of the tasks;
    `labelled`, `inputs`: those of the site, with and without labels. `moved`: whether the rows of profiles are used,
    moved as the site's inputs and the kept samples show; `anchors`: how many of each of these show it.
    """

    weights: tuple[float, ...]
    shares: Floats
    kept: BenchData | None = None
    labelled: BenchData | None = None
    inputs: BenchData | None = None
    moved: bool = True
    anchors: int = ANCHORS

    @property
    def key(self) -> tuple[Any, ...]:
        """What a fitted head is kept under."""
        parts = (self.kept, self.labelled, self.inputs)
        names = tuple(None if part is None else part.name for part in parts)
        return (self.weights, self.shares.tobytes(), names, self.moved)


class Bench(AbstractContextManager["Bench"]):
    """The models of a run in memory. A context manager; may be used by several threads.

    with Bench(run) as bench:
        data = bench.open("site", samples)
        bench.logits(MergeSpec("average", 1, (0.5, 0.5)), data)
    """

    def __init__(
        self,
        run: Run,
        *,
        head: Head | None = None,
        seed: int = 0,
        device: str | None = None,
        progress: Progress | None = None,
        precise: bool = True,
    ) -> None:
        """Reads the run. `head`: the frozen head, by default the run's, or the classifiers that the tasks have."""
        self.run, self.progress, self.precise = run, progress, precise
        options: dict[str, Any] = {"seed": seed, "device": usable_device(device), "progress": progress}
        self.models = RunModels(run.base, run.tasks, builtin=run.head is None, **options)
        if self.models.labels is not None:
            self.encoder: Encoder = self.models.encoder(device)
            self.frozen: Head | None = None
            self.classes: tuple[str, ...] = self.models.labels
        else:
            head = load_head(run.head) if head is None and run.head is not None else head
            if head is None:
                add = run.how_to_add("--head", "HEAD")
                raise InputError(f"{run.path} has neither a head nor tasks with classifiers: {add} adds one")
            self.encoder, self.frozen, self.classes = load_encoder(run.base, device), head, head.classes
            require_match(self.encoder, head)
        self._places = {name: index for index, name in enumerate(self.classes)}
        self._lock = threading.RLock()
        self._filled: MergeSpec | None = None
        self._features: OrderedDict[tuple[MergeSpec, str], NDArray[np.float32]] = OrderedDict()
        self._old: OrderedDict[MergeSpec, Head] = OrderedDict()
        self._heads: OrderedDict[tuple[Any, ...], FittedHead] = OrderedDict()
        self._folded: OrderedDict[tuple[Any, ...], FoldedRows] = OrderedDict()
        self._moves: dict[tuple[Any, ...], tuple[Floats, Floats]] = {}
        self.embedded = 0
        """Forward passes so far, in samples."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the task vectors."""
        with self._lock:
            self.models.close()

    @property
    def is_builtin(self) -> bool:
        """Whether the models have classifiers of their own."""
        return self.frozen is None

    @property
    def views(self) -> tuple[View, ...]:
        """What of the features a head can be fitted to; none if a head could not be written."""
        if isinstance(self.encoder, BuiltinEncoder):
            return self.encoder.views
        return (View(INPUT, slice(None)),)

    # -- samples -----------------------------------------------------------------------------------------------------

    def open(self, name: str, samples: Samples, tasks: Sequence[int] | None = None) -> BenchData:
        """Decodes samples; those that cannot be read are left out with a warning."""
        unknown = [-1] * len(samples)
        known = unknown if samples.labels is None else [self._places.get(c, -1) for c in samples.label_names()]
        prepared = prepare(self.encoder, samples, progress=self.progress)
        kept = list(prepared.positions)
        labels, owners = (np.array(each, dtype=np.int64)[kept] for each in (known, tasks or unknown))
        return BenchData(name, prepared, labels, owners)

    def open_labelled(self, name: str, labelled: Labelled) -> BenchData:
        """Decodes samples that are labelled in the bench's classes."""
        prepared = prepare(self.encoder, labelled.samples, labelled.positions, progress=self.progress)
        kept = labelled.readable(prepared.positions)
        tasks = np.full(len(kept), -1, dtype=np.int64) if kept.sample_tasks is None else kept.sample_tasks
        return BenchData(name, prepared, kept.targets, tasks)

    def forget(self, name: str) -> None:
        """Forgets what was kept of some data."""
        with self._lock:
            some = f"{name}, some "
            for key in [key for key in self._features if key[1] == name or key[1].startswith(some)]:
                del self._features[key]
            for key in [key for key in self._heads if name in key[1][2]]:
                del self._heads[key]
            self._folded = OrderedDict((key, rows) for key, rows in self._folded.items() if name not in key[1])
            self._moves = {
                key: move for key, move in self._moves.items() if not any(part.startswith(some) for part in key[1:])
            }

    # -- models ------------------------------------------------------------------------------------------------------

    def features(self, spec: MergeSpec, data: BenchData) -> NDArray[np.float32]:
        """Returns what a model makes of samples, [n, dim], before any head; kept in memory.

        A model that is the same for every site embeds all samples at once, of which these may be a part.
        """
        if isinstance(data.source, tuple):
            whole, rows = data.source
            everywhere = spec.weights is None and spec.checkpoint in (None, 0, len(self.run.tasks))
            if everywhere or self.keeps(spec, whole):
                return self.features(spec, whole)[rows]
        key = (spec, data.name)
        with self._lock:
            if key not in self._features:
                self._fill(spec)
                self.embedded += len(data)
                progress = self.progress
                features = embed_prepared(self.encoder, data.prepared, precise=self.precise, progress=progress)
                _keep(self._features, key, features, CACHE_BYTES, size=lambda kept: kept.nbytes)
            self._features.move_to_end(key)
            return self._features[key]

    def keeps(self, spec: MergeSpec, data: BenchData) -> bool:
        """Whether a model's features are in memory."""
        whole = data.source[0] if isinstance(data.source, tuple) else None
        return (spec, data.name) in self._features or (whole is not None and self.keeps(spec, whole))

    def report(self, spec: MergeSpec) -> MergeReport:
        """Returns the report of a merge, which is made if it was not."""
        with self._lock:
            if spec not in self.models.reports:
                self.models.state(spec)
            return self.models.reports[spec]

    def old_head(self, spec: MergeSpec) -> Linear:
        """Returns the head that a model has without fitting, as a matrix over its features."""
        with self._lock:
            if self.is_builtin and spec not in self._old:
                self._fill(spec)
            head = self.frozen or self._old[spec]
        return Linear(head.weight.astype(np.float64), head.bias.astype(np.float64))

    def rows(self, features: NDArray[np.float32]) -> Floats:
        """Returns features as heads read them: of unit length for a frozen head, as they are for a builtin one."""
        return unit_rows(features) if self.frozen is not None else features.astype(np.float64)

    def logits(self, spec: MergeSpec, data: BenchData, head: Linear | None = None) -> Floats:
        """Returns the logits [n, classes] of a model, by default with its old head."""
        used = self.old_head(spec) if head is None else head
        return used.logits(self.rows(self.features(spec, data)))

    def _fill(self, spec: MergeSpec) -> None:
        if self._filled == spec:
            return
        state = self.models.state(spec)
        self._filled = None
        put_weights(self.encoder, state)
        self._filled = spec
        if isinstance(self.encoder, BuiltinEncoder):
            _keep(self._old, spec, self.encoder.head, HEADS)

    # -- fitted heads ------------------------------------------------------------------------------------------------

    def fit(self, spec: MergeSpec, site: SiteFacts) -> FittedHead:
        """Returns the head that fits a model at a site; kept in memory."""
        key = (spec, site.key)
        with self._lock:
            if key not in self._heads:
                head = fit_head(self._folded_rows(spec, site), site.shares, self.views)
                _keep(self._heads, key, head, HEADS)
            return self._heads[key]

    def _folded_rows(self, spec: MergeSpec, site: SiteFacts) -> FoldedRows:
        """Returns the rows that a head is fitted to; those of the latest models are kept for other sites."""
        _, _, names, moved = site.key
        matter = tuple(weight >= LEAST_WEIGHT for weight in site.weights) if moved and not self.is_builtin else None
        key = (spec, names, moved, site.weights if self._shared_classes.any() else matter)
        if key not in self._folded:
            none: Any = np.zeros(0, dtype=np.int64)
            parts = self._labelled_rows(spec, site) or [(np.zeros((0, self.encoder.dim)), none, none, none)]
            features, labels, counts, judges = map(np.concatenate, zip(*parts, strict=True))
            old: dict[str, Any] = {"old": self.old_head(spec), "old_shares": self.imbalance}
            device = self.encoder.device
            folded = FoldedRows(features, labels, len(self.classes), counts, judges, device=device, **old)
            _keep(self._folded, key, folded, ROWS_BYTES, size=lambda kept: kept.features.nbytes)
        self._folded.move_to_end(key)
        return self._folded[key]

    def _labelled_rows(self, spec: MergeSpec, site: SiteFacts) -> list[Rows]:
        parts = []
        for data, count in ((site.kept, 1.0), (site.labelled, LABELLED_COUNT)):
            known = np.flatnonzero(data.labels >= 0) if data is not None else ()
            if data is not None and len(known):
                features = self.rows(self.features(spec, data)[known])
                counts = count * self._task_counts(data, site)[known]
                parts.append((features, data.labels[known], counts, np.ones(len(known), dtype=bool)))
        if site.moved and not self.is_builtin:
            parts += self._moved_rows(spec, site, judges=not parts)
        return parts

    def _task_counts(self, data: BenchData, site: SiteFacts) -> Floats:
        """Returns how much each row counts for its class: by its task's weight where tasks share classes, else 1."""
        counts, weights = np.ones(len(data)), np.asarray(site.weights)
        for label in np.flatnonzero(self._shared_classes):
            mine = np.flatnonzero((data.labels == label) & (data.tasks >= 0))
            each = weights[data.tasks[mine]]
            if len(mine) and each.sum() > 0:
                counts[mine] = each * len(mine) / each.sum()
        return np.maximum(counts, 1e-3)

    def _moved_rows(self, spec: MergeSpec, site: SiteFacts, judges: bool) -> list[Rows]:
        """Returns the labelled rows of profiles, as the model would embed them: moved by a ridge map per task.

        f + f (S'S + I)^-1 S'(M - S), where S and M are anchors before and after: some of the site's inputs and of the
        kept samples, as the task's checkpoint and the model embed them. The base's rows need no map where the model is
        the base. Tasks that hardly matter are left out where there are other rows.
        """
        anchors = [] if spec.is_base else self._anchors(site)
        parts = []
        for t, profile in enumerate(self.run.profiles):
            if profile is None or (site.weights[t] < LEAST_WEIGHT and not judges):
                continue
            known = np.array([self._places.get(name, -1) for name in profile.classes])[profile.row_labels]
            chosen = np.flatnonzero(known >= 0)
            own = MergeSpec(checkpoint=t + 1)
            rows = self.rows(profile.base_features[chosen] if spec.is_base else profile.features[chosen])
            if anchors and spec != own and site.weights[t] >= LEAST_WEIGHT:
                key = (t, *(some.name for some in anchors))
                if key not in self._moves:  # f (S'S + I)^-1 S', the same for all models
                    before = self._anchor_rows(own, anchors)
                    gram = before.T @ before + np.eye(before.shape[1])
                    self._moves[key] = before, rows @ np.linalg.solve(gram, before.T)
                before, shares = self._moves[key]
                rows = unit_rows(rows + product(shares, self._anchor_rows(spec, anchors) - before))
            parts.append((rows, known[chosen], np.ones(len(chosen)), np.full(len(chosen), judges)))
        return parts

    def _anchors(self, site: SiteFacts) -> list[BenchData]:
        """Returns what shows how features move: some of the site's inputs, and of its kept samples."""
        anchors = []
        for data in (data for data in (site.inputs, site.kept) if data is not None):
            count = min(len(data), site.anchors)
            spread = [k * len(data) // count for k in range(count)]
            anchors.append(data.take(spread, f"{data.name}, some {site.anchors}"))
        return anchors

    def _anchor_rows(self, spec: MergeSpec, anchors: list[BenchData]) -> Floats:
        return self.rows(np.concatenate([self.features(spec, some) for some in anchors]))

    # -- classes and tasks -------------------------------------------------------------------------------------------

    @cached_property
    def class_tables(self) -> Floats:
        """How many samples of each of the bench's classes every task has [T, classes]."""
        tables = np.zeros((len(self.run.tasks), len(self.classes)))
        for t, counts in enumerate(self.run.label_tables or []):
            for name, count in counts.items():
                if name in self._places:
                    tables[t, self._places[name]] = count
        return tables

    @cached_property
    def _shared_classes(self) -> NDArray[np.bool_]:
        """Which classes several tasks have [classes]."""
        shared: NDArray[np.bool_] = (self.class_tables > 0).sum(axis=0) > 1
        return shared

    @cached_property
    def imbalance(self) -> Floats | None:
        """How uneven classes were inside the tasks, which the old head has learned [classes]; None: not known."""
        tables = self.class_tables
        if not tables.any():
            return None
        totals, sizes = tables.sum(axis=1, keepdims=True), (tables > 0).sum(axis=1, keepdims=True)
        relative = tables * sizes / np.maximum(totals, 1)
        holders = (tables > 0).sum(axis=0)
        found: Floats = np.where(holders > 0, relative.sum(axis=0) / np.maximum(holders, 1), 1.0)
        return found


def measure_model(
    encoder: Encoder,
    head: Head,
    labelled: Labelled,
    state: Mapping[str, Tensor] | None = None,
    *,
    progress: Progress | None = None,
) -> tuple[Accuracy, int]:
    """Measures one encoder, with the tensors of `state` if given, on labelled samples; also counts unreadable ones.

    A builtin head stands for the classifier that the encoder has then.
    """
    require_match(encoder, head)
    prepared = prepare(encoder, labelled.samples, labelled.positions, progress=progress)
    if state is not None:
        put_weights(encoder, state)
    features = embed_prepared(encoder, prepared, progress=progress)
    if isinstance(encoder, BuiltinEncoder):
        head = encoder.head
    accuracy = labelled.readable(prepared.positions).accuracy(head.logits(features), head.classes)
    return accuracy, len(labelled) - len(prepared)


def _keep(
    cache: OrderedDict[Any, Any], key: Any, value: Any, most: int, size: Callable[[Any], int] = lambda kept: 1
) -> None:
    """Puts a value into a cache, out of which the oldest others go as long as the sizes are more than `most`."""
    cache[key] = value
    total = sum(map(size, cache.values()))
    while total > most and len(cache) > 1:
        total -= size(cache.popitem(last=False)[1])
