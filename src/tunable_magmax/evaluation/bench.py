"""`Bench`: the models of a run, merged in memory, with heads fitted to each; whatever scores models scores here.

A model costs a merge and a forward pass over the samples; its features stay in memory, so that another head, prior or
mix costs neither.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats, unit_rows
from tunable_magmax.data.samples import Samples
from tunable_magmax.errors import InputError
from tunable_magmax.evaluation.accuracy import LEVEL, Accuracy, Ints
from tunable_magmax.evaluation.labelled import Labelled
from tunable_magmax.evaluation.run_models import MergeSpec, RunModels
from tunable_magmax.files import Progress
from tunable_magmax.models.builtin import INPUT, BuiltinEncoder
from tunable_magmax.models.fitting import FittedHead, FoldedRows, Rows, View, fit_head
from tunable_magmax.models.head import Linear
from tunable_magmax.runs.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from tunable_magmax.merging.report import MergeReport
    from tunable_magmax.models.encoder import Encoder, Refill
    from tunable_magmax.models.head import Head
    from tunable_magmax.models.prepared import Prepared

CACHE_BYTES = 512 << 20
"""Features that stay in memory."""
ANCHORS = 100
"""Samples of each kind that show how features move from a task's checkpoint to a merged model."""
LEAST_WEIGHT = 0.01
"""A task of less weight hardly matters."""
HEADS = 256
"""Heads that stay in memory."""
FOLDED = 6
"""Models whose labelled rows stay in memory with their discriminants, a few megabytes each."""
LABELLED_COUNT = 3.0
"""How many kept samples a labelled sample of the site counts for."""


@dataclass(frozen=True, eq=False)
class BenchData:
    """Decoded samples: `labels` [n] are indices into the bench's classes, `tasks` [n] the samples' tasks; -1: unknown.

    `name` is what their features are kept under.
    """

    name: str
    prepared: Prepared
    labels: Ints
    tasks: Ints

    def __len__(self) -> int:
        return len(self.prepared)

    def take(self, rows: Sequence[int] | Ints, name: str) -> BenchData:
        """Returns some of the samples under another name."""
        index = np.asarray(rows, dtype=np.int64)
        return BenchData(name, self.prepared.subset(index.tolist()), self.labels[index], self.tasks[index])


@dataclass(frozen=True, eq=False)
class SiteFacts:
    """What heads are fitted with for one site.

    `weights` [T]: the mixture; `shares` [classes]: how often each class occurs there. `kept`: samples of the tasks;
    `labelled`, `inputs`: those of the site, with and without labels. `moved`: whether the rows of profiles are used,
    moved as the site's inputs and the kept samples show.
    """

    weights: tuple[float, ...]
    shares: Floats
    kept: BenchData | None = None
    labelled: BenchData | None = None
    inputs: BenchData | None = None
    moved: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        """What a fitted head is kept under."""
        parts = (self.kept, self.labelled, self.inputs)
        names = tuple(None if part is None else part.name for part in parts)
        return (self.weights, self.shares.tobytes(), names, self.moved)


class Bench:
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
        import torch

        from tunable_magmax.models.encoder import load_encoder
        from tunable_magmax.models.head import load_head, require_match

        self.run, self.progress, self.precise = run, progress, precise
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        options: dict[str, Any] = {"seed": seed, "device": where, "progress": progress}
        self.models = RunModels(run.base, run.tasks, builtin=run.head is None, **options)
        self.encoder: Encoder
        if self.models.labels is not None:
            self.encoder = self.models.encoder(device)
            self.frozen: Head | None = None
            self.classes: tuple[str, ...] = self.models.labels
        else:
            if head is None and run.head is None:
                raise InputError(f"{run.path} has neither a head nor tasks with classifiers: `tmx init` can add one")
            self.encoder = load_encoder(run.base, device)
            self.frozen = load_head(run.head) if head is None and run.head is not None else head
            assert self.frozen is not None
            require_match(self.encoder, self.frozen)
            self.classes = self.frozen.classes
        self._places = {name: index for index, name in enumerate(self.classes)}
        self._lock = threading.RLock()
        self._filled: MergeSpec | None = None
        self._refill: dict[tuple[str, ...], Refill] = {}
        self._features: OrderedDict[tuple[Any, ...], NDArray[np.float32]] = OrderedDict()
        self._old: OrderedDict[MergeSpec, Linear] = OrderedDict()
        self._heads: OrderedDict[tuple[Any, ...], FittedHead] = OrderedDict()
        self._joined: dict[str, BenchData] = {}
        self._moves: dict[tuple[int, str], tuple[Floats, Floats]] = {}
        self._folded: OrderedDict[tuple[Any, ...], FoldedRows] = OrderedDict()
        self.embedded = 0
        """Forward passes so far, in samples."""

    def __enter__(self) -> Self:
        return self

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
            return self.encoder.views if self.encoder.has_bias else ()
        return (View(INPUT, slice(None)),)

    # -- samples -----------------------------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        samples: Samples,
        labels: Sequence[str | None] | None = None,
        tasks: Sequence[int] | None = None,
        *,
        strict: bool = False,
    ) -> BenchData:
        """Decodes samples; those that cannot be read are left out with a warning. `labels`: class names, if known."""
        from tunable_magmax.models.prepared import prepare

        prepared = prepare(self.encoder, samples, strict=strict, progress=self.progress)
        if labels is None and samples.labels is not None:
            labels = [samples.classes[label] for label in samples.labels]
        kept = list(prepared.positions)
        known = [-1 if labels is None else self._places.get(str(labels[k]), -1) for k in kept]
        owners = [-1 if tasks is None else tasks[k] for k in kept]
        return BenchData(name, prepared, np.array(known, dtype=np.int64), np.array(owners, dtype=np.int64))

    def open_labelled(self, name: str, labelled: Labelled, *, strict: bool = False) -> BenchData:
        """Decodes samples that are labelled in the bench's classes."""
        from tunable_magmax.models.prepared import prepare

        options: dict[str, Any] = {"strict": strict, "progress": self.progress}
        prepared = prepare(self.encoder, labelled.samples, labelled.positions, **options)
        kept = labelled.readable(prepared.positions)
        tasks = np.full(len(kept), -1, dtype=np.int64) if kept.sample_tasks is None else kept.sample_tasks
        return BenchData(name, prepared, kept.targets, tasks)

    def join(self, name: str, parts: Sequence[BenchData]) -> BenchData:
        """Returns several data as one."""
        from tunable_magmax.models.prepared import joined

        prepared = joined([part.prepared for part in parts], self.encoder)
        return BenchData(
            name,
            prepared,
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.tasks for part in parts]),
        )

    def forget(self, name: str) -> None:
        """Forgets what was kept of some data."""
        with self._lock:
            gone = {name, *(data.name for key, data in self._joined.items() if name in key)}
            for key in [key for key in self._features if key[1] in gone]:
                del self._features[key]
            for key in [key for key in self._heads if name in key[1][2]]:
                del self._heads[key]
            self._joined = {key: data for key, data in self._joined.items() if name not in key}
            self._folded = OrderedDict((key, rows) for key, rows in self._folded.items() if name not in key[1])
            self._moves = {key: move for key, move in self._moves.items() if name not in key[1]}

    # -- models ------------------------------------------------------------------------------------------------------

    def features(
        self, spec: MergeSpec, data: BenchData, check: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        """Returns what a model makes of samples, [n, dim], before any head; kept in memory.

        `check` is called now and then, and may raise to stop it.
        """
        key = (spec, data.name)
        with self._lock:
            if key not in self._features:
                self._fill(spec)
                if check is not None:
                    check()
                self._features[key] = self._embedded(data, check)
                self._shorten()
            self._features.move_to_end(key)
            return self._features[key]

    def keeps(self, spec: MergeSpec, data: BenchData) -> bool:
        """Whether a model's features are in memory."""
        return (spec, data.name) in self._features

    def report(self, spec: MergeSpec) -> MergeReport:
        """Returns the report of a merge, which is made if it was not."""
        with self._lock:
            if spec not in self.models.reports:
                self.models.state(spec)
            return self.models.reports[spec]

    def old_head(self, spec: MergeSpec) -> Linear:
        """Returns the head that a model has without fitting, as a matrix over its features."""
        if self.frozen is not None:
            return Linear(self.frozen.weight.astype(np.float64), self.frozen.bias.astype(np.float64))
        with self._lock:
            if spec not in self._old:
                self._fill(spec)
            return self._old[spec]

    def rows(self, features: NDArray[np.float32]) -> Floats:
        """Returns features as heads read them: of unit length for a frozen head, as they are for a builtin one."""
        return unit_rows(features) if self.frozen is not None else features.astype(np.float64)

    def logits(self, spec: MergeSpec, data: BenchData, head: Linear | None = None) -> Floats:
        """Returns the logits [n, classes] of a model, by default with its old head."""
        used = self.old_head(spec) if head is None else head
        return used.logits(self.rows(self.features(spec, data)))

    def _fill(self, spec: MergeSpec) -> None:
        from tunable_magmax.models.encoder import Refill

        if self._filled == spec:
            return
        state = self.models.state(spec)
        names = tuple(state)
        if names not in self._refill:
            self._refill[names] = Refill(self.encoder, state)
        self._filled = None
        self._refill[names](state)
        self._filled = spec
        if isinstance(self.encoder, BuiltinEncoder):
            self._old[spec] = self.encoder.linear
            while len(self._old) > HEADS:
                self._old.popitem(last=False)

    def _embedded(self, data: BenchData, check: Callable[[], None] | None) -> NDArray[np.float32]:
        from tunable_magmax.models.prepared import embed_prepared

        self.embedded += len(data)
        options: dict[str, Any] = {"precise": self.precise, "check": check, "progress": self.progress}
        return embed_prepared(self.encoder, data.prepared, **options)

    def _shorten(self) -> None:
        total = sum(values.nbytes for values in self._features.values())
        while total > CACHE_BYTES and len(self._features) > 1:
            total -= self._features.popitem(last=False)[1].nbytes

    # -- fitted heads ------------------------------------------------------------------------------------------------

    def fit(self, spec: MergeSpec, site: SiteFacts, check: Callable[[], None] | None = None) -> FittedHead:
        """Returns the head that fits a model at a site; kept in memory."""
        key = (spec, site.key)
        with self._lock:
            if key not in self._heads:
                old = self.old_head(spec)
                rows = self._folded_rows(spec, site, check)
                self._heads[key] = fit_head(rows, site.shares, old, old_shares=self.imbalance, views=self.views)
                while len(self._heads) > HEADS:
                    self._heads.popitem(last=False)
            return self._heads[key]

    def _folded_rows(self, spec: MergeSpec, site: SiteFacts, check: Callable[[], None] | None) -> FoldedRows:
        """Returns the rows that a head is fitted to; those of the latest models are kept for other sites."""
        _, _, names, moved = site.key
        matter = tuple(weight >= LEAST_WEIGHT for weight in site.weights) if moved and not self.is_builtin else None
        key = (spec, names, moved, site.weights if self._shared_classes.any() else matter)
        if key not in self._folded:
            rows = self._labelled_rows(spec, site, check)
            width = self.old_head(spec).weight.shape[1]
            empty = Rows.of(np.zeros((0, width)), [])
            self._folded[key] = FoldedRows(empty if rows is None else rows, len(self.classes))
            while len(self._folded) > FOLDED:
                self._folded.popitem(last=False)
        self._folded.move_to_end(key)
        return self._folded[key]

    def _labelled_rows(self, spec: MergeSpec, site: SiteFacts, check: Callable[[], None] | None) -> Rows | None:
        parts: list[Rows] = []
        for data, count in ((site.kept, 1.0), (site.labelled, LABELLED_COUNT)):
            if data is None:
                continue
            known = np.flatnonzero(data.labels >= 0)
            if len(known):
                features = self.rows(self.features(spec, data, check)[known])
                counts = count * self._task_counts(data, site)[known]
                parts.append(Rows.of(features, data.labels[known], counts))
        if site.moved and not self.is_builtin:
            parts += self._moved_rows(spec, site, judges=not parts)
        if not parts:
            return None
        return Rows.of(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("features", "labels", "counts", "judged")
            )
        )

    def _task_counts(self, data: BenchData, site: SiteFacts) -> Floats:
        """Returns how much each row counts for its class: by its task's weight where tasks share classes, else 1."""
        counts = np.ones(len(data))
        shared = np.flatnonzero(self._shared_classes)
        if not len(shared) or (data.tasks < 0).all():
            return counts
        weights = np.asarray(site.weights)
        for label in shared:
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
        anchors = None if spec.is_base else self._anchors(site)
        parts = []
        for t, profile in enumerate(self.run.profiles):
            if profile is None or profile.base_features is None or profile.row_labels is None:
                continue
            if site.weights[t] < LEAST_WEIGHT and not judges:
                continue
            known = np.array([self._places.get(name, -1) for name in profile.classes])[profile.row_labels]
            chosen = np.flatnonzero(known >= 0)
            own = MergeSpec(checkpoint=t + 1)
            rows = self.rows(profile.base_features[chosen] if spec.is_base else profile.features[chosen])
            if anchors is not None and spec != own and site.weights[t] >= LEAST_WEIGHT:
                key = (t, anchors.name)
                if key not in self._moves:  # f (S'S + I)^-1 S', the same for all models
                    before = self.rows(self.features(own, anchors))
                    gram = before.T @ before + np.eye(before.shape[1])
                    self._moves[key] = before, rows @ np.linalg.solve(gram, before.T)
                before, shares = self._moves[key]
                rows = unit_rows(rows + shares @ (self._anchor_rows(spec, site, anchors) - before))
            parts.append(Rows.of(rows, known[chosen], None, np.full(len(chosen), judges)))
        return parts

    def _anchors(self, site: SiteFacts) -> BenchData | None:
        """Returns the samples that show how features move: `ANCHORS` of the site's inputs and of the kept samples."""
        given = [data for data in (site.inputs, site.kept) if data is not None]
        name = f"anchors of {', '.join(data.name for data in given)}"
        if given and name not in self._joined:
            parts = [data.take(_spread(len(data), ANCHORS), f"{data.name}, some") for data in given]
            self._joined[name] = parts[0] if len(parts) == 1 else self.join(name, parts)
        return self._joined.get(name)

    def _anchor_rows(self, spec: MergeSpec, site: SiteFacts, anchors: BenchData) -> Floats:
        """Returns the anchors as a model embeds them; kept samples were embedded to fit to them."""
        if site.inputs is None and site.kept is not None and self.keeps(spec, site.kept):
            return self.rows(self.features(spec, site.kept)[_spread(len(site.kept), ANCHORS)])
        return self.rows(self.features(spec, anchors))

    # -- classes and tasks -------------------------------------------------------------------------------------------

    @property
    def class_tables(self) -> Floats:
        """How many samples of each of the bench's classes every task has [T, classes]."""
        if not hasattr(self, "_tables"):
            tables = np.zeros((len(self.run.tasks), len(self.classes)))
            for t, counts in enumerate(self.run.label_tables or []):
                for name, count in counts.items():
                    if name in self._places:
                        tables[t, self._places[name]] = count
            self._tables = tables
        return self._tables

    @property
    def _shared_classes(self) -> NDArray[np.bool_]:
        """Which classes several tasks have [classes]."""
        shared: NDArray[np.bool_] = (self.class_tables > 0).sum(axis=0) > 1
        return shared

    @property
    def imbalance(self) -> Floats | None:
        """How uneven classes were inside the tasks, which the old head has learned [classes]; None: not known."""
        tables = self.class_tables
        if not tables.any():
            return None
        totals = tables.sum(axis=1, keepdims=True)
        sizes = (tables > 0).sum(axis=1, keepdims=True)
        relative = np.divide(tables * sizes, totals, out=np.zeros_like(tables), where=totals > 0)
        holders = (tables > 0).sum(axis=0)
        mean = np.divide(relative.sum(axis=0), holders, out=np.ones(len(holders)), where=holders > 0)
        found: Floats = np.where(holders > 0, mean, 1.0)
        return found


@dataclass(frozen=True)
class Measured:
    """The accuracy of one model; `unreadable`: samples that were left out because they cannot be read."""

    accuracy: Accuracy
    unreadable: int


def measure_model(
    encoder: Encoder,
    head: Head,
    labelled: Labelled,
    state: Mapping[str, Tensor] | None = None,
    *,
    batch: int | None = None,
    strict: bool = False,
    level: float = LEVEL,
    progress: Progress | None = None,
) -> Measured:
    """Measures one encoder, with the tensors of `state` if given, on labelled samples.

    A builtin head stands for the classifier that the encoder has then; its bias is added.
    """
    from tunable_magmax.models.encoder import Refill
    from tunable_magmax.models.head import require_match
    from tunable_magmax.models.prepared import embed_prepared, prepare

    require_match(encoder, head)
    prepared = prepare(encoder, labelled.samples, labelled.positions, strict=strict, progress=progress)
    if state is not None:
        Refill(encoder, state)(state)
    features = embed_prepared(encoder, prepared, batch, progress=progress)
    if isinstance(encoder, BuiltinEncoder):
        head = encoder.head.with_bias(encoder.head.bias + head.bias)
    accuracy = labelled.readable(prepared.positions).accuracy(head.logits(features), head.classes, level)
    return Measured(accuracy, prepared.failed)


def _spread(count: int, most: int) -> list[int]:
    """Returns at most so many of `count` positions, evenly spread.

    >>> _spread(10, 5)
    [0, 2, 4, 6, 8]
    """
    return sorted({k * count // min(most, count) for k in range(min(most, count))})


@dataclass(frozen=True)
class ExpectedAccuracy:
    """The share of right answers to expect at a site, with a 90 % interval; `samples`: of equal weight, so many."""

    value: float
    low: float
    high: float
    samples: float
    by_task: Mapping[int, float] = field(default_factory=dict)


def expected_accuracy(head: FittedHead, tasks: Ints, mixtures: Floats, seed: int = 0) -> ExpectedAccuracy | None:
    """Returns what a head's judged rows say of a site; None if it has none.

    `tasks` [rows of the head]: each row's task; `mixtures` [draws, T]: what is believed of the site's weights. Each
    draw takes a mixture, and for each task an accuracy that its judged rows allow.
    """
    if not len(head.right):
        return None
    owners = tasks[head.judged]
    rng = np.random.default_rng([seed, 3])
    count = mixtures.shape[1]
    shares = np.zeros((len(mixtures), count))
    value, by_task = 0.0, {}
    mean = mixtures.mean(axis=0)
    covered = 0.0
    for t in range(count):
        mine = owners == t
        weights = head.row_weights[mine]
        if not mine.any() or weights.sum() <= 0:
            shares[:, t] = np.nan
            continue
        weights = weights / weights.sum()
        rate = float(weights @ head.right[mine])
        effective = float(1 / np.square(weights).sum())
        shares[:, t] = rng.beta(rate * effective + 0.5, (1 - rate) * effective + 0.5, len(mixtures))
        by_task[t] = rate
        value += mean[t] * rate
        covered += mean[t]
    if not by_task:  # rows whose tasks are not known: one group
        weights = head.row_weights
        rate, effective = float(weights @ head.right), float(1 / np.square(weights).sum())
        draws = rng.beta(rate * effective + 0.5, (1 - rate) * effective + 0.5, 1000)
        low, high = np.quantile(draws, [0.05, 0.95])
        return ExpectedAccuracy(rate, float(low), float(high), effective)
    known = ~np.isnan(shares)
    each = np.where(known, mixtures, 0.0)
    draws = (each * np.nan_to_num(shares)).sum(axis=1) / np.maximum(each.sum(axis=1), 1e-12)
    low, high = np.quantile(draws, [0.05, 0.95])
    effective = float(1 / np.square(head.row_weights).sum())
    value /= covered
    return ExpectedAccuracy(value, float(min(low, value)), float(max(high, value)), effective, by_task)


def choose_kept(labels: Ints, shares: Floats, most: int) -> list[int]:
    """Returns which of many kept samples to embed: more of the classes that a site has, two of every other, ascending.

    >>> labels = np.array([0] * 9 + [1] * 9)
    >>> np.bincount(labels[choose_kept(labels, np.array([1.0, 0.0]), 8)]).tolist()
    [6, 2]
    """
    from tunable_magmax.lottery import lottery_state, ticket

    if len(labels) <= most:
        return list(range(len(labels)))
    classes = np.unique(labels[labels >= 0])
    start = lottery_state(0, 26, 0)
    members = {c: sorted(np.flatnonzero(labels == c).tolist(), key=lambda p: (ticket(start, p), p)) for c in classes}
    wanted = {c: min(2, len(members[c])) for c in classes}
    left = most - sum(wanted.values())
    goal = {c: shares[c] / max(shares[classes].sum(), 1e-12) * most for c in classes}
    while left > 0:
        open_classes = [c for c in classes if wanted[c] < len(members[c])]
        if not open_classes:
            break
        lacking = max(open_classes, key=lambda c: (goal[c] - wanted[c], -c))
        wanted[lacking] += 1
        left -= 1
    return sorted(p for c in classes for p in members[c][: wanted[c]])
