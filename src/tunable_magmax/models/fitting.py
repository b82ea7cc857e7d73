"""Fits a classifier to an encoder in closed form: a shrinkage discriminant, pooled with the old head, for one site.

logits(x) = a h_old(x) + b h_fit(x) + log(site share): h_fit is a linear discriminant of labelled features that knows no
class shares, h_old the head that the models were trained with, less the class imbalance that it was trained on. The
shrinkage of the discriminant, a and b have the smallest cross-validated log loss, rows weighted as the site. The result
is one matrix and one bias. Linear algebra in float64: its last bits may differ between machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunable_magmax.data.arrays import Floats
from tunable_magmax.errors import InputError
from tunable_magmax.models.discriminant import Discriminant, class_totals, stratified_folds
from tunable_magmax.models.head import Linear

Ints = NDArray[np.int64]
FOLDS = 5
SHRINKAGES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9)
START = 4
"""Where the search for a shrinkage begins."""
CAUTIOUS = 0.2
"""The factor of discriminants that cannot be judged, because no class has two rows: they are far too sure."""
LEAST_GAIN = 0.002
"""A fitted head whose log loss is not smaller than the old one's by this is not worth having."""
TINY_CHANCE = 1e-12
NEWTON_STEPS = 30
SMALL_STEP = 1e-4


@dataclass(frozen=True, eq=False)
class Rows:
    """Labelled features that a head is fitted to.

    `features` [n, dim]; `labels` [n]: class indices; `counts` [n]: how much each counts for its class, 1 unless classes
    are shared by tasks that matter differently; `judged` [n]: whether a row may judge (it was embedded as the site's
    inputs will be); `groups` [n]: rows of one group are copies of one sample and stay in one fold.
    """

    features: Floats
    labels: Ints
    counts: Floats
    judged: NDArray[np.bool_]
    groups: Ints | None = None

    @classmethod
    def of(cls, features: Any, labels: Any, counts: Any = None, judged: Any = None, groups: Any = None) -> Rows:
        """Checks rows; by default all count alike and all may judge."""
        matrix = np.asarray(features, dtype=np.float64)
        owners = np.asarray(labels, dtype=np.int64)
        if matrix.ndim != 2 or owners.shape != (len(matrix),):
            raise InputError(
                f"a head is fitted to features [n, dim] with n labels, not {matrix.shape} and {owners.shape}"
            )
        if not np.isfinite(matrix).all():
            bad = int((~np.isfinite(matrix).all(axis=1)).sum())
            raise InputError(f"{bad} of {len(matrix)} features hold NaN or infinity: the model's numbers are broken")
        count = np.ones(len(matrix)) if counts is None else np.asarray(counts, dtype=np.float64)
        may = np.ones(len(matrix), dtype=bool) if judged is None else np.asarray(judged, dtype=bool)
        return cls(matrix, owners, count, may, None if groups is None else np.asarray(groups, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class View:
    """Columns of the features that a head may be fitted to. `old`: whether the old head reads these columns too."""

    name: str
    columns: slice
    old: bool = True


@dataclass(frozen=True, eq=False)
class FittedHead:
    """A head for one encoder and one site, and what its rows say of it.

    `kind`: "fitted", or "old" where the old head is as good, or nothing could be fitted. `old_share`: a / (a + b), how
    much of the logits is the old head's. `loss`, `old_loss`: cross-validated, None where nothing could be judged.
    `right`, `chances` [judged rows]: whether each judged row is right without its fold, and the probability of its
    class; `row_weights` [judged rows]: how much each counts at the site; `judged`: their positions.
    """

    linear: Linear
    kind: str
    view: str
    rows: int
    shrinkage: float | None
    old_factor: float
    fit_factor: float
    loss: float | None
    old_loss: float | None
    right: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    chances: Floats = field(default_factory=lambda: np.zeros(0))
    row_weights: Floats = field(default_factory=lambda: np.zeros(0))
    judged: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def accuracy(self) -> float | None:
        """The cross-validated share of right answers, weighted as the site; None where nothing could be judged."""
        return float(self.row_weights @ self.right) if len(self.right) else None


def fit_head(
    rows: Rows | FoldedRows,
    site_shares: Any,
    old: Linear | None,
    *,
    old_shares: Any = None,
    views: Sequence[View] | None = None,
) -> FittedHead:
    """Fits a head to labelled rows for a site's class shares [classes].

    `old`: the old head, over the same features; `old_shares` [classes]: what of its logits is class imbalance.

    >>> rows = Rows.of([[1.0, 0.1], [1.0, 0.2], [0.9, 0.0], [0.1, 1.0], [0.2, 1.0], [0.0, 0.9]], [0, 0, 0, 1, 1, 1])
    >>> fit_head(rows, [0.5, 0.5], None).linear.logits(np.array([[1.0, 0.0]])).argmax(axis=1).tolist()
    [0]
    """
    shares = np.asarray(site_shares, dtype=np.float64)
    log_site = np.log(np.maximum(shares / shares.sum(), 1e-9))
    imbalance = np.zeros(len(shares)) if old_shares is None else np.log(np.asarray(old_shares, dtype=np.float64))
    fair = None if old is None else Linear(old.weight, old.bias - imbalance)
    folded = rows if isinstance(rows, FoldedRows) else FoldedRows(rows, len(shares))
    problem = _Problem.of(folded, log_site, fair)
    usable = [view for view in views or [View("features", slice(None))] if view.old or not problem.lacks_classes]
    fits = [found for view in usable if (found := problem.fitted(view)) is not None]
    old_fit = problem.old_only()
    if not fits:
        if old_fit is None:
            raise InputError("there is neither a labelled sample nor an old head to make a head from")
        return old_fit
    best = min(fits, key=lambda fit: np.inf if fit.loss is None else fit.loss)
    return old_fit if old_fit is not None and best.loss is not None and not _is_better(best, old_fit) else best


def _is_better(one: FittedHead, other: FittedHead) -> bool:
    """Whether the first has the smaller log loss on the same rows, by more than a standard error of few rows."""
    gains = np.log(np.maximum(one.chances, TINY_CHANCE)) - np.log(np.maximum(other.chances, TINY_CHANCE))
    mean = float(one.row_weights @ gains)
    error = float(np.sqrt(np.square(one.row_weights * (gains - mean)).sum()))
    return mean > max(LEAST_GAIN, error)


def site_weights(labels: Ints, counts: Floats, shares: Floats) -> Floats:
    """Returns what each row counts at a site: its class's share, spread over the rows of the class; together 1.

    >>> site_weights(np.array([0, 0, 1]), np.ones(3), np.array([0.5, 0.5])).tolist()
    [0.25, 0.25, 0.5]
    """
    totals = np.bincount(labels, weights=counts, minlength=len(shares))
    each = np.divide(shares, totals, out=np.zeros(len(shares)), where=totals > 0)[labels] * counts
    total = each.sum()
    weights: Floats = each / total if total > 0 else np.full(len(labels), 1 / max(1, len(labels)))
    return weights


@dataclass(frozen=True, eq=False)
class _ViewFits:
    """The discriminants of a view: of all rows, and for each fold of the others, with its judging rows."""

    whole: Discriminant
    parts: list[tuple[Ints, Discriminant, Floats]]


class FoldedRows:
    """Rows in folds, with discriminants that are made once: they serve every site. For one old head."""

    def __init__(self, rows: Rows, classes: int) -> None:
        folds = _folds(rows.labels.tobytes())
        if rows.groups is not None:
            first = np.unique(rows.groups, return_index=True, return_inverse=True)
            folds = folds[first[1]][first[2]]
        each = np.zeros((FOLDS, classes))
        np.add.at(each, (folds, rows.labels), 1.0)
        elsewhere = each.sum(axis=0) - each[folds]
        known = elsewhere[np.arange(len(rows)), rows.labels] > 0
        self.rows, self.folds, self.classes = rows, folds, classes
        self.present = np.bincount(rows.labels, minlength=classes) > 0
        self.judged = np.flatnonzero(rows.judged & known)
        """Rows that judge: their class has other rows, in other folds."""
        self._views: dict[str, _ViewFits] = {}

    def fits(self, view: View, anchors: NDArray[Any] | None) -> _ViewFits:
        """Returns the discriminants of a view. `anchors`: directions of classes without rows."""
        if view.name not in self._views:
            rows = self.rows
            features = rows.features[:, view.columns]
            centre = features.mean(axis=0)
            centred = features - centre
            totals = []
            for fold in range(FOLDS):
                mine = self.folds == fold
                totals.append(class_totals(centred[mine], rows.labels[mine], self.classes, rows.counts[mine]))

            def fit(folds: Sequence[int], about: Floats) -> Discriminant:
                counts, sums, scatter = (np.sum([totals[k][part] for k in folds], axis=0) for part in range(3))
                found = Discriminant.of((counts, sums, scatter), about)
                return found if anchors is None else found.with_anchors(anchors)

            parts = []
            for fold in range(FOLDS):
                mine = self.judged[self.folds[self.judged] == fold]
                if len(mine):
                    others = fit([k for k in range(FOLDS) if k != fold], np.zeros_like(centre))
                    parts.append((mine, others, centred[mine] @ others.axes))
            self._views[view.name] = _ViewFits(fit(range(FOLDS), centre), parts)
        return self._views[view.name]


@lru_cache(8)
def _folds(labels: bytes) -> Ints:
    """Returns the folds of int64 labels; kept, since many models are judged by the same rows."""
    return stratified_folds(np.frombuffer(labels, dtype=np.int64), 0, FOLDS)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Folded rows at a site, and all that does not depend on the view."""

    folded: FoldedRows
    log_site: Floats
    old: Linear | None
    weights: Floats
    targets: Floats
    """[judged, classes]: what the rows ask for; a row that was not seen may be of any class."""
    old_scores: Floats | None

    @classmethod
    def of(cls, folded: FoldedRows, log_site: Floats, old: Linear | None) -> _Problem:
        rows, judged = folded.rows, folded.judged
        shares = np.exp(log_site)
        weights = site_weights(rows.labels[judged], rows.counts[judged], shares)
        effective = 1 / np.square(weights).sum() if len(judged) else 1.0
        unseen = 1 / (1 + effective)
        targets = np.tile(unseen * shares / shares.sum(), (len(judged), 1))
        targets[np.arange(len(judged)), rows.labels[judged]] += 1 - unseen
        scores = None if old is None else _centred(old.logits(rows.features[judged]))
        return cls(folded, log_site, old, weights, targets, scores)

    @property
    def rows(self) -> Rows:
        return self.folded.rows

    @property
    def judged(self) -> Ints:
        return self.folded.judged

    @property
    def lacks_classes(self) -> bool:
        """Whether classes have no row at all."""
        return not bool(self.folded.present.all())

    def old_only(self) -> FittedHead | None:
        """Returns the old head with the site's shares, at the scale that the rows ask for."""
        if self.old is None:
            return None
        (factor, loss), judged = self._old_pooled, {}
        if loss is not None and self.old_scores is not None:
            judged = self._judgement(factor * self.old_scores)
        linear = Linear(factor * self.old.weight, factor * self.old.bias + self.log_site)
        return FittedHead(linear, "old", "", len(self.rows), None, factor, 0.0, loss, loss, **judged)

    @cached_property
    def _old_pooled(self) -> tuple[float, float | None]:
        """The old head's factor, and its loss if anything can judge."""
        if self.old_scores is None or not len(self.judged):
            return 1.0, None
        (factor,), loss = self._pooled([self.old_scores], [1.0])
        return factor, loss

    def fitted(self, view: View) -> FittedHead | None:
        """Returns the best head on a view of the features; None if there is nothing to fit to."""
        if not len(self.rows):
            return None
        old = self.old if view.old else None
        fits = self.folded.fits(view, None if old is None else old.weight[:, view.columns])
        whole, parts = fits.whole, fits.parts
        if not len(self.judged):
            factors = (1.0 if old is not None else 0.0, CAUTIOUS)
            return self._finished(view, old, whole, SHRINKAGES[-1], factors, None, {})
        place = np.empty(len(self.rows), dtype=np.int64)
        place[self.judged] = np.arange(len(self.judged))
        tried: dict[int, tuple[float, tuple[float, ...], Floats]] = {}
        start: tuple[float, ...] = (1.0, CAUTIOUS) if old is not None else (CAUTIOUS,)
        for step in (1, -1):
            k, guess = START, start
            while 0 <= k < len(SHRINKAGES):
                if k not in tried:
                    scores = np.empty((len(self.judged), len(self.log_site)))
                    for mine, others, rotated in parts:
                        scores[place[mine]] = others.scores(rotated, SHRINKAGES[k])
                    scores = _centred(scores)
                    tables = [scores] if old is None or self.old_scores is None else [self.old_scores, scores]
                    found, loss = self._pooled(tables, guess)
                    tried[k] = (loss, found, sum(f * t for f, t in zip(found, tables, strict=True)))  # type: ignore[assignment]
                guess = tried[k][1]
                if k != START and tried[k][0] >= tried[k - step][0]:
                    break
                k += step
        # Of equally good ones the largest: with few rows, small ones are a matter of luck.
        least = min(loss for loss, *_ in tried.values())
        best = max(k for k in tried if tried[k][0] <= least + LEAST_GAIN)
        loss, found, logits = tried[best]
        pair = (0.0, found[0]) if len(found) == 1 else (found[0], found[1])
        return self._finished(view, old, whole, SHRINKAGES[best], pair, loss, self._judgement(logits))

    def _pooled(self, tables: Sequence[Floats], start: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """Returns the factors of tables [judged, classes] with the smallest loss, none below 0, and that loss."""
        factors = _least_loss(tables, self.targets, self.weights, self.log_site, np.array(start, dtype=np.float64))
        logits = sum(f * t for f, t in zip(factors, tables, strict=True)) + self.log_site
        right = _log_softmax(logits)[np.arange(len(self.judged)), self.rows.labels[self.judged]]
        return tuple(factors.tolist()), -float(self.weights @ right)

    def _judgement(self, scores: Floats) -> dict[str, Any]:
        logits = scores + self.log_site
        labels = self.rows.labels[self.judged]
        chances = np.exp(_log_softmax(logits)[np.arange(len(labels)), labels])
        return {
            "right": logits.argmax(axis=1) == labels,
            "chances": chances,
            "row_weights": self.weights,
            "judged": self.judged,
        }

    def _finished(
        self,
        view: View,
        old: Linear | None,
        whole: Discriminant,
        shrinkage: float,
        factors: tuple[float, float],
        loss: float | None,
        judged: dict[str, Any],
    ) -> FittedHead:
        weight, bias = whole.linear(shrinkage)
        full = np.zeros((len(self.log_site), self.rows.features.shape[1]))
        full[:, view.columns] = factors[1] * weight
        offset = factors[1] * bias + self.log_site
        if old is not None:
            full, offset = full + factors[0] * old.weight, offset + factors[0] * old.bias
        old_loss = self._old_pooled[1]
        return FittedHead(
            Linear(full, offset), "fitted", view.name, len(self.rows), shrinkage, *factors, loss, old_loss, **judged
        )


def _centred(scores: Floats) -> Floats:
    centred: Floats = scores - scores.mean(axis=1, keepdims=True)
    return centred


def _log_softmax(logits: Floats) -> Floats:
    lowered = logits - logits.max(axis=1, keepdims=True)
    result: Floats = lowered - np.log(np.exp(lowered).sum(axis=1, keepdims=True))
    return result


def _least_loss(tables: Sequence[Floats], targets: Floats, weights: Floats, offset: Floats, start: Floats) -> Floats:
    """Returns factors >= 0 of logit tables with the smallest cross-entropy: Newton's method, since it is convex."""
    factors = start.copy()
    active = list(range(len(tables)))
    wanted = np.array([float(weights @ (targets * table).sum(axis=1)) for table in tables])

    def loss(values: Floats) -> float:
        logits = sum(f * t for f, t in zip(values, tables, strict=True)) + offset
        return -float(weights @ (targets * _log_softmax(logits)).sum(axis=1))

    now = loss(factors)
    for _ in range(NEWTON_STEPS):
        logits = sum(f * t for f, t in zip(factors, tables, strict=True)) + offset
        chances = np.exp(_log_softmax(logits))
        means = [(chances * tables[k]).sum(axis=1) for k in active]
        slope = np.array([weights @ mean for mean in means]) - wanted[active]
        curve = np.array(
            [
                [
                    weights @ ((chances * tables[j] * tables[k]).sum(axis=1) - mean_j * mean_k)
                    for k, mean_k in zip(active, means, strict=True)
                ]
                for j, mean_j in zip(active, means, strict=True)
            ]
        )
        step = np.linalg.solve(curve + 1e-12 * np.eye(len(active)) * max(1.0, float(np.trace(curve))), -slope)
        size = 1.0
        while True:
            tried = factors.copy()
            tried[active] = np.maximum(factors[active] + size * step, 0.0)
            then = loss(tried)
            if then <= now or size < 1e-12:
                break
            size /= 2
        moved = np.abs(tried - factors).max() / max(1e-9, float(np.abs(factors).max()))
        if then <= now:
            factors, now = tried, then
        held = [k for k in active if factors[k] > 0]
        if held and len(held) < len(active):
            active = held
            continue
        if moved < SMALL_STEP or then > now:
            break
    return factors
